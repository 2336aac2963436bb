"""`semgrad-guard probe`: where a model keeps the meaning of a prompt, and which token SemGrad should use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semgrad_guard.cli import loading, options, terminal
from semgrad_guard.cli.command import code_of_run
from semgrad_guard.cli.terminal import OUT, note, progress, say, show_line
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.data import QuestionFile, with_paraphrases
from semgrad_guard.questions.data_files import Output, beside, read_by, require_outputs, sole_writer
from semgrad_guard.questions.job_record import is_record
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.settings import MaxTokens, ModelOptions

if TYPE_CHECKING:
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.paper.probe_record import Probe
    from semgrad_guard.paper.probing import ProbePlan


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
    from semgrad_guard.engine.scores.semantic_preservation import SemanticPreservation
    from semgrad_guard.paper.drawing import is_drawn, require_drawable
    from semgrad_guard.paper.probe_record import Probe
    from semgrad_guard.paper.probing import ProbePlan

    # Next to the record the state of an interrupted run, and pictures.
    states, kept, heat_map, scatter = (
        beside(output, suffix) for suffix in (".states.safetensors", ".answers.jsonl", ".sps.png", ".auroc.png")
    )
    phrasing, sources = loading.phrasing(options.Wording(system=system))
    if plots:
        require_drawable(heat_map)
    outputs = [
        Output(output, "record of a probe", read_by(Probe.load)),
        Output(states, "file of a probe's sums", read_by(SemanticPreservation.read)),
        Output(kept, "record of answers", is_record()),
        *(Output(path, "picture of a probe", is_drawn) for path in (heat_map, scatter) if plots),
    ]
    require_outputs(outputs, inputs=[data, Path(model.model), *sources])
    questions = loading.read_data(data, columns, needs="question", strict=strict)
    if left_out := len(questions.rows) - len(with_paraphrases(questions.rows)):
        note(f"{left_out} of {len(questions.rows)} questions have no paraphrases; SPS leaves them out.")
    plan = ProbePlan(
        tokens=tokens,
        batch_size=batch_size,
        system=phrasing.system,
        options=loading.decoding(options.Decoding(max_tokens=max_tokens)),
    )
    with sole_writer(output):
        language_model = loading.load(ModelSource(**vars(model)))
        try:
            found = _probe(questions, plan, language_model, states, kept if answers else None, grader=grader)
        except KeyboardInterrupt as error:
            message = f"Finished work is kept next to {output}. Run the same command again to continue."
            say(message, label=terminal.in_words(error))
            raise typer.Exit(terminal.exit_code(error)) from error
        found.save(output)
        drawn = _draw(found, heat_map, scatter) if plots else []
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        from semgrad_guard.cli.rendering import probe_view

        OUT.print(probe_view(found))
        show_line(f"The record is {output}.")
        if drawn:
            show_line(f"Pictures: {', '.join(map(str, drawn))}.")
    raise typer.Exit(code_of_run(broken=questions.problems))


def _probe(
    questions: QuestionFile,
    plan: ProbePlan,
    model: LanguageModel,
    states: Path,
    kept: Path | None,
    *,
    grader: str | None,
) -> Probe:
    from semgrad_guard.grading import GRADERS, default_grader
    from semgrad_guard.guard import template_name
    from semgrad_guard.paper.probing import probe

    return probe(
        questions.rows,
        model=model,
        plan=plan,
        data=questions.path.name,
        states_path=states,
        answers_path=kept,
        grader=GRADERS[grader or default_grader(template_name(model, Phrasing().name()))],
        phase=progress,
    )


def _draw(found: Probe, heat_map: Path, scatter: Path) -> list[Path]:
    from semgrad_guard.paper.drawing import save
    from semgrad_guard.paper.figures import sps_auroc_figure, sps_figure

    maps = found.maps
    drawn = [save(sps_figure(maps.sps, title=maps.title, tokens=maps.tokens), heat_map)]
    if maps.auroc is not None:
        drawn.append(save(sps_auroc_figure(maps.sps, maps.auroc, title=maps.title), scatter))
    return drawn
