"""Metrics against scikit-learn and against brute force over all orders of tied answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from semgrad_guard.calibration import calibrate
from semgrad_guard.errors import InputError
from semgrad_guard.metrics import aurc, auroc, risk_coverage, tally

ANSWERS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6)


def prr(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> float:
    return float(tally(uncertainties, correct).prr()[0])


def accuracy_at(uncertainties: Sequence[float | None], correct: Sequence[bool], *, coverage: float) -> float:
    return float(tally(uncertainties, correct).accuracy_at(coverage)[0])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=2, max_size=60))
def test_auroc_is_scikit_learns_ties_and_all(answers: list[tuple[int, bool]]) -> None:
    scores, correct = zip(*answers, strict=True)
    found = auroc([float(s) for s in scores], correct)
    assert found == calibrate(scores, correct, alpha=0.1, delta=0.1).auroc  # to the last digit
    if len(set(correct)) == 1:
        assert found is None
    else:
        assert found == float(tally(scores, correct).auroc()[0])
        assert found == pytest.approx(roc_auc_score(~np.array(correct), scores), abs=1e-12)


def test_answers_without_a_score_play_no_part_in_auroc() -> None:
    assert auroc([0.1, None, math.nan, math.inf, 0.9], [True, False, False, True, False]) == 1.0
    assert auroc([None, None], [True, False]) is None


@settings(deadline=None)
@given(ANSWERS)
def test_risk_is_the_mean_over_all_orders_of_ties(answers: list[tuple[int, bool]]) -> None:
    orders = [o for o in itertools.permutations(answers) if all(a[0] <= b[0] for a, b in itertools.pairwise(o))]
    answered = np.arange(1, len(answers) + 1)
    expected = np.mean([np.cumsum([not right for _, right in order]) / answered for order in orders], axis=0)
    curve = risk_coverage([float(score) for score, _ in answers], [right for _, right in answers])
    np.testing.assert_allclose(curve.risk, expected, atol=1e-12)
    np.testing.assert_allclose(curve.coverage, answered / len(answers))
    assert aurc([float(s) for s, _ in answers], [right for _, right in answers]) == pytest.approx(expected.mean())


@settings(deadline=None)
@given(ANSWERS)
def test_prr_is_the_share_of_what_an_oracle_gains(answers: list[tuple[int, bool]]) -> None:
    scores, correct = [float(score) for score, _ in answers], [right for _, right in answers]
    if len(set(correct)) == 1:
        assert math.isnan(prr(scores, correct))
        return
    ideal = aurc([0.0 if right else 1.0 for right in correct], correct)
    random = correct.count(False) / len(correct)
    assert prr(scores, correct) == pytest.approx((random - aurc(scores, correct)) / (random - ideal))  # type: ignore[operator]
    assert prr([float(not right) for right in correct], correct) == pytest.approx(1.0)
    assert prr([1.0] * len(correct), correct) == pytest.approx(0.0, abs=1e-9)


@settings(deadline=None)
@given(ANSWERS, st.sampled_from([0.1, 0.25, 0.5, 0.8, 1.0]))
def test_accuracy_at_a_coverage_is_read_off_the_curve(answers: list[tuple[int, bool]], coverage: float) -> None:
    scores, correct = [float(score) for score, _ in answers], [right for _, right in answers]
    curve = risk_coverage(scores, correct)
    at = next(i for i, c in enumerate(curve.coverage) if c >= coverage - 1e-9)
    assert accuracy_at(scores, correct, coverage=coverage) == pytest.approx(1 - curve.risk[at])


def test_accuracy_at_a_coverage_that_scores_do_not_reach() -> None:
    assert accuracy_at([0.1, None, 0.2, None], [True, True, False, False], coverage=0.5) == 0.5
    assert accuracy_at([0.1, None, 0.2, None], [True, True, False, False], coverage=0.6) == pytest.approx(
        math.nan, nan_ok=True
    )
    assert math.isnan(accuracy_at([None], [True], coverage=1.0))


def test_the_curve_ends_where_scores_end() -> None:
    curve = risk_coverage([0.2, None, 0.1, None], [False, True, True, False])
    assert curve.coverage.tolist() == [0.25, 0.5]
    assert curve.risk.tolist() == [0.0, 0.5]
    assert aurc([None], [True]) is None


def test_mismatched_and_empty_columns_are_refused() -> None:
    with pytest.raises(InputError, match="2 uncertainties and 1 labels"):
        auroc([0.1, 0.2], [True])
    with pytest.raises(InputError, match="no answers"):
        risk_coverage([], [])
