"""Monitors: of drift, and of a promise. False alarms stay rare however often one looks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import betabinom, binom, kstest

from semgrad_guard.calibration import Calibration, Drift, DriftMonitor, calibrate
from semgrad_guard.calibration.monitors import Bets, PromiseMonitor, PromiseState, RankBets, ScoreRanks
from semgrad_guard.errors import CalibrationError, InputError


def calibration_of(scores: list[float] | np.ndarray) -> Calibration:
    return calibrate(scores, [True] * len(scores), alpha=0.5, delta=0.5)


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, math.nan])
def test_a_level_outside_zero_and_one_is_refused(level: float) -> None:
    with pytest.raises(InputError, match="level must"):
        DriftMonitor(calibration_of([0.1]), level=level)


def test_without_calibration_scores_there_is_nothing_to_compare() -> None:
    with pytest.raises(CalibrationError, match="no scores"):
        DriftMonitor(calibration_of([math.nan]))


def test_an_alarm_stays_until_reset() -> None:
    rng = np.random.default_rng(3)
    monitor = DriftMonitor(calibration_of(rng.random(200)))
    assert monitor.report() == Drift(p_value=1.0, moved=False, n=0, statistic=1.0, level=0.01)
    alarm = [monitor.add(u + 0.5) for u in rng.random(60)][-1]
    assert alarm.moved
    assert alarm.statistic == pytest.approx(1 / alarm.p_value)
    later = [monitor.add(u) for u in rng.random(300)][-1]
    assert (later.moved, later.n, later.answers) == (True, 360, 360)
    assert later.p_value <= alarm.p_value
    assert monitor.report() == monitor.report() == later
    assert monitor.in_words().startswith("Drift alarm: the scores are no longer those of the calibration.")
    monitor.reset()
    assert monitor.report().n == 0
    assert not [monitor.add(u) for u in rng.random(60)][-1].moved


def alarms(rng: np.random.Generator, draw: Callable[[int], np.ndarray], *, repeats: int, n: int) -> float:
    """The share of monitors (level .1) that raise an alarm within n scores."""
    found = 0
    for _ in range(repeats):
        monitor = DriftMonitor(calibration_of(draw(100)), level=0.1)
        found += [monitor.add(u) for u in draw(n)][-1].moved
    return found / repeats


@pytest.mark.parametrize("values", [10**9, 5, 1], ids=["continuous", "five values", "one value"])
def test_false_alarms_stay_rare_over_all_looks_together(values: int) -> None:
    rng = np.random.default_rng(4)
    assert alarms(rng, lambda n: rng.integers(0, values, n).astype(float), repeats=60, n=200) <= 0.1 + 0.08


def test_ranks_are_uniform_and_independent_of_each_other() -> None:
    rng = np.random.default_rng(5)
    series = [ScoreRanks(rng.integers(0, 30, 40).astype(float), rng) for _ in range(1500)]
    first, *_, last = [[ranks.add(float(rng.integers(0, 30))) for ranks in series] for _ in range(6)]
    assert kstest(first, "uniform").pvalue > 0.001
    assert kstest(last, "uniform").pvalue > 0.001
    assert abs(np.corrcoef(first, last)[0, 1]) < 0.1


def test_the_ranks_are_those_among_all_earlier_scores() -> None:
    """Without ties, as counted one by one; a cell of the calibration's scores is as exact as its edges."""
    rng = np.random.default_rng(6)
    old, new = rng.random(50), rng.random(200)
    ranks = ScoreRanks(old, rng)
    for t, score in enumerate(new):
        edges = np.sort(old)
        cell = np.searchsorted(edges, score)
        seen = np.searchsorted(edges, new[:t])
        below, own, total = cell + (seen < cell).sum(), 1 + (seen == cell).sum(), 51 + t
        assert below / total <= ranks.add(score) <= (below + own) / total


