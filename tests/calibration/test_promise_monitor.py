"""A watched promise: rare false alarms for its whole life, prompt true ones, and an interval that scipy confirms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import betabinom, binom

from semgrad_guard.calibration.promise import Bets, PromiseMonitor
from semgrad_guard.errors import CalibrationError

NEVER = 10**9


def first_alarms(
    rate: Callable[[int], float], *, labels: int, streams: int, alpha: float = 0.1, seed: int = 1
) -> NDArray[np.int64]:
    rng, bets = np.random.default_rng(seed), Bets(alpha, streams=streams)
    first = np.full(streams, NEVER)
    for n in range(1, labels + 1):
        evidence = bets.add(rng.random(streams) < rate(n))
        first = np.where((first == NEVER) & (evidence >= 10), n, first)
    return first


@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_a_kept_promise_is_rarely_called_broken_in_its_whole_life(alpha: float) -> None:
    alarms = first_alarms(lambda _: alpha, alpha=alpha, labels=1000, streams=2000)
    assert np.mean(alarms < NEVER) <= 0.1
    assert np.mean(alarms < NEVER) > 0.02  # the level is spent, not wasted


@pytest.mark.parametrize(("good", "median"), [(0, 70), (500, 170)])
def test_a_broken_promise_is_noticed(good: int, median: int) -> None:
    alarms = first_alarms(lambda n: 0.05 if n <= good else 0.2, labels=good + 600, streams=1000)
    assert np.median(alarms[alarms > good]) - good <= median


def test_one_monitor_is_one_of_the_streams() -> None:
    rng = np.random.default_rng(2)
    grades = rng.random((300, 7)) < 0.15
    bets, monitors = Bets(0.1, streams=7), [PromiseMonitor(0.1, 0.1) for _ in range(7)]
    evidence = np.ones(7)
    for row in grades:
        evidence = bets.add(row)
        for monitor, wrong in zip(monitors, row, strict=True):
            monitor.add(wrong)
    assert [monitor.report().evidence for monitor in monitors] == pytest.approx(evidence)


def test_the_states() -> None:
    monitor = PromiseMonitor(0.1, 0.1)
    assert monitor.report().state == "unknown"
    assert (monitor.report().low, monitor.report().high) == (0, 1)
    states = [monitor.add(False) for _ in range(60)]
    assert states[:5] == ["unknown"] * 5
    assert states[-1] == "kept"
    assert "Kept: of 60 answers drawn at random 0 were wrong" in str(monitor.report())
    assert [monitor.add(True) for _ in range(30)][-1] == "broken"
    assert {monitor.add(False) for _ in range(2000)} == {"broken"}  # an alarm stays
    for alpha, delta in ((0.0, 0.1), (0.1, 1.0)):
        with pytest.raises(CalibrationError):
            PromiseMonitor(alpha, delta)


@pytest.mark.parametrize(("labels", "wrong"), [(1, 1), (40, 0), (40, 40), (200, 9), (5000, 700)])
def test_the_ends_of_the_interval_are_those_of_scipys_laws(labels: int, wrong: int) -> None:
    monitor = PromiseMonitor(0.1, 0.05)
    for number in range(labels):
        monitor.add(number < wrong)

    def ratio(rate: float) -> float:
        return float(betabinom.pmf(wrong, labels, 0.5, 4.5) / max(binom.pmf(wrong, labels, rate), 1e-300))

    found = monitor.report()
    for end, beyond in ((found.low, 0.0), (found.high, 1.0)):
        assert end == beyond or ratio(end) == pytest.approx(20, rel=1e-6)
    assert found.low <= wrong / labels <= found.high


def test_the_interval_rarely_misses_the_rate_at_any_look() -> None:
    rng, missed = np.random.default_rng(3), 0
    for _ in range(100):
        monitor = PromiseMonitor(0.1, 0.1)
        misses = []
        for wrong in rng.random(400) < 0.07:
            monitor.add(bool(wrong))
            misses.append(monitor._excludes(0.07))
        missed += any(misses)
    assert missed <= 15
