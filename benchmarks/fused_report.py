"""The tables of `fused.py`: who tells right from wrong with how many labels, under shift, and what a promise gains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from fused_fits import FITS, LABEL_FREE, Answers, Scores, Way
from numpy.typing import NDArray

from semgrad_guard.decision import calibrate

LABELS = (20, 30, 50, 100, 400, 700)
SPLITS, TESTED, REPLICATES = 20, 500, 400
SHIFT_LABELS = 300
CLOSED = ("known", "rare", "unknown", "several")
MARK = "<!-- Below: written by benchmarks/fused.py -->"

Floats = NDArray[np.float64]


def read(path: Path) -> Answers:
    """A model's record, without the answers that have no score."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    scored = [number for number, row in enumerate(rows) if row["cheap"] and row["full"]]
    kept = [rows[number] for number in scored]
    seconds = json.loads(path.with_suffix(".cost.json").read_text(encoding="utf-8"))
    return Answers(path.stem, np.array(scored), kept, np.array([not row["correct"] for row in kept]), seconds)


@dataclass(frozen=True)
class Setting:
    """Where to fit and where to test, one pair of rows per split."""

    name: str
    splits: Callable[[Answers], Iterator[tuple[Floats, Floats]]]


def after_labels(n: int) -> Setting:
    """`n` random answers to fit on; the same 500 others to test on, whatever n is."""

    def splits(answers: Answers) -> Iterator[tuple[Any, Any]]:
        for seed in range(SPLITS):
            order = np.random.default_rng(seed).permutation(len(answers.wrong))
            yield order[TESTED:][:n], order[:TESTED]

    return Setting(f"{n} labels", splits)


def shifted(name: str, *, closed_first: bool) -> Setting:
    """Fitted on one kind of question and tested on the other."""

    def splits(answers: Answers) -> Iterator[tuple[Any, Any]]:
        closed = np.array([row["kind"] in CLOSED for row in answers.rows])
        source, target = np.flatnonzero(closed == closed_first), np.flatnonzero(closed != closed_first)
        for seed in range(SPLITS):
            yield np.random.default_rng(seed).permutation(source)[:SHIFT_LABELS], target

    return Setting(name, splits)


SETTINGS = (
    *map(after_labels, LABELS),
    shifted("closed book → reading", closed_first=True),
    shifted("reading → closed book", closed_first=False),
)


class Table:
    """AUROC of every way in every setting: [1 + replicates] values, the first without resampling.

    An interval resamples questions (the same in every model, since all answer the same ones), not fits: it is that of
    the mean over models and splits.
    """

    def __init__(self, models: Sequence[Answers], ways: Mapping[str, Way], tick: Callable[[], None]) -> None:
        rng = np.random.default_rng(0)
        n = 1 + max(int(m.question.max()) for m in models)
        draws = rng.multinomial(n, np.full(n, 1 / n), size=REPLICATES)
        self.weights = np.concatenate([np.ones((1, n)), draws]).astype(np.float64)
        self.values: dict[tuple[str, str], Floats] = {}
        for setting in SETTINGS:
            for way, scores in ways.items():
                self.values[way, setting.name] = np.mean([self._of(m, setting, scores) for m in models], axis=0)
            tick()

    def _of(self, answers: Answers, setting: Setting, scores: Way) -> Floats:
        found = []
        for fit_on, test_on in setting.splits(answers):
            wrong = answers.wrong[test_on]
            values = scores(answers, fit_on, test_on)
            found.append(weighted_auroc(values, wrong, self.weights[:, answers.question[test_on]]))
        return np.mean(found, axis=0)

    def figure(self, way: str, setting: str) -> str:
        return f"{self.values[way, setting][0]:.3f}"

    def difference(self, way: str, other: str, setting: str) -> str:
        """way - other with its 95 % interval; bold where that excludes zero."""
        gap = self.values[way, setting] - self.values[other, setting]
        low, high = np.quantile(gap[1:], (0.025, 0.975))
        text = f"{gap[0]:+.3f} [{low:+.3f}, {high:+.3f}]"
        return f"**{text}**" if low > 0 or high < 0 else text


