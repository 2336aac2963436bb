"""`semgrad-guard evaluate`: every method on your model and your questions, graded, compared, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.command import code_of_run
from semgrad_guard.cli.terminal import say_unscored
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data_files import sole_writer
from semgrad_guard.settings import DtypeName, JudgedBy


def evaluate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    output: list[Path],
    data: Path | None = None,
    column: loading.Pairs | None = None,
    limit: int | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: loading.Pairs | None = None,
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
    from semgrad_guard.cli import evaluate_run as steps
    from semgrad_guard.cli import grading
    from semgrad_guard.paper.drawing import require_drawable
    from semgrad_guard.paper.graded import read_graded

    by = by or "answer"
    options.one_from_stdin(data=data, prompt=prompt, system=system, labels=labels)
    folder, *others = output
    files, nli, cross_encoder = steps.Files(folder), *steps.compared_by(nli)
    beside = [read_graded(steps.Files(other).run) for other in others]
    if not no_report:
        require_drawable(files.page.with_suffix(".svg"))
    source = loading.source_of(model, dtype=dtype, device=device, template_option=template_option)
    phrasing, sources = loading.phrasing(prompt, system)
    models = [model, *filter(None, (nli, cross_encoder)), *(name.partition("=")[2] or name for name in grader or ())]
    inputs = [*sources, *([labels] if labels else []), *map(Path, [*models, *([data] if data else [])]), *others]
    with files.made():
        files.check(inputs, report=not no_report)
        graders = grading.load_graders(grader or (), nli=nli)
        grading.check_labels(labels, begun_at=files.sheet)
        questions = steps.read(data, column, limit=limit, optional=regrade)
        with sole_writer(files.run):
            if regrade:
                run = steps.kept(files, questions)
            else:
                how: Any = {"seed": seed, "max_tokens": max_tokens, "by": by}
                estimators = steps.estimators_of(methods, nli=nli, cross_encoder=cross_encoder, **how)
                run = steps.answer(questions, files, estimators, source=source, phrasing=phrasing, **how)
            results = steps.grade_run(run, graders, labels, files, questions)
            steps.write(results, files, None if no_report else beside)
        steps.show(results, files, as_json=as_json, reported=not no_report)
        say_unscored(run.answers)
        broken = questions is not None and questions.problems
        unscored = all(answer.unscored is not None for answer in run.answers)
    raise typer.Exit(code_of_run(unscored=unscored, broken=broken))
