"""`semgrad-guard evaluate`: every method on your model and your questions, graded, compared, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from semgrad_guard.cli import evaluation_output as writing
from semgrad_guard.cli import evaluation_steps as steps
from semgrad_guard.cli import grading, loading, options, values
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.cli.loading import Cluster
from semgrad_guard.cli.terminal import say_unscored
from semgrad_guard.loading import ModelSource
from semgrad_guard.named import POCKET

_GRADING = options.GRADING
_REPORT = "Report"


def evaluate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    output: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            parser=values.path,
            help="Where everything is kept and written.",
            show_default=False,
            rich_help_panel=options.DATA,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            parser=values.source,
            help="A file or folder of JSON Lines, JSON, CSV or Parquet; hub:NAME[:CONFIG][@SPLIT]; - for stdin; or "
            "pocket (questions about the embedded model's world); not needed to --regrade.",
            show_default=False,
            rich_help_panel=options.DATA,
        ),
    ] = None,
    model: options.Model = POCKET,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantization_config: options.QuantizationConfig = None,
    template_option: options.TemplateOption = None,
    engine: options.Engine = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            parser=values.one_of(options.METHOD_NAMES),
            autocompletion=values.completing(options.METHOD_NAMES),
            help=f"A method to compare; repeat the option for several. There are {', '.join(options.METHOD_NAMES)}.",
            show_default="all",
            rich_help_panel=options.UNCERTAINTY,
        ),
    ] = None,
    nli: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            parser=values.source,
            help="An NLI model: what means the same. Else equal words do.",
            rich_help_panel=options.UNCERTAINTY,
        ),
    ] = None,
    cross_encoder: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            parser=values.source,
            help="A cross-encoder: what matters in an answer (SAR).",
            rich_help_panel=options.UNCERTAINTY,
        ),
    ] = None,
    ablations: Annotated[
        bool,
        typer.Option(
            help="Also SemGrad's variants (three more replays an answer).", rich_help_panel=options.UNCERTAINTY
        ),
    ] = True,
    grader: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            parser=values.grader,
            autocompletion=values.completing(get_args(options.GraderName)),
            help="contains, exact-match, token-f1, rouge-l, nli, nli=MODEL, bem=MODEL or judge=PROVIDER:MODEL; "
            "contains+judge=... hands the judge the answers on which contains comes to no verdict. "
            "Repeat the option for several: the first decides, the others are set against it.",
            show_default=options.DEFAULT_GRADER,
            rich_help_panel=_GRADING,
        ),
    ] = None,
    labels: options.Labels = None,
    regrade: Annotated[
        bool,
        typer.Option("--regrade", help="Grade the answers there are; no model is loaded.", rich_help_panel=_GRADING),
    ] = False,
    prompt: options.Prompt = "plain",
    system: options.System = None,
    few_shot: options.FewShot = None,
    shots: options.Shots = None,
    stop: options.Stop = None,
    question_field: options.QuestionField = None,
    answers_field: options.AnswersField = None,
    context_field: options.ContextField = None,
    limit: Annotated[
        int | None,
        typer.Option(
            parser=values.whole(1, 2**62), metavar="N", help="Only the first N questions.", rich_help_panel=options.DATA
        ),
    ] = None,
    batch_size: options.BatchSize = 8,
    sampled_questions: Annotated[
        int,
        typer.Option(
            parser=values.whole(1, 2**62),
            metavar="N",
            help="How many questions of each kind the methods that draw samples take part in, a seeded choice; the "
            "others take all. All of them together draw 55 answers a question.",
            rich_help_panel=options.ANSWERS,
        ),
    ] = 300,
    sample_batch: Annotated[
        int | None,
        typer.Option(
            parser=values.whole(1, 1_000_000),
            metavar="N",
            help="How many answers the methods that draw samples take at a time. Default: a batch.",
            rich_help_panel=options.ANSWERS,
        ),
    ] = None,
    max_tokens: options.MaxTokens = 256,
    seed: Annotated[
        int,
        typer.Option(
            parser=values.whole(0, 2**31 - 1),
            metavar="N",
            help="Repeats the samples of methods that sample.",
            rich_help_panel=options.ANSWERS,
        ),
    ] = 0,
    report: Annotated[
        bool,
        typer.Option(help="Also tables, figures and report.html, which need matplotlib.", rich_help_panel=_REPORT),
    ] = True,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            parser=values.path,
            help="Another finished evaluation for the same report.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X",
            parser=values.number(0.0001, 0.9999),
            help="An error rate to promise in the report; repeat the option for several.",
            show_default="0.05, 0.1, 0.2",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=values.path,
            help="Made by `calibrate`, maybe elsewhere: does its promise hold here?",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=values.path,
            help="Made by `probe`: its t* is used, its maps are in the report.",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    ray: options.Ray = None,
    workers: options.Workers = None,
    strict: options.Strict = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare all methods on your model and questions: which score best separates wrong answers from right ones,
    and at what cost?

    The model answers every question, every method scores every answer, the graders compare the answers with the
    references. Every answer is kept as it comes, with all that the numbers are made of; grading comes after, and can be
    repeated with other graders.
    """
    values.one_from_stdin(data=data, prompt=prompt, system=system, labels=labels)
    files, cluster = writing.Files(output), Cluster.of(ray, workers)
    others, held = writing.finished(beside or [], report=report), steps.load_calibration(calibration)
    probed = steps.load_probe(probe)
    models = [
        model,
        *(name for name in (nli, cross_encoder) if name),
        *(name.partition("=")[2] or name for name in grader or ()),
    ]
    phrasing, sources = loading.phrasing(system, prompt, few_shot, shots)
    records = [*sources, *(path for path in (labels, calibration, probe) if path is not None), *(beside or ())]
    columns = {"question_field": question_field, "answers_field": answers_field, "context_field": context_field}
    with files.made():
        files.check([*records, *map(Path, [*models, *([data] if data else [])])], report=report)
        graders = grading.load_graders(grader or (), nli=nli)
        grading.check_labels(labels, begun_at=files.sheet)
        questions = steps.read(data, columns, limit=limit, strict=strict, optional=regrade)
        with files.held():
            if regrade:
                run = steps.kept(files, questions)
            else:
                settings = steps.AnswerSettings(
                    phrasing, tuple(stop or ()), max_tokens, batch_size, ablations, sampled_questions, sample_batch
                )
                token = None if probed is None else probed.semantic_token
                template = dict(template_option or ())
                source = ModelSource(model, dtype, device, quantization_config, token, template, engine)
                measured = steps.MethodSettings(methods, nli, cross_encoder, seed)
                run = steps.answer(questions, files, settings, measured, source=source, cluster=cluster)
            results = steps.grade(run, graders, labels, files, questions)
            writing.write(results, files)
            if report:
                writing.report(results, others, probed, files, alphas=alpha)
        writing.show(results, files, held, as_json=as_json, reported=report)
        say_unscored(run.answers)
        broken = questions is not None and questions.problems
        unscored = all(answer.unscored is not None for answer in run.answers)
    raise typer.Exit(ExitCode.UNSCORED if unscored else ExitCode.BROKEN_LINES if broken else ExitCode.OK)
