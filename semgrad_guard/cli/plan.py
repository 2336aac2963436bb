"""`semgrad-guard plan`: the effect to expect of so many labels, before anything is labelled."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from semgrad_guard.cli import options
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.settings import Alpha, Delta


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
    as_json: options.AsJson = False,
) -> None:
    """Tell how often so many labels find a threshold, and how much it lets through.

    The least share of answers that any guard has to withhold is (error - alpha) / (1 - alpha). The rest is simulated,
    with normal scores of this AUROC; real sets differ. It is about the first calibration on the labels, which keeps a
    tenth of delta for later tries.
    """
    from semgrad_guard.calibration import plan as planned
    from semgrad_guard.calibration.tries import share_of

    level = share_of(delta, 1)
    plans = [planned(n, error=error, auroc=auroc, alpha=alpha, delta=level) for n in labels or (50, 100, 300, 1000)]
    if as_json:
        typer.echo(json.dumps([{**asdict(one), "delta": delta, "withheld": one.withheld} for one in plans]))
        return
    typer.echo(f"Any guard has to withhold at least {plans[0].withheld:.1%} of the answers.")
    for one in plans:
        typer.echo(f"{one}.")
