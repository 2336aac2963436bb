"""Confidence maps against scikit-learn, and what must hold for any data."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm, rankdata
from sklearn.calibration import _SigmoidCalibration
from sklearn.isotonic import IsotonicRegression

from semgrad_guard.calibration.thresholds import ConfidenceMap, fit_isotonic, fit_ranks

METHODS = (fit_isotonic, fit_ranks)
Fit = Callable[[NDArray, NDArray], ConfidenceMap]
finite = st.floats(allow_nan=False, allow_infinity=False)
scored = st.lists(st.tuples(st.one_of(finite, st.integers(-3, 3).map(float)), st.booleans()), min_size=1, max_size=40)


def draw(seed: int, *, ties: bool = False, scale: float = 1.0, n: int = 300) -> tuple[NDArray, NDArray]:
    rng = np.random.default_rng(seed)
    scores = rng.lognormal(size=n)
    if ties:
        scores = np.round(scores, 1)
    return scores * scale, rng.random(n) < 1 / (1 + np.exp(2 * scores - 3))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_isotonic_is_scikit_learns(seed: int, ties: bool) -> None:
    scores, correct = draw(seed, ties=ties)
    oracle = IsotonicRegression(increasing=False, out_of_bounds="clip")
    fitted = oracle.fit(scores, correct).predict(scores)
    mine = fit_isotonic(scores, correct)
    for score, value in zip(scores, fitted, strict=True):
        n = int((fitted == value).sum())
        if 1 / (n + 2) <= value <= (n + 1) / (n + 2):
            assert mine(score) == pytest.approx(value, abs=1e-12)
        else:  # a level that its few answers do not support is moved inwards, at most to its neighbour
            assert abs(mine(score) - 0.5) < abs(value - 0.5)


def test_a_few_right_answers_are_no_certainty() -> None:
    scores = np.arange(300.0)
    correct = np.isin(scores, (0, 1, 2, 50, 100, 150))
    confidence = fit_isotonic(scores, correct)
    assert confidence(0.0) == pytest.approx(4 / 5)
    assert confidence(299.0) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_isotonic_confidence_is_calibrated_on_other_answers(seed: int) -> None:
    confidence = fit_isotonic(*draw(seed, n=3000))
    scores, correct = draw(seed + 100, n=20_000)
    claimed = np.array([confidence(u) for u in scores])
    for low, high in pairwise((0.0, 0.3, 0.6, 0.85, 1.0)):
        inside = (claimed >= low) & (claimed < high)
        assert correct[inside].mean() == pytest.approx(claimed[inside].mean(), abs=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_the_curve_over_ranks_is_scikit_learns(seed: int) -> None:
    scores, correct = draw(seed)
    quantiles = norm.ppf((rankdata(scores) - 0.5) / len(scores))
    oracle = _SigmoidCalibration().fit(-quantiles, correct.astype(int))
    mine = fit_ranks(scores, correct)
    knots = np.isin(scores, mine.uncertainties)
    np.testing.assert_allclose(
        [mine(u) for u in scores[knots]], np.clip(oracle.predict(-quantiles[knots]), 1 / 302, 301 / 302), atol=2e-5
    )


@pytest.mark.parametrize("fit", METHODS)
@given(rows=scored, points=st.lists(finite, min_size=2, max_size=10))
def test_confidence_never_rises_and_never_claims_certainty(
    fit: Fit, rows: list[tuple[float, bool]], points: list[float]
) -> None:
    scores, correct = np.array([s for s, _ in rows]), np.array([c for _, c in rows])
    confidence = fit(scores, correct)
    n = len(rows)
    values = [confidence(u) for u in sorted([*points, *scores.tolist()])]
    assert all(later <= earlier for earlier, later in pairwise(values))
    assert all(1 / (n + 2) <= value <= (n + 1) / (n + 2) for value in values)


@pytest.mark.parametrize("fit", METHODS)
@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize("n", [1, 50])
def test_one_kind_of_label_gives_one_value_short_of_certainty(fit: Fit, label: bool, n: int) -> None:
    confidence = fit(np.arange(float(n)), np.full(n, label))
    values = {round(confidence(u), 3) for u in (-1.0, 0.0, 7.5, 1e9)}
    assert values == {round((n + 1) / (n + 2) if label else 1 / (n + 2), 3)}


def test_between_knots_is_a_straight_line_even_where_distances_overflow() -> None:
    steep = ConfidenceMap(method="isotonic", uncertainties=(-1.5e308, 1.5e308), confidences=(0.9, 0.1))
    assert steep(0.0) == pytest.approx(0.5)
    assert ConfidenceMap(method="isotonic", uncertainties=(1.0, 3.0), confidences=(0.8, 0.4))(1.5) == pytest.approx(0.7)


def test_few_labels_do_not_make_a_confidence_that_does_not_hold() -> None:
    """Where 0.9 and more is claimed, so many are right; an isotonic map of 50 labels claims too much."""
    rng = np.random.default_rng(0)
    claimed, true = {"isotonic": 0.0, "ranks": 0.0}, {"isotonic": 0.0, "ranks": 0.0}
    counts = {"isotonic": 0, "ranks": 0}
    for _ in range(150):
        wrong, later = rng.random(50) < 0.44, rng.random(200) < 0.44
        scores, new = rng.normal(size=50) + 0.95 * wrong, rng.normal(size=200) + 0.95 * later
        for method, fit in (("isotonic", fit_isotonic), ("ranks", fit_ranks)):
            fitted = fit(scores, ~wrong)
            high = np.array([fitted(score) for score in new.tolist()])
            claimed[method] += float(high[high >= 0.9].sum())
            true[method] += float((~later[high >= 0.9]).sum())
            counts[method] += int((high >= 0.9).sum())
    gap = {method: (claimed[method] - true[method]) / counts[method] for method in claimed}
    print(gap)
    assert gap["ranks"] < 0.07 < 0.09 < gap["isotonic"]
