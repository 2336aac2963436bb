"""Have the scores moved since calibration? A promise holds only while questions come from the same population.

`drift` is one two-sample Kolmogorov-Smirnov test. `DriftMonitor` looks again and again without crying wolf: scores
fall into blocks that do not overlap, each block is tested once, when it is full, and the k-th test is made at
level / (k (k + 1)). These levels add up to `level`, so the chance that a monitor *ever* raises a false alarm, however
long it runs and however often it is asked, is at most `level` (union bound; it needs no independence between the tests,
which share the calibration scores). The price is that a late change must be larger to be seen than an early one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.calibration.calibration_record import Calibration, is_score
from semgrad_guard.errors import CalibrationError, InputError


class Drift(BaseModel):
    """The outcome of a drift test.

    `p_value` in [0, 1] is how likely so large a `statistic` (the largest gap between the two distribution functions) is
    without drift; `moved` says whether it is at most `level`, the level of this very test. `n` recent scores were
    compared. For a monitor, `looks` counts the tests made so far, and the figures are those of the test that raised
    the alarm, or else of the latest; with no test yet, `n` is 0 and `p_value` 1.
    """

    model_config = ConfigDict(frozen=True)

    p_value: float = Field(ge=0, le=1)
    moved: bool
    n: int
    statistic: float
    level: float
    looks: int = 1


def drift(recent: Iterable[float | None], calibration_scores: Iterable[float], *, level: float = 0.01) -> Drift:
    """Compare recent uncertainties with the calibration's; those without a finite score are left out.

    One look: asking repeatedly about overlapping scores raises the false-alarm rate, which `DriftMonitor` does not.
    """
    _check_level(level)
    new = np.array([score for score in recent if is_score(score)], dtype=np.float64)
    old = np.array([score for score in calibration_scores if is_score(score)], dtype=np.float64)
    if not len(old):
        raise CalibrationError(
            "The calibration holds no scores to compare with: calibrate on answers that have scores."
        )
    if not len(new):
        return Drift(p_value=1.0, moved=False, n=0, statistic=0.0, level=level)
    from scipy import stats  # pyright: ignore[reportMissingTypeStubs] - slow to import, and rarely needed

    result = cast(Any, stats).ks_2samp(new, old)
    p_value = min(1.0, max(0.0, float(result.pvalue)))
    return Drift(p_value=p_value, moved=p_value <= level, n=len(new), statistic=float(result.statistic), level=level)


class DriftMonitor:
    """Watches the scores of a running guard; safe to share between threads.

    Blocks hold `min_n` scores at first, so that a gross change shows early, and double up to `window`. At most one
    block is held in memory. An alarm stays until `reset`: the remedy is a new calibration.
    """

    def __init__(self, calibration: Calibration, *, window: int = 200, level: float = 0.01, min_n: int = 30) -> None:
        _check_level(level)
        if not 1 <= min_n <= window:
            raise InputError(f"min_n must be at least 1 and at most window; they are {min_n!r} and {window!r}.")
        if not calibration.scores:
            raise CalibrationError("The calibration holds no scores to watch. Calibrate on answers that have scores.")
        self._scores = calibration.scores
        self._window, self._level, self._min_n = window, level, min_n
        self._lock = threading.Lock()
        self.reset()

    def add(self, uncertainty: float | None) -> Drift:
        """Take in one answer's uncertainty (ignored without a finite score) and report."""
        with self._lock:
            if is_score(uncertainty):
                self._block.append(float(uncertainty))
            if len(self._block) >= self._block_size():
                self._look()
            return self._latest

    def report(self) -> Drift:
        """What is known so far; asking changes nothing."""
        with self._lock:
            return self._latest

    def reset(self) -> None:
        """Forget all scores, tests and alarms."""
        with self._lock:
            self._block: list[float] = []
            self._looks = 0
            self._latest = Drift(p_value=1.0, moved=False, n=0, statistic=0.0, level=self._level, looks=0)

    def _block_size(self) -> int:
        return self._window if self._looks > self._window else min(self._window, self._min_n << self._looks)

    def _look(self) -> None:
        """Test the full block, at its share of the level, and begin the next."""
        self._looks += 1
        found = drift(self._block, self._scores, level=self._level / (self._looks * (self._looks + 1)))
        shown = self._latest if self._latest.moved else found
        self._latest = shown.model_copy(update={"looks": self._looks})
        self._block = []


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise InputError(f"level must lie strictly between 0 and 1, for example 0.01; it is {level!r}.")
