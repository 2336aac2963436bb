"""Have the scores moved since calibration? A promise holds only while questions come from the same population.

`drift` is one two-sample Kolmogorov-Smirnov test. `DriftMonitor` looks again and again without crying wolf: scores
fall into blocks that do not overlap, each block is tested once, when it is full, and the k-th test is made at
level / (k (k + 1)). These levels add up to `level`, so the chance that a monitor *ever* raises a false alarm, however
long it runs and however often it reports, is at most `level` (union bound; it needs no independence between the tests,
which share the calibration scores). The price is that a late change must be larger to be seen than an early one.

A model that stops giving scores moves none, so answers without one are watched as well: blocks of answers, scored or
not, are tested in the same way for a larger share of unscored ones than at calibration (Fisher's exact test). This
second alarm has a `level` of its own; the chance that either is ever false is at most twice that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.calibration.calibration_record import Calibration, is_score
from semgrad_guard.errors import CalibrationError, InputError

_EXACT_UP_TO = 10_000
"""Where scipy's own p-value turns from the exact one to the limit's. Beyond it, sorting everything is not needed."""


class Drift(BaseModel):
    """The outcome of a drift test.

    `p_value` in [0, 1] is how likely so large a `statistic` (the largest gap between the two distribution functions) is
    without drift; `moved` tells whether it is at most `level`, the level of this very test. `n` recent scores were
    compared. For a monitor, `looks` counts the tests made so far, and the figures are those of the test that raised
    the alarm, or else of the latest; with no test yet, `n` is 0 and `p_value` 1.

    `answers` and `unscored` count a monitor's answers, with and without a score. `unscored_moved` tells whether the
    share of the unscored has risen, and `unscored_p_value` is that test's, like `p_value`.
    """

    model_config = ConfigDict(frozen=True)

    p_value: float = Field(ge=0, le=1)
    moved: bool
    n: int
    statistic: float
    level: float
    looks: int = 1
    answers: int = 0
    unscored: int = 0
    unscored_p_value: float = Field(default=1.0, ge=0, le=1)
    unscored_moved: bool = False

    @property
    def alarm(self) -> bool:
        """Whether anything has moved: the scores, or the share of answers without one."""
        return self.moved or self.unscored_moved


def drift(recent: Iterable[float | None], calibration_scores: Iterable[float], *, level: float = 0.01) -> Drift:
    """Compare recent uncertainties with the calibration's; those without a finite score are left out.

    One look: repeated tests of overlapping scores raises the false-alarm rate, which `DriftMonitor` does not.
    """
    _check_level(level)
    return _compared(_finite(recent), np.sort(_finite(calibration_scores)), level=level)


def _compared(new: NDArray[np.float64], old: NDArray[np.float64], *, level: float) -> Drift:
    """One look at `new` scores; `old` ones are sorted."""
    if not len(old):
        raise CalibrationError(
            "The calibration holds no scores to compare with: calibrate on answers that have scores."
        )
    if not len(new):
        return Drift(p_value=1.0, moved=False, n=0, statistic=0.0, level=level)
    found, statistic = _kolmogorov_smirnov(new, old)
    p_value = min(1.0, max(0.0, found))
    return Drift(p_value=p_value, moved=p_value <= level, n=len(new), statistic=statistic, level=level)


def _kolmogorov_smirnov(new: NDArray[np.float64], old: NDArray[np.float64]) -> tuple[float, float]:
    """(p-value, statistic) as scipy's `ks_2samp` gives them, without a pass over all of many `old` scores, sorted."""
    stats = _stats()
    if max(len(new), len(old)) <= _EXACT_UP_TO:
        result = stats.ks_2samp(new, old)
        return float(result.pvalue), float(result.statistic)
    points = np.sort(new)
    up_to, below = (np.searchsorted(points, points, side) / len(new) for side in ("right", "left"))
    old_up_to, old_below = (np.searchsorted(old, points, side) / len(old) for side in ("right", "left"))
    statistic = float(max(np.abs(up_to - old_up_to).max(), np.abs(below - old_below).max()))
    size = len(new) * len(old) / (len(new) + len(old))
    return float(stats.kstwo.sf(statistic, np.round(size))), statistic


