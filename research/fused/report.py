"""The tables of `fused.py`: scores by labels and under shift, and the gain of a promise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from benchmarks.tables import table
from research.fused.fits import FITS, LABEL_FREE, Answers
from research.fused.measures import (
    ALPHAS,
    BUDGETS,
    PROMISES,
    SETTINGS,
    SPLITS,
    Floats,
    Measured,
    measure,
    weighted_auroc,
)

MARK = "<!-- Below: written by research/fused/study.py -->"
PROCESSES = 2


def report(files: Sequence[Path], target: Path) -> None:
    """Replace the text below the mark in `target` (or the whole of it, where there is none) with the tables."""
    models = [read(path) for path in files]
    questions = 1 + max(int(model.question.max()) for model in models)
    found: list[Measured] = []
    with ProcessPoolExecutor(PROCESSES) as pool:
        for number, measured in enumerate(pool.map(measure, models, repeat(questions)), start=1):
            found.append(measured)
            print(f"measured {number} of {len(models)} models", flush=True)
    kept = target.read_text(encoding="utf-8").split(MARK)[0] if target.exists() else ""
    parts = (
        _models(models),
        _figures(found),
        _differences(found),
        _each(models, found),
        _promises(found),
        _costs(models),
    )
    target.write_text(kept + "\n".join([MARK, "", *chain(*parts)]) + "\n", encoding="utf-8")


def read(path: Path) -> Answers:
    """A model's record, without the answers that have no score."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    scored = [number for number, row in enumerate(rows) if row["cheap"] and row["full"]]
    kept = [rows[number] for number in scored]
    seconds = json.loads(path.with_suffix(".cost.json").read_text(encoding="utf-8"))
    return Answers(path.stem, np.array(scored), kept, np.array([not row["correct"] for row in kept]), seconds)


def _models(models: Sequence[Answers]) -> Iterator[str]:
    yield f"Made on {datetime.now(UTC).date()} from {len(models)} model(s), {SPLITS} random splits each.\n"
    heads = ["model, weights", "answers", "wrong", *LABEL_FREE]
    yield from _table(
        heads,
        [[m.name, str(len(m.wrong)), f"{m.wrong.mean():.2f}", *(_auroc(m, way) for way in LABEL_FREE)] for m in models],
    )


def _auroc(answers: Answers, way: str) -> str:
    scores = LABEL_FREE[way](answers, None, np.arange(len(answers.wrong)))
    return f"{weighted_auroc(scores, answers.wrong, np.ones((1, len(scores))))[0]:.3f}"


def _mean(found: Sequence[Measured], way: str, setting: str) -> Floats:
    return np.mean([study.aurocs[way, setting] for study in found], axis=0)


def _interval(gap: Floats) -> str:
    """A difference with its 95 % interval; bold where that excludes zero."""
    low, high = np.quantile(gap[1:], (0.025, 0.975))
    text = f"{gap[0]:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def _figures(found: Sequence[Measured]) -> Iterator[str]:
    yield "## AUROC, mean over models and splits\n"
    yield from _table(
        ["", *(s.name for s in SETTINGS)],
        [[way, *(f"{_mean(found, way, s.name)[0]:.3f}" for s in SETTINGS)] for way in FITS],
    )


def _differences(found: Sequence[Measured]) -> Iterator[str]:
    yield "## Paired differences in AUROC with 95 % intervals (bold: zero is outside)\n"
    rows = [
        [f"FusedGrad − {other}"]
        + [_interval(_mean(found, "FusedGrad", s.name) - _mean(found, other, s.name)) for s in SETTINGS]
        for other in FITS
        if other != "FusedGrad"
    ]
    yield from _table(["", *(s.name for s in SETTINGS)], rows)


def _each(models: Sequence[Answers], found: Sequence[Measured]) -> Iterator[str]:
    yield "## FusedGrad − HybridGrad, model by model\n"
    rows = [
        [m.name, *(_interval(f.aurocs["FusedGrad", s.name] - f.aurocs["HybridGrad", s.name]) for s in SETTINGS)]
        for m, f in zip(models, found, strict=True)
    ]
    yield from _table(["", *(s.name for s in SETTINGS)], rows)


def _promises(found: Sequence[Measured]) -> Iterator[str]:
    for alpha in ALPHAS:
        yield f"## Coverage at an error rate of at most {alpha:g} with probability .9 (share of splits above it)\n"
        yield from _table(
            ["", *(f"{budget} labels in all" for budget in BUDGETS)],
            [[title, *(_coverage(found, title, budget, alpha) for budget in BUDGETS)] for title in PROMISES],
        )


def _coverage(found: Sequence[Measured], title: str, budget: int, alpha: float) -> str:
    outcomes = np.array([outcome for study in found for outcome in study.promises[title, budget, alpha]])
    return f"{outcomes[:, 0].mean():.3f} ({(outcomes[:, 1] > alpha).mean():.2f})"


def _costs(models: Sequence[Answers]) -> Iterator[str]:
    yield "## Cost, CPU seconds a batch of 16 (medians, taking turns)\n"
    heads = ["model", "generating", "ordinary replay", "all layers x 8 tokens", "ratio of replays", "of whole answers"]
    rows: list[list[str]] = []
    for model in models:
        answer, cheap, full = (model.seconds[name] for name in ("generating", "cheap", "full"))
        ratios = (full / cheap, (answer + full) / (answer + cheap))
        rows.append([model.name, *(f"{x:.3f}" for x in (answer, cheap, full)), *(f"{x:.2f}" for x in ratios)])
    yield from _table(heads, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from table(head, rows)
    yield ""
