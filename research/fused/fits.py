"""The ways to score an answer that `report.py` compares: single scores, FusedGrad, and variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier

from semgrad_guard.estimators import FusedGrad, learned
from semgrad_guard.estimators.learned import fit_weights
from semgrad_guard.evaluation.metrics import auroc
from semgrad_guard.records import LOG, FusedWeights

Scores = NDArray[np.float64]
Way = Callable[["Answers", Any, Any], Scores]
"""(answers, rows to fit on, rows to score) -> scores."""


@dataclass(frozen=True)
class Answers:
    """One model's graded answers; `question` numbers the question of each row, the same in every model."""

    name: str
    question: NDArray[np.intp]
    rows: list[dict[str, Any]]
    wrong: NDArray[np.bool_]
    seconds: Mapping[str, float]
    tables: dict[str, dict[str, Scores]] = field(default_factory=dict)

    def table(self, tier: str, extra: Sequence[str] = ()) -> dict[str, Scores]:
        """The features of a tier, column by column, and other features of the record."""
        if tier not in self.tables:
            names = self.rows[0][tier]
            self.tables[tier] = {name: np.array([row[tier][name] for row in self.rows]) for name in names}
        return {**self.tables[tier], **{name: np.array([row[name] for row in self.rows]) for name in extra}}


def single(feature: str) -> Way:
    """A feature of the ordinary replay as it is."""
    return lambda answers, _, rows: answers.table("cheap")[feature][rows]


def hybridgrad(answers: Answers, _: Any, rows: Any) -> Scores:
    """The paper's mixture."""
    table = answers.table("cheap")
    a = np.exp(-table["mean_entropy"][rows])
    return (1 - a) * table["semgrad"][rows] + a * table["paragrad"][rows]


def best_single(answers: Answers, fit_on: Any, rows: Any) -> Scores:
    """The single score with the highest AUROC on the labels at hand: the gain of choosing alone."""

    def known(way: Way) -> float:
        return auroc(way(answers, None, fit_on).tolist(), (~answers.wrong[fit_on]).tolist()) or 0.0

    return max(LABEL_FREE.values(), key=known)(answers, None, rows)


def fused(tier: str = "cheap", *, extra: Sequence[str] = (), c: float = FusedGrad.shrinkage.c, **changed: Any) -> Way:
    """FusedGrad's fit, whatever the number of labels.

    `extra` are further features, `c` the inverse of the penalty, `changed` settings of the module `learned`.
    """

    def features(row: dict[str, Any]) -> dict[str, float]:
        return {**row[tier], **{name: row[name] for name in extra}}

    def scores(answers: Answers, fit_on: Any, rows: Any) -> Scores:
        wrong = answers.wrong[fit_on]
        if wrong.all() or not wrong.any():
            return np.zeros(len(rows))
        with settings(**changed):
            shrinkage = replace(FusedGrad.shrinkage, c=c)
            weights = fit_weights([features(answers.rows[i]) for i in fit_on], wrong, shrinkage)
        return logits(weights, answers.table(tier, extra), rows)

    return scores


def logits(weights: FusedWeights, table: Mapping[str, Scores], rows: Any) -> Scores:
    """`FusedWeights.logit` of many answers at once."""
    raw = np.stack([table[name.removeprefix(LOG)][rows] for name in weights.columns], axis=1)
    held, logged = np.clip(raw, weights.lows, weights.highs), np.array([n.startswith(LOG) for n in weights.columns])
    x = np.where(logged, np.log(np.where(logged, held, 1.0)), held)
    return weights.intercept + ((x - weights.centres) / weights.scales) @ np.array(weights.weights)


def boosted(answers: Answers, fit_on: Any, rows: Any) -> Scores:
    """Boosted trees on the cheap tier, rising in every score, free in the answer's length."""
    wrong = answers.wrong[fit_on]
    if wrong.all() or not wrong.any():
        return np.zeros(len(rows))
    table = answers.table("cheap")
    x = np.stack([column[np.concatenate([fit_on, rows])] for column in table.values()], axis=1)
    trees = HistGradientBoostingClassifier(
        max_iter=60,
        learning_rate=0.08,
        max_leaf_nodes=6,
        min_samples_leaf=8,
        l2_regularization=1.0,
        monotonic_cst=[0 if name == "length" else 1 for name in table],
    )
    return trees.fit(x[: len(fit_on)], wrong).decision_function(x[len(fit_on) :])


@contextmanager
def settings(**changed: Any) -> Iterator[None]:
    """Module settings of `learned` for the time of a block."""
    before = {name: getattr(learned, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(learned, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(learned, name, value)


LABEL_FREE: dict[str, Way] = {
    "HybridGrad": hybridgrad,
    "SemGrad": single("semgrad"),
    "ParaGrad": single("paragrad"),
    "G-NLL": single("gnll"),
    "Mean entropy": single("mean_entropy"),
}

FITS: dict[str, Way] = {
    **LABEL_FREE,
    "best single by the labels": best_single,
    "FusedGrad": fused(),
    "FusedGrad, all layers x 8 tokens": fused("full"),
    "… all layers, C = .03": fused("full", c=0.03),
    "… logs only": fused(_AS_IS=frozenset[str]()),
    "… C = .1": fused(c=0.1),
    "… C = .03": fused(c=0.03),
    "… with per-token peaks": fused(extra=("max_nll", "max_entropy")),
    "boosted trees, rising": boosted,
}
