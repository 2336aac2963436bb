"""`semgrad-guard evaluate`: every method on your model and your questions, graded, compared, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.command import code_of_run
from semgrad_guard.cli.terminal import say_unscored
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data_files import sole_writer


def evaluate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    output: Annotated[
        list[Path],
        options.option(
            "Where everything is kept and written. Repeat the option for finished evaluations that go into the same "
            "report: the first is this one.",
            options.DATA,
            "FOLDER",
            reads=options.path,
        ),
    ],
    data: Annotated[
        str | None,
        options.option(
            "Questions with references: a file or folder of JSON Lines, JSON, CSV or Parquet, "
            "hub:NAME:CONFIG@SPLIT, - (stdin), or pocket. --regrade needs none.",
            options.DATA,
            "SOURCE",
            reads=options.some_text,
        ),
    ] = None,
    column: options.Columns = None,
    limit: Annotated[
        int | None,
        options.option("Only the first N questions.", options.DATA, "N", reads=options.number(int, 1, 2**62)),
    ] = None,
    model: options.Model = POCKET,
    dtype: options.Dtype = None,
    device: options.Device = None,
    template_option: options.Template = None,
    methods: Annotated[
        list[str] | None,
        options.option(
            f"A method to compare; repeat the option for several. There are {', '.join(options.METHOD_NAMES)}. "
            "Default: all.",
            options.DECISION,
            "NAME",
            **options.one_of(options.METHOD_NAMES),
        ),
    ] = None,
    nli: Annotated[
        str | None,
        options.option(
            "An NLI model, for methods that compare answers by their meaning; NLI+cross-encoder=MODEL also names the "
            "one by which SAR weighs words. Default: words are compared.",
            options.DECISION,
            "MODEL",
            reads=options.some_text,
        ),
    ] = None,
    seed: Annotated[
        int,
        options.option(
            "Repeats the samples of methods that sample.",
            options.DECISION,
            "N",
            reads=options.number(int, 0, 2**31 - 1),
        ),
    ] = 0,
    by: options.By = None,
    prompt: options.Prompt = "plain",
    system: options.System = None,
    max_tokens: options.MaxTokens = 256,
    grader: Annotated[
        list[str] | None,
        options.grader_option(
            "What counts as correct: contains, exact-match, token-f1, rouge-l, nli, nli=MODEL, bem=MODEL or "
            "judge=PROVIDER:MODEL; contains+judge=... hands the judge the answers on which contains comes to no "
            "verdict. Repeat the option for several: the first decides, the others are set against it. Default: "
            "contains; exact-match without a chat template."
        ),
    ] = None,
    labels: options.Labels = None,
    regrade: Annotated[
        bool, options.flag("Grade the answers there are; no model is loaded.", options.GRADING, "--regrade")
    ] = False,
    no_report: Annotated[
        bool,
        options.flag(
            "Leave out tables, figures and report.html, which need matplotlib.", options.OUTPUT, "--no-report"
        ),
    ] = False,
    as_json: options.AsJson = False,
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
    inputs = [
        *sources,
        *([labels] if labels else []),
        *map(Path, [*models, *([data] if data else [])]),
        *others,
    ]
    with files.made():
        files.check(inputs, report=not no_report)
        graders = grading.load_graders(grader or (), nli=nli)
        grading.check_labels(labels, begun_at=files.sheet)
        questions = steps.read(data, column, limit=limit, optional=regrade)
        with sole_writer(files.run):
            if regrade:
                run = steps.kept(files, questions)
            else:
                estimators = steps.estimators_of(
                    methods, nli=nli, cross_encoder=cross_encoder, seed=seed, max_tokens=max_tokens, by=by
                )
                run = steps.answer(
                    questions,
                    files,
                    estimators,
                    source=source,
                    phrasing=phrasing,
                    max_tokens=max_tokens,
                    by=by,
                    seed=seed,
                )
            results = steps.grade_run(run, graders, labels, files, questions)
            steps.write(results, files)
            if not no_report:
                steps.report(results, beside, files)
        steps.show(results, files, as_json=as_json, reported=not no_report)
        say_unscored(run.answers)
        broken = questions is not None and questions.problems
        unscored = all(answer.unscored is not None for answer in run.answers)
    raise typer.Exit(code_of_run(unscored=unscored, broken=broken))
