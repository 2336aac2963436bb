"""Drift: one test against scipy, and a monitor whose false alarms stay rare however often one looks."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from scipy.stats import fisher_exact, ks_2samp

from semgrad_guard.calibration import Calibration, Drift, DriftMonitor, calibrate, drift
from semgrad_guard.errors import CalibrationError, InputError


def calibration_of(scores: list[float] | np.ndarray) -> Calibration:
    return calibrate(scores, [True] * len(scores), alpha=0.5, delta=0.5)


def test_one_look_is_scipys_test() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.lognormal(size=300), rng.lognormal(0.2, size=90)
    found, expected = drift(new, old), ks_2samp(new, old)
    assert (found.p_value, found.statistic) == (expected.pvalue, expected.statistic)
    assert (found.n, found.level, found.moved) == (90, 0.01, expected.pvalue <= 0.01)
    assert drift(new, old, level=float(expected.pvalue)).moved
    assert drift(new + 1, old).moved


def test_one_look_raises_false_alarms_at_its_level() -> None:
    rng = np.random.default_rng(1)
    alarms = np.mean([drift(rng.random(60), rng.random(150), level=0.1).moved for _ in range(800)])
    assert 0.06 <= alarms <= 0.1 + 0.021  # 2 standard errors


def test_absent_scores_are_left_out_and_nothing_is_no_drift() -> None:
    assert drift([None, math.nan, math.inf, 0.5], [0.1, 0.9]).n == 1
    assert drift([None], [0.1]) == Drift(p_value=1.0, moved=False, n=0, statistic=0.0, level=0.01)
    assert not drift([1.0] * 50, [1.0] * 50).moved


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, math.nan])
def test_a_level_outside_zero_and_one_is_refused(level: float) -> None:
    with pytest.raises(InputError, match="level must"):
        drift([0.1], [0.1], level=level)
    with pytest.raises(InputError, match="level must"):
        DriftMonitor(calibration_of([0.1]), level=level)


def test_without_calibration_scores_there_is_nothing_to_compare() -> None:
    with pytest.raises(CalibrationError, match="no scores"):
        drift([0.1], [])
    with pytest.raises(CalibrationError, match="no scores"):
        DriftMonitor(calibration_of([math.nan]))


@pytest.mark.parametrize(("window", "min_n"), [(10, 11), (10, 0), (0, 0)])
def test_window_sizes_are_checked(window: int, min_n: int) -> None:
    with pytest.raises(InputError, match="min_n"):
        DriftMonitor(calibration_of([0.1]), window=window, min_n=min_n)


def test_blocks_double_up_to_the_window_and_do_not_overlap() -> None:
    rng = np.random.default_rng(2)
    old, new = rng.random(300), rng.random(400)
    monitor = DriftMonitor(calibration_of(old), window=100, level=0.001, min_n=30)
    reports = [monitor.add(u) for u in new]
    ends = [i + 1 for i in range(1, 400) if reports[i].looks > reports[i - 1].looks]
    assert ends == [30, 90, 190, 290, 390]
    starts = [0, *ends[:-1]]
    for k, (start, end) in enumerate(zip(starts, ends, strict=True), start=1):
        expected = drift(new[start:end], old, level=0.001 / (k * (k + 1)))
        assert reports[end - 1] == expected.model_copy(update={"looks": k, "answers": end})
    assert monitor.report() == reports[-1]
    assert monitor.report() == monitor.report()


def test_before_the_first_block_is_full_nothing_is_said() -> None:
    monitor = DriftMonitor(calibration_of([0.1] * 50))
    for _ in range(29):
        found = monitor.add(9.0).model_copy(update={"answers": 0})
        assert found == Drift(p_value=1.0, moved=False, n=0, statistic=0.0, level=0.01, looks=0)
    assert monitor.add(None).looks == monitor.add(math.nan).looks == 0
    assert monitor.add(9.0).moved


def test_an_alarm_stays_until_reset() -> None:
    rng = np.random.default_rng(3)
    monitor = DriftMonitor(calibration_of(rng.random(200)), window=50, min_n=30)
    alarm = [monitor.add(u + 0.5) for u in rng.random(30)][-1]
    assert alarm.moved
    later = [monitor.add(u) for u in rng.random(200)][-1]
    assert later == alarm.model_copy(update={"looks": 5, "answers": 230})
    monitor.reset()
    assert monitor.report().looks == 0
    assert not [monitor.add(u) for u in rng.random(30)][-1].moved


def runs(rng: np.random.Generator, *, shift: float, repeats: int, n: int = 600) -> float:
    """Share of monitors (level .1) that raise an alarm within n scores that moved by `shift`."""
    alarms = 0
    for _ in range(repeats):
        monitor = DriftMonitor(calibration_of(rng.random(150)), window=60, level=0.1, min_n=30)
        alarms += [monitor.add(u + shift) for u in rng.random(n)][-1].moved
    return alarms / repeats


def test_false_alarms_stay_rare_over_all_looks_together() -> None:
    rate = runs(np.random.default_rng(4), shift=0.0, repeats=200)
    print(f"false alarms within 10 looks at level .1: {rate:.3f}")
    assert rate <= 0.1
    assert rate > 0.01  # the level is spent, not wasted


def test_looking_again_and_again_at_the_full_level_would_not() -> None:
    """What the monitor avoids: a sliding window, tested at the full level at every tenth score."""
    rng, alarms = np.random.default_rng(5), 0
    for _ in range(60):
        old, new = rng.random(150), rng.random(600)
        alarms += any(drift(new[end - 60 : end], old, level=0.1).moved for end in range(60, 600, 10))
    print(f"false alarms of a sliding window: {alarms / 60:.3f}")
    assert alarms / 60 > 0.3


def test_real_drift_is_found() -> None:
    assert runs(np.random.default_rng(6), shift=0.25, repeats=30) >= 0.95


def test_threads_lose_no_score() -> None:
    monitor = DriftMonitor(calibration_of(np.linspace(0, 1, 50)), window=40, min_n=40)

    def feed() -> None:
        for u in np.linspace(0, 1, 250):
            monitor.add(float(u))

    threads = [threading.Thread(target=feed) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monitor.report().looks == 8 * 250 // 40


def test_memory_is_bounded_and_long_runs_keep_going() -> None:
    monitor = DriftMonitor(calibration_of([0.1, 0.2]), window=2, min_n=1)
    for _ in range(300):
        monitor.add(0.15)
    assert len(monitor._block) < 2
    assert monitor.report().looks == 1 + 299 // 2


def with_unscored(scored: int, unscored: int) -> Calibration:
    scores = [*np.linspace(0, 1, scored).tolist(), *[None] * unscored]
    return calibrate(scores, [True] * len(scores), alpha=0.5, delta=0.5)


def test_answers_without_a_score_are_counted_and_raise_an_alarm() -> None:
    monitor = DriftMonitor(with_unscored(200, 0))
    reports = [monitor.add(None) for _ in range(40)]
    assert [report.alarm for report in reports] == [*[False] * 29, *[True] * 11]
    last = monitor.add(0.5)
    assert (last.answers, last.unscored, last.unscored_moved, last.moved) == (41, 40, True, False)
    assert last.unscored_p_value < 1e-6
    monitor.reset()
    assert (monitor.report().unscored, monitor.report().alarm) == (0, False)


def test_the_test_of_the_unscored_is_fishers() -> None:
    monitor = DriftMonitor(with_unscored(180, 20), window=50, min_n=50, level=0.3)
    for i in range(50):
        monitor.add(None if i % 5 == 0 else 0.4)
    expected = fisher_exact([[10, 40], [20, 180]], alternative="greater").pvalue
    found = monitor.report()
    assert found.unscored_p_value == pytest.approx(expected)
    assert found.unscored_moved == (expected <= 0.3 / 2)


def test_a_share_of_unscored_answers_like_the_calibrations_raises_few_alarms() -> None:
    rng, alarms = np.random.default_rng(8), 0
    for _ in range(100):
        monitor = DriftMonitor(with_unscored(*np.bincount(rng.random(150) < 0.2, minlength=2)), window=60, level=0.1)
        alarms += [monitor.add(None if u < 0.2 else 0.5) for u in rng.random(600)][-1].unscored_moved
    print(f"false alarms about unscored answers: {alarms / 100:.2f}")
    assert alarms / 100 <= 0.1


def test_a_later_look_at_the_scores_keeps_the_alarm_about_the_unscored() -> None:
    rng = np.random.default_rng(9)
    monitor = DriftMonitor(calibration_of(rng.random(200)))
    for _ in range(30):
        monitor.add(None)
    assert [monitor.add(u) for u in rng.random(100)][-1].unscored_moved


@pytest.mark.parametrize("no_number", ["a", "0.1", b"1", [1.0], {}])
def test_what_is_no_number_is_refused_by_type(no_number: object) -> None:
    monitor = DriftMonitor(calibration_of([0.1] * 50))
    with pytest.raises(InputError, match="a number or None"):
        monitor.add(no_number)  # type: ignore[arg-type]
    assert monitor.report().answers == 0
    with pytest.raises(InputError, match="a number or None"):
        drift([no_number], [0.1])  # type: ignore[list-item]


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.5])
def test_many_calibration_scores_are_compared_as_scipy_does(shift: float) -> None:
    """A look at one block sorts the block alone, whatever the calibration's size."""
    rng = np.random.default_rng(10)
    old, new = np.round(rng.random(30_000), 3), np.round(rng.random(200) + shift, 3)  # with ties
    found, expected = drift(new, old), ks_2samp(new, old)
    assert found.statistic == pytest.approx(expected.statistic, abs=1e-12)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    monitor = DriftMonitor(calibration_of(old), window=200, min_n=200)
    assert [monitor.add(u) for u in new][-1].p_value == found.p_value