def test_the_evidence_of_bets_is_fair_under_no_change_and_grows_under_one() -> None:
    rng = np.random.default_rng(7)
    bets, moved = RankBets(100, streams=4000), RankBets(100, streams=500)
    evidence = grown = np.ones(1)
    for _ in range(12):
        evidence = bets.add(rng.random(4000))
        grown = moved.add(ndtr(rng.normal(size=500) + 1))
    assert evidence.mean() == pytest.approx(1, abs=0.25)
    assert np.median(grown) > 20


@pytest.mark.parametrize(("clean", "shift", "within"), [(0, 1.0, 30), (1000, 1.0, 60), (1000, -1.0, 60)])
def test_real_drift_is_found(clean: int, shift: float, within: int) -> None:
    rng, soon = np.random.default_rng(8), 0
    for _ in range(9):
        monitor = DriftMonitor(calibration_of(rng.normal(size=100)))
        before = [monitor.add(u) for u in rng.normal(size=clean)]
        assert not before or not before[-1].alarm
        soon += [monitor.add(u) for u in rng.normal(size=within) + shift][-1].moved
    assert soon >= 5


def test_the_words_name_the_shifts_that_a_small_calibration_cannot_see() -> None:
    words = DriftMonitor(calibration_of(np.linspace(0, 1, 100))).in_words()
    assert words.startswith("No drift is seen (0 answers, 0 of them without a score). With 100 calibration scores")
    assert "from about 0.4 standard deviations on" in words


def test_threads_lose_no_score() -> None:
    monitor = DriftMonitor(calibration_of(np.linspace(0, 1, 50)))

    def feed() -> None:
        for u in np.linspace(0, 1, 100):
            monitor.add(float(u))

    threads = [threading.Thread(target=feed) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monitor.report().n == 800


def with_unscored(scored: int, unscored: int) -> Calibration:
    scores = [*np.linspace(0, 1, scored).tolist(), *[None] * unscored]
    return calibrate(scores, [True] * len(scores), alpha=0.5, delta=0.5)


def test_answers_without_a_score_are_counted_and_raise_an_alarm() -> None:
    monitor = DriftMonitor(with_unscored(200, 0))
    reports = [monitor.add(None) for _ in range(20)]
    assert not reports[1].alarm
    assert reports[-1].alarm
    last = monitor.add(0.5)
    assert (last.answers, last.unscored, last.unscored_moved, last.moved) == (21, 20, True, False)
    assert last.unscored_p_value < 0.01
    assert "more answers than at calibration have no score" in monitor.in_words()
    monitor.reset()
    assert (monitor.report().unscored, monitor.report().alarm) == (0, False)


@pytest.mark.parametrize(("later", "low", "high"), [(0.2, 0.0, 0.15), (0.6, 0.9, 1.0), (0.0, 0.0, 0.0)])
def test_a_larger_share_of_unscored_answers_alone_raises_alarms(later: float, low: float, high: float) -> None:
    rng, found = np.random.default_rng(8), 0
    for _ in range(60):
        monitor = DriftMonitor(with_unscored(*np.bincount(rng.random(100) < 0.2, minlength=2)), level=0.1)
        reports = [monitor.add(None if u < (0.2 if i < 60 else later) else 0.5) for i, u in enumerate(rng.random(160))]
        found += reports[-1].unscored_moved
    assert low <= found / 60 <= high + 0.05 * (later < 0.2)


@pytest.mark.parametrize("no_number", ["a", "0.1", b"1", [1.0], {}])
def test_what_is_no_number_is_refused_by_type(no_number: object) -> None:
    monitor = DriftMonitor(calibration_of([0.1] * 50))
    with pytest.raises(InputError, match="a number or None"):
        monitor.add(no_number)  # type: ignore[arg-type]
    assert monitor.report().answers == 0


# A watched promise: rare false alarms for its whole life, prompt true ones, and an interval that scipy confirms.


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
