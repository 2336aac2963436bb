"""Exact binomial statements against brute force in rational arithmetic and against scipy's own exact interval."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from semgrad_guard.calibration import gates


def exact_tail(wrong: int, answered: int, alpha: Fraction) -> Fraction:
    """P(at most `wrong` errors), summed term by term."""
    return sum(
        (comb(answered, k) * alpha**k * (1 - alpha) ** (answered - k) for k in range(wrong + 1)), start=Fraction(0)
    )


@pytest.mark.parametrize("alpha", [Fraction(1, 20), Fraction(1, 5), Fraction(1, 2), Fraction(9, 10)])
@pytest.mark.parametrize("answered", [0, 1, 2, 7, 30, 61])
def test_p_values_are_the_exact_tail(alpha: Fraction, answered: int) -> None:
    wrong = list(range(answered + 1))
    found = gates.p_values(wrong, [answered] * len(wrong), alpha=float(alpha))
    expected = [float(exact_tail(k, answered, alpha)) for k in wrong]
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert found[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(("wrong", "answered"), [(0, 1), (0, 22), (3, 22), (21, 22), (22, 22), (17, 400)])
@pytest.mark.parametrize("delta", [0.01, 0.1, 0.5])
def test_upper_bound_is_scipys_exact_interval(wrong: int, answered: int, delta: float) -> None:
    interval = binomtest(wrong, answered, alternative="less").proportion_ci(1 - delta, method="exact")
    assert gates.upper_bound(wrong, answered, delta=delta) == pytest.approx(interval.high, rel=1e-9)


def test_upper_bound_of_nothing_is_one() -> None:
    assert gates.upper_bound(0, 0, delta=0.1) == 1.0


@given(
    st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.floats(0.01, 0.99),
    st.floats(0.01, 0.99),
)
def test_bound_within_alpha_exactly_where_the_test_rejects(counts: tuple[int, int], alpha: float, delta: float) -> None:
    wrong, answered = counts
    p_value = float(gates.p_values(wrong, answered, alpha=alpha))
    bound = gates.upper_bound(wrong, answered, delta=delta)
    if abs(p_value - delta) > 1e-9 and abs(bound - alpha) > 1e-9:
        assert (p_value <= delta) == (bound <= alpha)


@pytest.mark.parametrize(
    ("alpha", "delta", "fewest"), [(0.1, 0.1, 22), (0.2, 0.1, 11), (0.05, 0.05, 59), (0.5, 0.25, 2), (0.9, 0.9, 1)]
)
def test_fewest_answers(alpha: float, delta: float, fewest: int) -> None:
    assert gates.fewest_answers(alpha=alpha, delta=delta) == fewest
    assert gates.p_values(0, fewest, alpha=alpha) <= delta
    assert fewest == 1 or gates.p_values(0, fewest - 1, alpha=alpha) > delta


def test_fewest_answers_for_an_absurdly_small_alpha_is_finite() -> None:
    assert gates.fewest_answers(alpha=5e-324, delta=0.1) >= 10**17


@pytest.mark.parametrize(("answered", "most"), [(21, -1), (22, 0), (38, 1), (66, 3)])
def test_most_errors(answered: int, most: int) -> None:
    assert gates.most_errors(answered, alpha=0.1, delta=0.1) == most