def _stats() -> Any:
    """scipy.stats, which is slow to import and rarely needed."""
    from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

    return cast(Any, stats)


def _finite(scores: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([score for score in scores if is_score(score)], dtype=np.float64)


class DriftMonitor:
    """Watches the scores of a running guard, and the answers without one; safe to share between threads.

    Blocks hold `min_n` scores at first, so that a gross change shows early, and double up to `window`. At most one
    block is held in memory. An alarm stays until `reset`: the remedy is a new calibration.
    """

    def __init__(self, calibration: Calibration, *, window: int = 200, level: float = 0.01, min_n: int = 30) -> None:
        _check_level(level)
        given: Any = calibration
        if not isinstance(given, Calibration):
            raise InputError(
                f"a monitor watches the scores of a Calibration (Calibration.load(path)), not {given!r:.60}"
            )
        sizes: list[Any] = [min_n, window]
        if not all(isinstance(size, int) for size in sizes) or not 1 <= min_n <= window:
            raise InputError(f"min_n must be at least 1 and at most window; they are {min_n!r} and {window!r}.")
        if not calibration.scores:
            raise CalibrationError("The calibration holds no scores to watch. Calibrate on answers that have scores.")
        self._scores = np.sort(_finite(calibration.scores))
        self._n, self._n_unscored = calibration.n, calibration.n_unscored
        self._window, self._level, self._min_n = window, level, min_n
        self._lock = threading.Lock()
        _stats()  # not under the lock
        self.reset()

    def add(self, uncertainty: float | None) -> Drift:
        """Take in one answer's uncertainty (None, NaN or infinite: it has no score) and report.

        Raises:
            InputError: it is not a number.
        """
        scored = is_score(uncertainty)
        with self._lock:
            if is_score(uncertainty):
                self._block.append(float(uncertainty))
            self._answers += 1
            self._unscored += not scored
            if len(self._block) >= self._block_size(self._looks):
                self._look()
            if self._answers - self._seen[0] >= self._block_size(self._unscored_looks):
                self._look_at_unscored()
            return self._report()

    def report(self) -> Drift:
        """The state so far; reading it changes nothing."""
        with self._lock:
            return self._report()

    def reset(self) -> None:
        """Forget all scores, tests and alarms."""
        with self._lock:
            self._block: list[float] = []
            self._looks = self._unscored_looks = self._answers = self._unscored = 0
            self._seen = (0, 0)
            self._latest = Drift(p_value=1.0, moved=False, n=0, statistic=0.0, level=self._level, looks=0)

    def _report(self) -> Drift:
        return self._latest.model_copy(update={"answers": self._answers, "unscored": self._unscored})

    def _block_size(self, looks: int) -> int:
        return self._window if looks > self._window else min(self._window, self._min_n << looks)

    def _look(self) -> None:
        """Test the full block, at its share of the level, and begin the next."""
        self._looks += 1
        found = _compared(np.array(self._block), self._scores, level=self._share(self._looks))
        if not self._latest.moved:
            share = {name: getattr(self._latest, name) for name in ("unscored_p_value", "unscored_moved")}
            self._latest = found.model_copy(update=share)
        self._latest = self._latest.model_copy(update={"looks": self._looks})
        self._block = []

    def _look_at_unscored(self) -> None:
        """Test the last block of answers for more unscored ones than the calibration had."""
        self._unscored_looks += 1
        answers, unscored = self._answers - self._seen[0], self._unscored - self._seen[1]
        self._seen = (self._answers, self._unscored)
        if self._latest.unscored_moved:
            return
        both, without = self._n + answers, self._n_unscored + unscored
        p_value = min(1.0, max(0.0, float(_stats().hypergeom.sf(unscored - 1, both, without, answers))))
        moved = p_value <= self._share(self._unscored_looks)
        self._latest = self._latest.model_copy(update={"unscored_p_value": p_value, "unscored_moved": moved})

    def _share(self, look: int) -> float:
        return self._level / (look * (look + 1))


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise InputError(f"level must lie strictly between 0 and 1, for example 0.01; it is {level!r}.")
