"""A watched promise: rare false alarms for its whole life, prompt true ones, and an interval that scipy confirms."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import betabinom, binom

from semgrad_guard.calibration.promise import Bets, PromiseMonitor, PromiseState
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


def report_of(grades: Iterable[bool], *, alpha: float = 0.1, delta: float = 0.1) -> PromiseState:
    """The state after these grades, True being a wrong answer."""
    monitor = PromiseMonitor(alpha, delta)
    for wrong in grades:
        monitor.add(wrong)
    return monitor.report()


@given(
    grades=st.lists(st.booleans(), max_size=120),
    alpha=st.sampled_from([0.02, 0.1, 0.45]),
    delta=st.sampled_from([0.05, 0.2]),
)
def test_the_state_is_what_the_range_says(grades: list[bool], alpha: float, delta: float) -> None:
    """Broken and the range are one statistic: the bets at alpha refute it just where the range begins above it."""
    found = report_of(grades, alpha=alpha, delta=delta)
    bets, most = Bets(alpha), 0.0
    for wrong in grades:
        most = max(most, float(bets.add(np.array([wrong]))[0]))
    assert (found.state == "broken") == (found.low > alpha) == (most >= 1 / delta)
    assert (found.state == "kept") == (found.high <= alpha)
    assert 0 <= found.low <= found.high <= 1


def test_the_range_begins_above_all_rates_that_the_bets_refute() -> None:
    grades = (np.random.default_rng(2).random(300) < 0.4).tolist()
    low = report_of(grades).low
    for rate, refuted in ((0.9 * low, True), (low * 0.999, True), (low * 1.03, False), (0.9, False)):
        bets = Bets(rate)
        assert any(bets.add(np.array([wrong]))[0] >= 10 for wrong in grades) is refuted
    assert 0.1 < low < 0.4


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_few_wrong_answers_break_no_promise(wrong: int) -> None:
    found = report_of([False, *[True] * wrong])
    assert (found.state, found.low < 0.1) == ("unknown", True)


def test_the_states() -> None:
    assert (report_of([]).state, report_of([]).low, report_of([]).high) == ("unknown", 0, 1)
    assert report_of([False] * 5).state == "unknown"
    kept = report_of([False] * 60)
    assert (kept.state, kept.low) == ("kept", 0)
    assert "Kept: of 60 answers drawn at random 0 were wrong" in str(kept)
    broken = report_of([*[False] * 60, *[True] * 30])
    assert broken.state == report_of([*[False] * 60, *[True] * 30, *[False] * 2000]).state == "broken"  # it stays
    assert f"is above {broken.low:.1%} and at most {broken.high:.1%}" in str(broken)
    for alpha, delta in ((0.0, 0.1), (0.1, 1.0)):
        with pytest.raises(CalibrationError):
            PromiseMonitor(alpha, delta)


@pytest.mark.parametrize(("labels", "wrong"), [(1, 1), (40, 0), (40, 40), (200, 9), (5000, 700)])
def test_the_end_of_the_range_is_that_of_scipys_laws(labels: int, wrong: int) -> None:
    spread = [(number + 1) * wrong // labels > number * wrong // labels for number in range(labels)]
    assert sum(spread) == wrong
    high = report_of(spread, alpha=0.9, delta=0.05).high
    ratio = betabinom.pmf(wrong, labels, 0.5, 4.5) / max(binom.pmf(wrong, labels, high), 1e-300)
    assert high == 1 or ratio == pytest.approx(20, rel=1e-6)
    assert wrong / labels <= high


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
