"""`semgrad-guard plan`: the effect to expect of so many labels, before anything is labelled."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from semgrad_guard.cli import options
from semgrad_guard.cli.options import PromisedSentences
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.settings import Alpha, Delta

_SIZES = (50, 100, 300, 1000)


def plan(
    *,
    error: Annotated[
        float, Option("The share of the model's answers that are wrong.", options.DATA, "X", Bounds(0, 1))
    ],
    auroc: Annotated[
        float, Option("The AUROC of the estimator: 0.5 is chance, 1 perfect.", options.DATA, "X", Bounds(0, 1))
    ],
    labels: Annotated[
        list[int] | None,
        Option(
            "How many graded answers. Repeat the option for several numbers.",
            options.DATA,
            "N",
            Bounds(1, 1_000_000),
            shown="50, 100, 300, 1000",
        ),
    ] = None,
    alpha: Alpha = 0.1,
    delta: Delta = 0.1,
    sentences: PromisedSentences,
    length: Annotated[
        int,
        Option("By sentence, how many an answer has.", options.DATA, "N", Bounds(1, 1000), spelled="--sentences"),
    ] = 4,
    as_json: options.AsJson = False,
) -> None:
    """Tell how often so many labels find a threshold, and how much it lets through.

    The least share of answers that any guard has to withhold is (error - alpha) / (1 - alpha). The rest is simulated,
    with normal scores of this AUROC; real sets differ. It is about the first calibration on the labels, which keeps a
    tenth of delta for later tries. By sentence, error rate and AUROC are those of sentences, and every sentence of so
    many answers has a label.
    """
    from semgrad_guard.calibration import plan as planned
    from semgrad_guard.calibration.exact_tests import share_of
    from semgrad_guard.calibration.sentences import plan_sentences, simulated

    level, given = share_of(delta, 1), {"error": error, "auroc": auroc}
    if (form := sentences.form({})) is not None:
        answers = simulated(**given, sentences=length, on_doubt=form.on_doubt, promise=form.promise)
        plans = [plan_sentences(n, answers, alpha=alpha, delta=level) for n in labels or _SIZES]
    else:
        plans = [planned(n, **given, alpha=alpha, delta=level) for n in labels or _SIZES]
    if as_json:
        typer.echo(json.dumps([{**asdict(one), "delta": delta, "withheld": one.withheld} for one in plans]))
        return
    if plans[0].unit == "answers":
        typer.echo(f"Any guard has to withhold at least {plans[0].withheld:.1%} of the answers.")
    for one in plans:
        typer.echo(f"{one}.")