def weighted_auroc(scores: Scores, wrong: NDArray[np.bool_], weights: Floats) -> Floats:
    """AUROC for every row of `weights` [R, n], ties counting half."""
    _, group = np.unique(scores, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    bad = np.add.reduceat(weights[:, order] * wrong[order], starts, axis=1)
    good = np.add.reduceat(weights[:, order] * ~wrong[order], starts, axis=1)
    below = np.cumsum(good, axis=1) - good / 2
    return (bad * below).sum(1) / np.maximum(bad.sum(1) * good.sum(1), 1e-300)


def promise_rows(models: Sequence[Answers], *, alpha: float, delta: float = 0.1) -> Iterator[list[str]]:
    """Coverage and error at a guaranteed risk, for label budgets that fitting and threshold share."""
    ways = {
        "HybridGrad": ("HybridGrad", 0.0),
        "G-NLL": ("G-NLL", 0.0),
        **{f"FusedGrad, 1/{parts} to fit": ("FusedGrad", 1 / parts) for parts in (4, 3, 2)},
        "FusedGrad, all layers x 8 tokens, 1/3 to fit": ("FusedGrad, all layers x 8 tokens", 1 / 3),
    }  # fmt: skip
    for title, (way, share) in ways.items():
        cells = [title]
        for budget in (200, 400, 700):
            found = [
                _promise(answers, FITS[way], rows[:budget], test, share=share, alpha=alpha, delta=delta)
                for answers in models
                for rows, test in after_labels(700).splits(answers)
            ]
            coverage, broken = np.mean([f[0] for f in found]), np.mean([f[1] > alpha for f in found])
            cells.append(f"{coverage:.3f} ({broken:.2f})")
        yield cells


def _promise(
    answers: Answers, scores: Way, rows: Any, test: Any, *, share: float, alpha: float, delta: float
) -> tuple[float, float]:
    """(coverage of the tested questions, error rate among those let through)."""
    size = int(len(rows) * share)
    fit_on, rest = rows[:size], rows[size:]
    values = scores(answers, fit_on if size else rest, np.concatenate([rest, test]))
    found = calibrate(values[: len(rest)], ~answers.wrong[rest], alpha=alpha, delta=delta)
    let = np.array([found.lets_through(float(value)) for value in values[len(rest) :]])
    return float(let.mean()), float(answers.wrong[test][let].mean()) if let.any() else 0.0


def report(files: Sequence[Path], target: Path) -> None:
    """Replace what stands below the mark in `target` (or the whole of it, where there is none) with the tables."""
    models = [read(path) for path in files]
    kept = target.read_text(encoding="utf-8").split(MARK)[0] if target.exists() else ""
    with _ticking(len(SETTINGS)) as tick:
        table = Table(models, FITS, tick)
    lines = [MARK, "", *_models(models), *_figures(table), *_differences(table), *_promises(models), *_costs(models)]
    target.write_text(kept + "\n".join(lines) + "\n", encoding="utf-8")


def _models(models: Sequence[Answers]) -> Iterator[str]:
    yield f"Made on {datetime.now(UTC).date()} from {len(models)} model(s), {SPLITS} random splits each.\n"
    yield from _table(
        ["model, weights", "answers", "wrong", *LABEL_FREE],
        [
            [m.name, str(len(m.wrong)), f"{m.wrong.mean():.2f}", *(_auroc(m, way) for way in LABEL_FREE.values())]
            for m in models
        ],
    )


def _auroc(answers: Answers, way: Way) -> str:
    scores = way(answers, None, np.arange(len(answers.wrong)))
    return f"{weighted_auroc(scores, answers.wrong, np.ones((1, len(scores))))[0]:.3f}"


def _figures(table: Table) -> Iterator[str]:
    yield "## AUROC, mean over models and splits\n"
    yield from _table(
        ["", *(s.name for s in SETTINGS)], [[way, *(table.figure(way, s.name) for s in SETTINGS)] for way in FITS]
    )


def _differences(table: Table) -> Iterator[str]:
    yield "## Paired differences in AUROC with 95 % intervals (bold: zero is outside)\n"
    pairs = [("FusedGrad", other) for other in FITS if other != "FusedGrad"]
    yield from _table(
        ["", *(s.name for s in SETTINGS)],
        [[f"{a} − {b}", *(table.difference(a, b, s.name) for s in SETTINGS)] for a, b in pairs],
    )


def _promises(models: Sequence[Answers]) -> Iterator[str]:
    for alpha in (0.1, 0.2):
        yield f"## Coverage at an error rate of at most {alpha:g} with probability .9 (share of splits above it)\n"
        yield from _table(["", "200 labels in all", "400", "700"], list(promise_rows(models, alpha=alpha)))


def _costs(models: Sequence[Answers]) -> Iterator[str]:
    yield "## Cost, CPU seconds a batch of 16 (medians, taking turns)\n"
    yield from _table(
        [
            "model",
            "generating",
            "ordinary replay",
            "all layers x 8 tokens",
            "ratio of replays",
            "of whole answers",
        ],
        [
            [
                m.name,
                *(f"{m.seconds[name]:.3f}" for name in ("generating", "cheap", "full")),
                f"{m.seconds['full'] / m.seconds['cheap']:.2f}",
                f"{(m.seconds['generating'] + m.seconds['full']) / (m.seconds['generating'] + m.seconds['cheap']):.2f}",
            ]
            for m in models
        ],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cells) + " |"
    yield ""


@contextmanager
def _ticking(total: int) -> Iterator[Callable[[], None]]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        print(f"\rtables: {done}/{total} ", end="", flush=True)

    yield tick
    print()
