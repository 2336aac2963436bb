"""`semgrad-guard evaluate` and `probe`: the paper's comparisons on your model and your questions, kept in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from semgrad_guard.cli import from_options, terminal
from semgrad_guard.cli.command import Output, code_of_run, one_from_stdin, read_by, require_outputs
from semgrad_guard.cli.terminal import OUT, note, progress, say, say_unscored, show_line
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import Phrasing, Question, QuestionFile, with_paraphrases
from semgrad_guard.questions.data_files import beside
from semgrad_guard.questions.run_record import is_record, sole_writer
from semgrad_guard.settings import DtypeName, JudgedBy

if TYPE_CHECKING:
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.paper.probe_record import Probe
    from semgrad_guard.paper.probing import ProbePlan


def evaluate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    output: list[Path],
    data: Path | None = None,
    column: from_options.Pairs | None = None,
    limit: int | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    methods: list[str] | None = None,
    nli: str | None = None,
    seed: int = 0,
    by: JudgedBy | None = None,
    prompt: str = "plain",
    system: str | None = None,
    max_tokens: int = 256,
    grader: list[str] | None = None,
    labels: Path | None = None,
    regrade: bool = False,
    no_report: bool = False,
    as_json: bool = False,
) -> None:
    """Compare all methods on your model and questions: which score best separates wrong answers from right ones,
    and at what cost?

    The model answers every question, every method scores every answer, the graders compare the answers with the
    references. Every answer is kept as it comes, with all that the numbers are made of; grading comes after, and can be
    repeated with other graders.
    """
    from semgrad_guard.cli import grading, runs
    from semgrad_guard.paper.drawing import require_drawable
    from semgrad_guard.paper.results import read_graded

    by = by or "answer"
    one_from_stdin(data=data, prompt=prompt, system=system, labels=labels)
    folder, *others = output
    files, nli, cross_encoder = runs.EvaluationFolder(folder), *runs.compared_by(nli)
    beside = [read_graded(runs.EvaluationFolder(other).run) for other in others]
    if not no_report:
        require_drawable(files.page.with_suffix(".svg"))
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option)
    phrasing, sources = from_options.phrasing(prompt, system)
    models = [model, *filter(None, (nli, cross_encoder)), *(name.partition("=")[2] or name for name in grader or ())]
    inputs = [*sources, *([labels] if labels else []), *map(Path, [*models, *([data] if data else [])]), *others]
    with files.made():
        files.check(inputs, report=not no_report)
        graders = grading.load_graders(grader or (), nli=nli)
        grading.check_labels(labels, begun_at=files.sheet)
        questions = runs.read(data, column, limit=limit, optional=regrade)
        with sole_writer(files.run):
            if regrade:
                run = runs.kept(files, questions)
            else:
                how: Any = {"seed": seed, "max_tokens": max_tokens, "by": by}
                estimators = runs.estimators_of(methods, nli=nli, cross_encoder=cross_encoder, **how)
                run = runs.answer(questions, files, estimators, source=source, phrasing=phrasing, **how)
            results = runs.grade_run(run, graders, labels, files, questions)
            runs.write(results, files, None if no_report else beside)
        runs.show(results, files, as_json=as_json, reported=not no_report)
        say_unscored(run.answers)
        broken = questions is not None and questions.problems
        unscored = all(answer.unscored is not None for answer in run.answers)
    raise typer.Exit(code_of_run(unscored=unscored, broken=broken))


def probe(  # a command's options are its arguments
    *,
    data: Path,
    output: Path,
    column: from_options.Pairs | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    no_answers: bool = False,
    system: str | None = None,
    paraphrases: str | None = None,
    nli: str | None = None,
    as_json: bool = False,
) -> None:
    """Find where a model keeps the meaning of a prompt, and which prompt token SemGrad should use.

    Questions and their paraphrases give the Semantic Preservation Score of every layer and late token; answers, where
    the file has references, tell where SemGrad works. The record has the token to use and the reason, and
    LanguageModel takes it: semantic_token=TokenChoice.load(FILE).
    """
    from semgrad_guard.paper.drawing import is_drawn, require_drawable
    from semgrad_guard.paper.probe_record import Probe
    from semgrad_guard.paper.probing import KIND, ProbePlan

    # Next to the record the state of an interrupted run, and pictures.
    written, kept, heat_map, scatter = (
        beside(output, suffix) for suffix in (".paraphrases.jsonl", ".answers.jsonl", ".sps.png", ".auroc.png")
    )
    phrasing, sources = from_options.phrasing("plain", system)
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option)
    require_drawable(heat_map)
    outputs = [
        Output(output, "record of a probe", read_by(Probe.load)),
        *([] if paraphrases is None else [Output(written, "record of paraphrases", is_record(KIND))]),
        Output(kept, "record of answers", is_record()),
        *(Output(path, "picture of a probe", is_drawn) for path in (heat_map, scatter)),
    ]
    require_outputs(outputs, inputs=[data, Path(model), *sources])
    questions = from_options.read_data(data, column, needs="question")
    if paraphrases is None:
        with_paraphrases(questions.rows)
    plan = ProbePlan(batch_size=from_options.BATCH, system=phrasing.system)
    with sole_writer(output):
        language_model = from_options.load(source)
        try:
            if paraphrases is not None:
                rows = _paraphrased(questions.rows, written, paraphrases, nli, language_model)
                questions = replace(questions, rows=tuple(rows))
            if left_out := len(questions.rows) - len(with_paraphrases(questions.rows)):
                note(f"{left_out} of {len(questions.rows)} questions have no paraphrases; SPS leaves them out.")
            found = _probe(questions, plan, language_model, None if no_answers else kept)
        except KeyboardInterrupt as error:
            message = f"Finished work is kept next to {output}. Run the same command again to continue."
            say(message, label=terminal.in_words(error))
            raise typer.Exit(terminal.exit_code(error)) from error
        found.save(output)
        drawn = _draw(found, heat_map, scatter)
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        from semgrad_guard.cli.rendering import probe_view

        OUT.print(probe_view(found))
        show_line(f"The record is {output}.")
        show_line(f"Pictures: {', '.join(map(str, drawn))}.")
    raise typer.Exit(code_of_run(broken=questions.problems))


def _paraphrased(
    questions: Sequence[Question], path: Path, writer: str, nli: str | None, model: LanguageModel
) -> list[Question]:
    from semgrad_guard.cli.drafting import asking
    from semgrad_guard.grading.by_name import entailment_model
    from semgrad_guard.paper.probing import by_model, with_written

    url, _, name = writer.partition("#")
    ask = asking(url, name) if name else by_model(model)
    with from_options.quietly("Loading what compares questions …"):
        judge = None if nli is None else entailment_model(nli)
    with progress("Writing paraphrases") as tell:
        named = writer if name else f"{model.identity.name}, {model.identity.fingerprint}"
        return with_written(
            questions, path, ask, writer=named, nli=judge, batch_size=from_options.BATCH, on_progress=tell
        )


def _probe(questions: QuestionFile, plan: ProbePlan, model: LanguageModel, kept: Path | None) -> Probe:
    from semgrad_guard.grading import GRADERS, default_grader
    from semgrad_guard.guard import template_name
    from semgrad_guard.paper.probing import probe

    return probe(
        questions.rows,
        model=model,
        plan=plan,
        data=questions.path.name,
        answers_path=kept,
        grader=GRADERS[default_grader(template_name(model, Phrasing().name()))],
        phase=progress,
    )


def _draw(found: Probe, heat_map: Path, scatter: Path) -> list[Path]:
    from semgrad_guard.paper.drawing import save
    from semgrad_guard.paper.report import sps_auroc_figure, sps_figure

    drawn = [save(sps_figure(found.preservation, title=found.title, tokens=found.labels), heat_map)]
    if (aurocs := found.aurocs) is not None:
        drawn.append(save(sps_auroc_figure(found.preservation, aurocs, title=found.title), scatter))
    return drawn
