"""Intervals: counts of many resamples against each one's metrics written out; calibration error against direct sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import brier_score_loss

from semgrad_guard import metrics
from semgrad_guard.calibration.thresholds import fit_isotonic
from semgrad_guard.metrics import Tally, tally
from semgrad_guard.paper.summary import (
    Resampling,
    bootstrap,
    brier,
    combined,
    crossfitted,
    estimate,
    expected_calibration_error,
    mean,
    paired_difference,
    reliability,
)

ANSWERS = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 4).map(float)), st.booleans()), min_size=1, max_size=12
)
METRICS = {"auroc": Tally.auroc, "aurc": Tally.aurc, "prr": Tally.prr, "half": lambda counts: counts.accuracy_at(0.5)}


def one_by_one(name: str, scores: list[float | None], correct: list[bool]) -> float:
    found = {
        "auroc": metrics.auroc,
        "aurc": metrics.aurc,
        "prr": lambda u, c: tally(u, c).prr()[0],
        "half": lambda u, c: tally(u, c).accuracy_at(0.5)[0],
    }[name](scores, correct)
    return math.nan if found is None else found


@settings(deadline=None, max_examples=60)
@given(ANSWERS, st.integers(0, 5))
def test_a_row_of_weights_is_a_set_with_copies(answers: list[tuple[float | None, bool]], seed: int) -> None:
    scores, correct = [list(column) for column in zip(*answers, strict=True)]
    (weights,) = Resampling(count=4, seed=seed).weights(len(scores))
    counted = tally(scores, correct, weights)
    for name, metric in METRICS.items():
        expected = [
            one_by_one(name, np.repeat(np.array(scores, dtype=object), row).tolist(), np.repeat(correct, row).tolist())
            for row in weights
        ]
        np.testing.assert_allclose(metric(counted), expected, atol=1e-12, err_msg=name)


def test_resamples_are_shared_by_all_methods_on_the_same_questions() -> None:
    one, again, other = (np.concatenate([*Resampling(d).weights(50)]) for d in ("SciQ", "SciQ", "TriviaQA"))
    assert one.shape == (1000, 50)
    assert (one.sum(axis=1) == 50).all()
    assert (one == again).all()
    assert (one != other).any()
    assert one.mean() == pytest.approx(1.0)
    assert one.var() == pytest.approx(1.0, rel=0.05)  # multinomial: n p (1 - p)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """AUROC of two normal distributions one apart is 0.76; 95 % intervals from 120 answers, 150 times."""
    rng = np.random.default_rng(1)
    truth = 0.5 * (1 + math.erf(0.5))
    hits = 0
    for _ in range(150):
        correct = rng.random(120) < 0.6
        found = bootstrap(
            {"auroc": Tally.auroc}, rng.normal(~correct, 1.0).tolist(), correct.tolist(), Resampling(count=300)
        )
        low, high = found["auroc"].low, found["auroc"].high
        assert low is not None
        assert high is not None
        hits += low <= truth <= high
    assert 0.89 <= hits / 150 <= 0.99


def test_a_paired_difference_is_tighter_than_two_intervals() -> None:
    rng = np.random.default_rng(2)
    correct = (rng.random(300) < 0.5).tolist()
    base = rng.normal(~np.array(correct), 1.0)
    scores: list[float | None] = (base + rng.normal(0, 0.1, 300)).tolist()
    found = paired_difference({"auroc": Tally.auroc}, base.tolist(), scores, correct)["auroc"]
    alone = bootstrap({"auroc": Tally.auroc}, base.tolist(), correct)["auroc"]
    assert None not in (found.low, found.high, alone.low, alone.high)
    assert found.high - found.low < 0.5 * (alone.high - alone.low)  # type: ignore[operator]
    assert found.low <= found.value <= found.high  # type: ignore[operator]


def test_a_paired_difference_is_of_the_same_answers() -> None:
    """Without its first two answers `one` is perfect; only there does `other` lack a score."""
    correct = [True, False, True, False, True, False]
    one, other = [9.0, 0.0, 1.0, 2.0, 1.0, 2.0], [None, None, 2.0, 1.0, 2.0, 1.0]
    assert paired_difference({"auroc": Tally.auroc}, one, other, correct)["auroc"].value == 1.0
    same = paired_difference({"auroc": Tally.auroc}, one, one, correct)["auroc"]
    assert (same.value, same.low, same.high, same.excludes_zero) == (0.0, 0.0, 0.0, False)


def test_what_is_undefined_has_no_interval() -> None:
    right = bootstrap(METRICS, [0.1, 0.2, 0.3], [True, True, True])
    assert right["auroc"].value is None
    assert right["prr"].value is None
    assert (right["aurc"].value, right["aurc"].low, right["aurc"].high) == (0.0, 0.0, 0.0)
    single = bootstrap(METRICS, [0.1], [False])
    assert single["auroc"].value is None
    assert single["aurc"].value == 1.0
    rare = bootstrap({"auroc": Tally.auroc}, [0.1, 0.2, 0.9], [True, True, False])["auroc"]
    assert (rare.value, rare.low) == (1.0, None)  # eight of 27 resamples miss the wrong answer
    assert bootstrap(METRICS, [None, None], [True, False])["aurc"].value is None


def test_sums_go_replicate_by_replicate() -> None:
    one, other = estimate(1.0, np.array([0.0, 1.0, 2.0])), estimate(3.0, np.array([2.0, 3.0, 4.0]))
    assert mean([one, other]).value == 2.0
    assert mean([one, other]).replicates.tolist() == [1.0, 2.0, 3.0]
    difference = combined([other, one], [1.0, -1.0])
    assert (difference.value, difference.low, difference.high) == (2.0, 2.0, 2.0)
    assert difference.excludes_zero
    assert mean([one, estimate(math.nan, np.full(3, math.nan))]).value is None


def test_whole_answers_are_drawn_where_rows_are_their_sentences() -> None:
    clusters = [0, 0, 0, 1, 2, 2]
    weights = np.concatenate([*Resampling(count=50, clusters=clusters).weights(6)])
    assert (weights[:, 0] == weights[:, 2]).all()
    assert (weights[:, 4] == weights[:, 5]).all()
    assert (weights[:, [0, 3, 4]].sum(axis=1) == 3).all()


CONFIDENCES = st.lists(st.tuples(st.integers(0, 999), st.booleans()), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(CONFIDENCES)
def test_ece_and_brier_are_what_their_definitions_say(answers: list[tuple[int, bool]]) -> None:
    thousandths, correct = (np.array(column) for column in zip(*answers, strict=True))
    confidence = (thousandths + 0.5) / 1000
    gaps = [
        abs(correct[thousandths // 100 == b].mean() - confidence[thousandths // 100 == b].mean())
        * (thousandths // 100 == b).mean()
        for b in set(thousandths // 100)
    ]
    found = expected_calibration_error(confidence, correct.tolist(), Resampling(count=20))
    assert found.value == pytest.approx(sum(gaps))
    score = brier(confidence, correct.tolist(), Resampling(count=20))
    assert score.value == pytest.approx(brier_score_loss(correct, confidence, pos_label=True))


def test_answers_without_a_probability_play_no_part() -> None:
    confidence = np.array([0.9, np.nan, 0.2])
    assert brier(confidence, [True, True, False]).value == pytest.approx((0.01 + 0.04) / 2)
    assert expected_calibration_error(confidence, [True, True, False]).value == pytest.approx((0.1 + 0.2) / 2)
    nothing = np.full(3, np.nan)
    assert brier(nothing, [True, True, False]).value is None
    assert expected_calibration_error(nothing, [True, True, False]).value is None
    assert len(reliability(nothing, [True, True, False]).count) == 0


def test_no_answer_makes_its_own_probability() -> None:
    """Turning one label round changes others' probabilities and never its own."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=40).tolist()
    correct = (rng.random(40) < 0.5).tolist()
    before = crossfitted(scores, correct)
    for row in range(8):
        turned = [label != (i == row) for i, label in enumerate(correct)]
        after = crossfitted(scores, turned)
        assert after[row] == before[row]
        assert (after != before).any()


