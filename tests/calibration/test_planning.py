"""Plans against simulated calibrations, and their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from semgrad_guard.calibration import gates
from semgrad_guard.calibration.planning import enough, plan

from .test_gates import normal

RATES: dict[str, Any] = {"alpha": 0.1, "delta": 0.1}


@pytest.mark.parametrize(("error", "auroc", "n"), [(0.2, 0.8, 100), (0.2, 0.8, 300), (0.12, 0.7, 100)])
def test_a_plan_agrees_with_simulated_calibrations(error: float, auroc: float, n: int) -> None:
    rng, draw = np.random.default_rng(3), normal(error, auroc)
    delivered: list[float] = []
    for _ in range(300):
        scores, wrong = draw(rng, n)
        threshold = gates.walk(scores, wrong, **RATES).threshold
        delivered.append(0.0 if threshold is None else float((scores <= threshold).mean()))
    planned = plan(n, error=error, auroc=auroc, **RATES)
    print(planned, np.mean(delivered), np.mean(np.array(delivered) > 0))
    assert planned.found == pytest.approx(np.mean(np.array(delivered) > 0), abs=0.08)
    assert planned.coverage == pytest.approx(np.mean(delivered), abs=0.05)


def test_limits_of_a_plan() -> None:
    assert plan(21, error=0.0, auroc=0.8, **RATES).found == 0.0
    sure = plan(22, error=0.0, auroc=0.8, **RATES)
    assert (sure.found, sure.coverage, sure.withheld) == (1.0, 1.0, 0.0)
    assert plan(300, error=1.0, auroc=0.8, **RATES).withheld == 1.0
    assert plan(300, error=0.4, auroc=0.5, **RATES).withheld == pytest.approx(1 / 3)
    assert plan(300, error=0.4, auroc=1.0, **RATES).coverage > 0.5
    assert plan(300, error=0.2, auroc=0.8, **RATES) == plan(300, error=0.2, auroc=0.8, **RATES)


def test_enough_is_the_fewest_with_which_nine_of_ten_sets_find_a_threshold() -> None:
    found = enough(error=0.2, auroc=0.8, **RATES)
    assert found is not None
    assert (found.n, found.found >= 0.9) == (500, True)
    assert enough(error=0.4, auroc=0.5, **RATES) is None
