"""`semgrad-guard evaluate`: every method on your model and your questions, graded, compared, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from semgrad_guard.cli import evaluation_output as writing
from semgrad_guard.cli import evaluation_steps as steps
from semgrad_guard.cli import loading, options
from semgrad_guard.cli.help import ExitCode


def evaluate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where everything is kept and written.", show_default=False)
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="JSON Lines, a JSON list, CSV, or hub:NAME[:CONFIG][@SPLIT]; not needed to --regrade.",
            show_default=False,
        ),
    ] = None,
    model: options.Model = loading.POCKET,
    dtype: options.Dtype = None,
    device: options.Device = None,
    methods: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A method to compare; several times for several.")
    ] = None,
    nli: Annotated[
        str | None, typer.Option(metavar="MODEL", help="An NLI model: what means the same. Else equal words do.")
    ] = None,
    cross_encoder: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A cross-encoder: what matters in an answer (SAR).")
    ] = None,
    grader: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="exact-match, token-f1, rouge-l, nli[=MODEL], bem=MODEL or judge=PROVIDER:MODEL. "
            "Several times for several: the first decides, the others are set against it.",
        ),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The sheet of labels, filled in by people: it decides then.")
    ] = None,
    prompt: Annotated[
        Literal["plain", "paper"], typer.Option(metavar="NAME", help="plain, or the paper's: answer in few words.")
    ] = "plain",
    system: options.System = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N questions.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Questions answered at once.")] = 8,
    max_new_tokens: options.MaxNewTokens = 256,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Repeats the samples of methods that sample.")] = 0,
    ablations: Annotated[bool, typer.Option(help="Also SemGrad's variants (three more replays an answer).")] = True,
    regrade: Annotated[
        bool, typer.Option("--regrade", help="Grade the answers there are; no model is loaded.")
    ] = False,
    report: Annotated[bool, typer.Option(help="Also tables, figures and report.html, which need matplotlib.")] = True,
    beside: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="Another finished evaluation for the same report.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Made by `calibrate`, maybe elsewhere: does its promise hold here?"),
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Made by `probe`: its t* is used, its maps are in the report.")
    ] = None,
    strict: options.Strict = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare all methods on your model and questions: who knows best which answers are wrong, and at what cost?

    The model answers every question, every method scores every answer, the graders compare the answers with the
    references. Every answer is kept as it comes, with all that the numbers are made of; grading comes after, and can be
    repeated with other graders.
    """
    files = writing.Files.within(output)
    others, held = writing.finished(beside or [], report=report), steps.load_calibration(calibration)
    probed = steps.load_probe(probe)
    graders = steps.load_graders(grader or ["exact-match"], nli=nli)
    questions = steps.read(data, limit=limit, strict=strict, optional=regrade)
    if regrade:
        run = steps.kept(files, questions)
    else:
        asked = steps.Asked(prompt, system, max_new_tokens, batch_size, ablations)
        estimators = steps.Chosen(methods, nli, cross_encoder, seed).estimators(max_new_tokens)
        token = None if probed is None else probed.semantic_token
        loaded = loading.load_model(model, dtype, device=device, token=token)
        run = steps.answer(questions, files, asked, estimators, model=loaded)
    results = steps.grade(run, graders, labels, files, questions)
    writing.write(results, files)
    if report:
        writing.report(results, others, probed, files)
    writing.show(results, files, held, as_json=as_json)
    raise typer.Exit(ExitCode.BROKEN_LINES if questions is not None and questions.problems else ExitCode.OK)