def test_crossfitting_keeps_rows_and_skips_what_has_no_score() -> None:
    scores = [None if i % 7 == 0 else float(i) for i in range(60)]
    correct = [i < 30 for i in range(60)]
    found = crossfitted(scores, correct)
    assert np.isnan(found[::7]).all()
    kept = ~np.isnan(found)
    assert kept.sum() == 60 - 9
    assert (found[kept][np.array(correct)[kept]] > 0.5).mean() > 0.9
    in_sample = fit_isotonic(np.arange(60.0), np.array(correct))
    assert found[1] == pytest.approx(in_sample(1.0), abs=0.05)
    assert np.isnan(crossfitted([0.1, 0.2, None], [True, False, True])).all()


def test_the_diagram_has_exact_intervals() -> None:
    confidence = np.array([0.95] * 10 + [1.0] * 2 + [0.31] * 5)
    correct = [True] * 9 + [False] + [True] * 2 + [False] * 5
    found = reliability(confidence, correct)
    assert found.count.tolist() == [5, 12]
    assert found.accuracy.tolist() == [0.0, pytest.approx(11 / 12)]
    assert found.confidence.tolist() == [pytest.approx(0.31), pytest.approx((9.5 + 2) / 12)]
    for k, n, low, high in zip([0, 11], [5, 12], found.low, found.high, strict=True):
        exact = binomtest(k, n).proportion_ci(method="exact")
        assert (low, high) == (pytest.approx(exact.low), pytest.approx(exact.high))
