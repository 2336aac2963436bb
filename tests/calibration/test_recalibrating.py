"""A proposal from the decisions of a calibration: what it keeps, what it can do, and what it says."""

from __future__ import annotations

import numpy as np
import pytest

from semgrad_guard.calibration import Binding, Calibration, calibrate
from semgrad_guard.calibration.calibrating import Proposal, recalibrate
from semgrad_guard.errors import CalibrationError

BINDING = Binding(estimator="e", model="m", grader="contains@3")


def old_one() -> Calibration:
    scores = np.linspace(0, 1, 200)
    return calibrate(scores, scores < 0.8, alpha=0.2, delta=0.1, binding=BINDING)


def proposed(old: Calibration, *, wrong_from: float, count: int = 150, tries: int = 0) -> Proposal:
    assert old.threshold is not None
    rng = np.random.default_rng(1)
    scores: list[float | None] = [*rng.random(900).tolist(), *[None] * 100]
    delivered = rng.uniform(0, old.threshold, count)
    grades = [(float(score), bool(score < wrong_from)) for score in delivered]
    return recalibrate(old, scores, grades, tries=tries)


def test_it_lowers_the_threshold_where_the_surest_keep_the_promise() -> None:
    old = old_one()
    proposal = proposed(old, wrong_from=0.5)
    new = proposal.new
    assert new.threshold is not None
    assert old.threshold is not None
    assert 0.4 < new.threshold < old.threshold
    assert (new.n, new.n_unscored, new.n_tested, len(new.scores)) == (1000, 100, 150, 900)
    assert (new.alpha, new.delta, new.shape, new.id != old.id) == (old.alpha, old.delta, old.shape, True)
    assert new.binding == BINDING.model_copy(update={"grader": "human"})
    assert new.by_hand is not None
    assert new.by_hand.below == old.threshold
    assert new.coverage == pytest.approx(0.9 * new.threshold, abs=0.05)
    words = str(proposal)
    assert f"Proposed threshold: {new.threshold:.4g} ({old.threshold:.4g} now)" in words
    assert "of the 1000 answers through (" in words


def test_it_never_raises_it_and_says_where_none_is_left() -> None:
    old = old_one()
    assert old.threshold is not None
    kept = proposed(old, wrong_from=2.0).new
    assert kept.threshold is not None
    assert kept.threshold == pytest.approx(old.threshold, abs=0.02)
    assert kept.threshold <= old.threshold
    none = proposed(old, wrong_from=0.0)
    assert none.new.threshold is None
    assert str(none).startswith("No threshold up to the present one keeps the promise")
    assert proposed(old, wrong_from=0.5, tries=2).new.level < old.level


def test_it_is_refused_without_grades() -> None:
    old = old_one()
    none = proposed(old, wrong_from=0.0).new
    with pytest.raises(CalibrationError, match="none of its answers drawn at random is graded"):
        recalibrate(old, [0.1], [])
    with pytest.raises(CalibrationError, match="it lets nothing through"):
        recalibrate(none, [0.1], [(0.1, True)])
