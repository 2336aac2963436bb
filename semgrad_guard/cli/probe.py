"""`semgrad-guard probe`: where a model keeps the meaning of a prompt, and which token SemGrad should use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semgrad_guard.cli import loading, options, signals
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.cli.terminal import OUT, note, progress, say
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.evaluation.files import Output, beside, read_by, require_outputs, sole_writer
from semgrad_guard.evaluation.job_record import is_record
from semgrad_guard.evaluation.questions.data import QuestionFile, with_paraphrases
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.loading import ModelSource
from semgrad_guard.settings import MaxTokens, ModelOptions

if TYPE_CHECKING:
    from semgrad_guard.evaluation.probing.probe import ProbePlan
    from semgrad_guard.evaluation.probing.probe_record import Probe


_LOOKED_AT = "What is looked at"


def probe(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Annotated[
        Path,
        Option(
            'Questions with "paraphrases" and, best, "answers"; "-" reads them from stdin.',
            options.DATA,
            "FILE",
            reads="stream",
        ),
    ],
    output: Annotated[Path, Option("Where to save the record.", options.DATA, "FILE")],
    model: ModelOptions,
    tokens: Annotated[
        int, Option("How many of a prompt's last tokens to look at.", _LOOKED_AT, "N", Bounds(1, 1_000_000))
    ] = 10,
    answers: Annotated[
        bool, Option("Let the model answer, and see where SemGrad works.", _LOOKED_AT, spelled="--answers/--no-answers")
    ] = True,
    grader: Annotated[
        options.GraderName | None, Option("What counts as correct.", _LOOKED_AT, shown=options.DEFAULT_GRADER)
    ] = None,
    batch_size: options.BatchSize = 8,
    max_tokens: MaxTokens = 64,
    system: options.System = None,
    columns: options.AnsweredColumns,
    plots: Annotated[
        bool, Option("Draw the pictures, next to the record.", options.DATA, spelled="--plots/--no-plots")
    ] = True,
    strict: options.Strict = False,
    as_json: options.AsJson = False,
) -> None:
    """Find where a model keeps the meaning of a prompt, and which prompt token SemGrad should use.

    Questions and their paraphrases give the Semantic Preservation Score of every layer and late token; answers, where
    the file has references, tell where SemGrad works. The record has the token to use and the reason, and
    LanguageModel takes it: semantic_token=TokenChoice.load(FILE).
    """
    from semgrad_guard.evaluation.probing.probe import ProbePlan

    files = _Files.beside(output, plots=plots)
    phrasing, sources = loading.phrasing(options.Wording(system=system))
    files.check([data, Path(model.model), *sources])
    questions = _read(data, columns, strict=strict)
    with sole_writer(output):
        found = _probe(
            questions,
            files,
            ModelSource(**vars(model)),
            answers=answers,
            grader=grader,
            plan=ProbePlan(
                tokens=tokens,
                batch_size=batch_size,
                system=phrasing.system,
                options=loading.decoding(options.Decoding(max_tokens=max_tokens)),
            ),
        )
        found.save(output)
        drawn = _draw(found, files)
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        _show(found, output, drawn)
    raise typer.Exit(ExitCode.BROKEN_LINES if questions.problems else ExitCode.OK)


@dataclass(frozen=True)
class _Files:
    """The files that the command writes: the record, and next to it the state of an interrupted run, and pictures."""

    record: Path
    states: Path
    answers: Path
    map: Path | None
    scatter: Path | None

    @classmethod
    def beside(cls, record: Path, *, plots: bool) -> _Files:
        names = (".states.safetensors", ".answers.jsonl", ".sps.png", ".auroc.png")
        states, answers, heat_map, scatter = (beside(record, name) for name in names)
        return cls(record, states, answers, heat_map if plots else None, scatter if plots else None)

    def check(self, inputs: Sequence[Path]) -> None:
        """Everything that can be refused before any work."""
        from semgrad_guard.evaluation.report.drawing import require_drawable

        if self.map is not None:
            require_drawable(self.map)
        require_outputs(self._outputs(), inputs=inputs)

    def _outputs(self) -> list[Output]:
        from semgrad_guard.engine.scoring.semantic_preservation import SemanticPreservation
        from semgrad_guard.evaluation.probing.probe_record import Probe
        from semgrad_guard.evaluation.report.drawing import is_drawn

        pictures = [path for path in (self.map, self.scatter) if path is not None]
        return [
            Output(self.record, "record of a probe", read_by(Probe.load)),
            Output(self.states, "file of a probe's sums", read_by(SemanticPreservation.read)),
            Output(self.answers, "record of answers", is_record()),
            *(Output(path, "picture of a probe", is_drawn) for path in pictures),
        ]


def _read(data: Path, columns: options.Columns, *, strict: bool) -> QuestionFile:
    questions = loading.read_data(data, columns, needs="question", strict=strict)
    left_out = len(questions.rows) - len(with_paraphrases(questions.rows))
    if left_out:
        note(f"{left_out} of {len(questions.rows)} questions have no paraphrases; SPS leaves them out.")
    return questions


def _probe(
    questions: QuestionFile, files: _Files, source: ModelSource, *, answers: bool, grader: str | None, plan: ProbePlan
) -> Probe:
    from semgrad_guard.evaluation.graders import GRADERS, default_grader
    from semgrad_guard.evaluation.probing.probe import probe
    from semgrad_guard.guard import template_name

    model = loading.load(source)
    try:
        return probe(
            questions.rows,
            model=model,
            plan=plan,
            data=questions.path.name,
            states_path=files.states,
            answers_path=files.answers if answers else None,
            grader=GRADERS[grader or default_grader(template_name(model, Phrasing().name()))],
            phase=progress,
        )
    except KeyboardInterrupt as error:
        kept = f"Finished work is kept next to {files.record}. Run the same command again to continue."
        say(kept, label=signals.in_words(error))
        raise typer.Exit(signals.exit_code(error)) from error


def _draw(found: Probe, files: _Files) -> list[Path]:
    from semgrad_guard.evaluation.report.drawing import save
    from semgrad_guard.evaluation.report.figures import sps_auroc_figure, sps_figure

    maps, drawn = found.maps, list[Path]()
    if files.map is not None:
        drawn.append(save(sps_figure(maps.sps, title=maps.title, tokens=maps.tokens), files.map))
    if files.scatter is not None and maps.auroc is not None:
        drawn.append(save(sps_auroc_figure(maps.sps, maps.auroc, title=maps.title), files.scatter))
    return drawn


def _show(found: Probe, record: Path, drawn: list[Path]) -> None:
    from semgrad_guard.cli.rendering import probe_view

    OUT.print(probe_view(found))
    OUT.print(f"The record is {record}.", soft_wrap=True, markup=False)
    if drawn:
        OUT.print(f"Pictures: {', '.join(map(str, drawn))}.", soft_wrap=True, markup=False)
