"""What a guard does: the error rate without it and with it, what is withheld, and where that is nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.paper.guarantee import guaranteed_coverage

GRADED = [(0.1, True), (0.2, True), (0.3, False), (0.4, True), (0.5, False), (None, False)]


def test_the_effect_counts_every_answer_once() -> None:
    effect = Effect.of(GRADED, lambda score: score is not None and score <= 0.3)
    assert effect == Effect(answers=6, wrong=3, delivered=3, delivered_wrong=1)
    assert str(effect) == (
        "error 50.0% without the guard, 33.3% with it; withheld: 2 of 3 wrong answers, 1 of 3 right ones"
    )


@pytest.mark.parametrize(("alpha", "warned"), [(0.49, False), (0.5, True), (0.6, True)])
def test_a_promise_that_is_no_better_than_no_guard_is_doubted(alpha: float, warned: bool) -> None:
    doubt = Effect.of(GRADED, lambda _: True).doubt(alpha)
    assert (doubt is not None) is warned
    assert doubt is None or "without a guard 50.0% of these answers are wrong" in doubt


def test_the_effect_over_halves() -> None:
    rng = np.random.default_rng(0)
    wrong = rng.random(400) < 0.3
    found = guaranteed_coverage((wrong + rng.random(400)).tolist(), (~wrong).tolist(), alpha=0.1, splits=20)
    assert found is not None
    assert found.error.mean() == pytest.approx(0.3, abs=0.05)
    delivered = found.mean_coverage
    kept_right = (1 - found.withheld_right) * (1 - found.error.mean())
    assert kept_right + (1 - found.withheld_wrong) * found.error.mean() == pytest.approx(delivered)
    assert found.mean_risk <= 0.1 < found.error.mean()
    none = guaranteed_coverage([0.1, 0.2], [True, True], alpha=0.1, splits=2)
    assert none is not None
    assert (none.withheld_right, none.withheld_wrong == 0, math.isnan(none.mean_risk)) == (1.0, True, True)
