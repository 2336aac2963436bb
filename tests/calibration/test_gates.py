"""Exact tests and gates: against plain loops, scipy and MAPIE; their joint law, the promise of all procedures and the
plans of calibrations by simulation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil, comb
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapie.risk_control import BinaryClassificationController
from numpy.typing import NDArray
from scipy.stats import binomtest

from semgrad_guard.calibration import calibrate, gates
from semgrad_guard.calibration.planning import enough, plan

ALPHA = DELTA = 0.1
RATES: dict[str, Any] = {"alpha": ALPHA, "delta": DELTA}
REPEATS = 500

Draw = Callable[[np.random.Generator, int], tuple[NDArray[np.float64], NDArray[np.bool_]]]


def counts_by_hand(n: int, level: float, first: float) -> list[int]:
    """The smallest counts at which 0, 1, 2 ... errors pass."""
    counts: list[int] = []
    for count in range(1, n + 1):
        if gates.p_values(len(counts), count, alpha=ALPHA) <= level:
            counts.append(count)
    return sorted({count for count in counts if count >= min(first, counts[-1])} | {n}) if counts else []


@pytest.mark.parametrize("n", [0, 1, 21, 22, 37, 38, 52, 100, 219])
@pytest.mark.parametrize("level", [0.1, 0.09, 0.05])
def test_counts_are_the_smallest_at_which_so_many_errors_pass(n: int, level: float) -> None:
    assert gates.gate_counts(n, alpha=ALPHA, level=level, first=0.3 * n).tolist() == counts_by_hand(n, level, 0.3 * n)


def test_gates_of_a_large_set_are_thinned_and_keep_both_ends() -> None:
    every = counts_by_hand(3000, DELTA, 132)
    kept = gates.gate_counts(3000, alpha=ALPHA, level=DELTA, first=132).tolist()
    assert len(every) > gates.MOST_GATES == len(kept)
    assert (kept[0], kept[-1]) == (every[0], every[-1])
    assert set(kept) <= set(every)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40))
def test_a_threshold_lies_between_the_score_and_the_next(given: list[float]) -> None:
    scores = gates.leveled(np.array(given))
    assert gates.leveled(scores).tolist() == scores.tolist()
    rising = np.unique(scores)
    found = gates.between(rising, scores)
    assert (np.searchsorted(rising, found) == np.arange(len(rising)) + 1).all()
    assert (np.diff(found) > 0).all()


@pytest.mark.parametrize("by", ["answer", "traffic", "hand"])
def test_no_decision_about_a_calibration_answer_hangs_on_rounding(by: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        scores = rng.lognormal(size=120)
        correct = rng.random(120) > scores / 8
        again = scores * (1 + 1e-6 * rng.standard_normal(120))
        extra: dict[str, Any] = {
            "answer": {},
            "traffic": {"copies": "keep"},  # half of the questions were asked twice
            "hand": {"by_hand": 70, "groups": range(120)},
        }[by]
        if by == "traffic":
            scores[60:], again[60:], correct[60:] = again[:60], scores[:60], rng.random(60) > scores[:60] / 8
        made = calibrate(scores, correct, alpha=0.3, delta=0.1, **extra)
        assert made.threshold is not None
        assert [made.lets_through(u) for u in scores] == [made.lets_through(u) for u in again]
        known = [(made.confidence(u), made.confidence(v)) for u, v in zip(scores, again, strict=True)]
        assert all((a is None) == (b is None) for a, b in known)
        assert all(abs(a - b) < 0.05 for a, b in known if a is not None and b is not None)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=140))
def test_a_walk_of_few_answers_equals_the_plain_loop(rows: list[tuple[int, int]]) -> None:
    """Scores with ties: a gate counts all answers up to its score, and the walk ends at the first that fails."""
    scores, wrong = [float(score) for score, _ in rows], [luck < score for score, luck in rows]
    walk = gates.walk(np.array(scores), np.array(wrong), alpha=ALPHA, delta=DELTA)
    threshold = None
    for count in counts_by_hand(len(rows), DELTA, 0.3 * len(rows)):
        at = sorted(scores)[count - 1]
        below = [w for s, w in zip(scores, wrong, strict=True) if s <= at]
        if gates.p_values(sum(below), len(below), alpha=ALPHA) > DELTA:
            break
        threshold = at
    assert (walk.procedure, walk.threshold is None) == ("gates", threshold is None)
    if walk.threshold is not None and threshold is not None:
        assert threshold < walk.threshold < min((score for score in scores if score > threshold), default=math.inf)
        assert walk.answered == sum(score <= threshold for score in scores)
        assert walk.wrong == sum(w for s, w in zip(scores, wrong, strict=True) if s <= threshold)


def test_forgiveness_keeps_to_delta_in_all_and_uses_it() -> None:
    """Independent errors at rate alpha pass a gate, by itself or forgiven, with probability delta."""
    counts = gates.gate_counts(300, alpha=ALPHA, level=gates.OWN * DELTA, first=132)
    errors = np.random.default_rng(1).random((20_000, 300)) < ALPHA
    at = np.cumsum(errors, axis=1)[:, counts - 1]
    for gate, limits in enumerate(gates._limits(tuple(counts.tolist()), ALPHA, DELTA)):
        share = (at[:, gate:] <= limits).any(axis=1).mean()
        assert share <= DELTA + 0.007  # three standard errors
        assert share >= 0.06 or gate == len(counts) - 1  # counts are whole numbers: not all of delta can be used


def test_one_confident_mistake_too_many_is_forgiven_where_later_gates_pass() -> None:
    first = int(gates.gate_counts(300, alpha=ALPHA, level=gates.OWN * DELTA, first=132)[0])
    errors = int(gates.most_errors(first, alpha=ALPHA, delta=DELTA)) + 1
    ahead = gates.walk(np.arange(300.0), np.arange(300) < errors, alpha=ALPHA, delta=DELTA)
    assert (ahead.procedure, ahead.answered, ahead.wrong) == ("look-ahead", 300, errors)


def normal(base: float, auroc: float) -> Draw:
    """Scores of right and wrong answers are normal."""
    shift = NormalDist().inv_cdf(auroc) * 2**0.5

    def draw(rng: np.random.Generator, n: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        wrong = rng.random(n) < base
        return rng.normal(size=n) + shift * wrong, wrong

    return draw


def steps(edges: Sequence[float], rates: Sequence[float]) -> Draw:
    """Uniform scores; from each edge on answers are wrong at the next rate."""

    def draw(rng: np.random.Generator, n: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        scores = rng.random(n)
        return scores, rng.random(n) < np.array(rates)[np.searchsorted(edges, scores, side="right") - 1]

    return draw


Rule = Callable[[NDArray[np.float64], NDArray[np.bool_], float], float | None]


def walked(scores: NDArray[np.float64], wrong: NDArray[np.bool_], alpha: float) -> float | None:
    return gates.walk(scores, wrong, alpha=alpha, delta=DELTA).threshold


def naive(scores: NDArray[np.float64], wrong: NDArray[np.bool_], alpha: float) -> float | None:
    """The largest threshold whose error rate on this very set is at most alpha."""
    order = np.argsort(scores)
    kept = np.flatnonzero(np.cumsum(wrong[order]) <= alpha * np.arange(1, len(scores) + 1))
    return float(scores[order][kept[-1]]) if len(kept) else None


def simulated(draw: Draw, n: int, *, alpha: float, rule: Rule = walked, digits: int = 9) -> tuple[float, float]:
    """(mean coverage, share of calibrations whose risk exceeds alpha), by a population of 400,000 answers."""
    rng = np.random.default_rng(5)
    scores, wrong = draw(rng, 400_000)
    order = np.argsort(scores.round(digits), kind="stable")
    scores, risk = scores.round(digits)[order], np.cumsum(wrong[order]) / np.arange(1, 400_001)
    coverage, violations = 0.0, 0
    for _ in range(REPEATS):
        own, labels = draw(rng, n)
        threshold = rule(own.round(digits), labels, alpha)
        through = 0 if threshold is None else int(np.searchsorted(scores, threshold, side="right"))
        coverage += through / 400_000 / REPEATS
        violations += through > 0 and bool(risk[through - 1] > alpha)
    print(f"{rule.__name__}: coverage {coverage:.3f}, violations {violations / REPEATS:.3f}")
    return coverage, violations / REPEATS


@pytest.mark.parametrize(
    ("draw", "alpha", "n", "reached"),
    [
        (normal(0.2, 0.8), 0.1, 50, 0.11),
        (normal(0.2, 0.8), 0.1, 100, 0.19),
        (normal(0.2, 0.8), 0.1, 300, 0.40),
        pytest.param(normal(0.2, 0.8), 0.1, 1000, 0.57, marks=pytest.mark.slow),
        (normal(0.3, 0.75), 0.2, 100, 0.24),
        (normal(0.3, 0.75), 0.2, 300, 0.45),
        (normal(0.48, 0.7), 0.3, 300, 0.09),
        (steps([0, 0.05, 0.6], [0.5, 0.02, 0.5]), 0.1, 300, 0.18),
        (steps([0], [0.103]), 0.1, 100, 0.0),
        (steps([0], [0.103]), 0.1, 300, 0.0),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_the_promise_holds_and_is_of_use(draw: Draw, alpha: float, n: int, reached: float) -> None:
    coverage, violations = simulated(draw, n, alpha=alpha)
    assert violations <= DELTA + 0.027  # two standard errors
    assert coverage >= reached


def test_the_simulation_sees_a_broken_promise_and_a_wasted_delta() -> None:
    """The largest threshold that looks good breaks its number; error rates just above alpha use delta up."""
    assert simulated(normal(0.3, 0.75), 300, alpha=0.2, rule=naive)[1] > 0.35
    assert simulated(steps([0], [0.103]), 140, alpha=0.1)[1] > 0.03


@pytest.mark.parametrize(("draw", "n", "digits"), [(normal(0.2, 0.7), 100, 0), (steps([0], [0.103]), 140, 1)])
def test_the_promise_holds_with_ties(draw: Draw, n: int, digits: int) -> None:
    assert simulated(draw, n, alpha=0.1, digits=digits)[1] <= DELTA + 0.027


def test_a_calibration_states_its_procedure_and_assumption() -> None:
    rng = np.random.default_rng(0)
    for n, procedure in ((100, "gates"), (150, "look-ahead")):
        made = calibrate(list(rng.random(n)), [True] * n, alpha=ALPHA, delta=DELTA)
        assert (made.procedure, made.assumption) == (procedure, gates.ASSUMPTIONS[made.procedure])
    assert "all answers are wrong at a rate of at least alpha" in made.assumption


# Plans against simulated calibrations, and their limits.


@pytest.mark.parametrize(("error", "auroc", "n"), [(0.2, 0.8, 100), (0.2, 0.8, 300), (0.12, 0.7, 100)])
def test_a_plan_agrees_with_simulated_calibrations(error: float, auroc: float, n: int) -> None:
    rng, draw = np.random.default_rng(3), normal(error, auroc)
    delivered: list[float] = []
    for _ in range(300):
        scores, wrong = draw(rng, n)
        threshold = gates.walk(scores, wrong, **RATES).threshold
        delivered.append(0.0 if threshold is None else float((scores <= threshold).mean()))
    planned = plan(n, error=error, auroc=auroc, **RATES)
    print(planned, np.mean(delivered), np.mean(np.array(delivered) > 0))
    assert planned.found == pytest.approx(np.mean(np.array(delivered) > 0), abs=0.08)
    assert planned.coverage == pytest.approx(np.mean(delivered), abs=0.05)


def test_limits_of_a_plan() -> None:
    assert plan(21, error=0.0, auroc=0.8, **RATES).found == 0.0
    sure = plan(22, error=0.0, auroc=0.8, **RATES)
    assert (sure.found, sure.coverage, sure.withheld) == (1.0, 1.0, 0.0)
    assert plan(300, error=1.0, auroc=0.8, **RATES).withheld == 1.0
    assert plan(300, error=0.4, auroc=0.5, **RATES).withheld == pytest.approx(1 / 3)
    assert plan(300, error=0.4, auroc=1.0, **RATES).coverage > 0.5
    assert plan(300, error=0.2, auroc=0.8, **RATES) == plan(300, error=0.2, auroc=0.8, **RATES)


def test_enough_is_the_fewest_with_which_nine_of_ten_sets_find_a_threshold() -> None:
    found = enough(error=0.2, auroc=0.8, **RATES)
    assert found is not None
    assert (found.n, found.found >= 0.9) == (500, True)
    assert enough(error=0.4, auroc=0.5, **RATES) is None


# Binomial statements: against brute force in rational arithmetic, and against scipy's own exact interval.


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


# The walk over gates against MAPIE's fixed-sequence test of the same thresholds.


A_QUARTER, AN_EIGHTH = 0.25, 0.125  # exact in binary, so that MAPIE's 1 - (1 - delta) is delta itself


def mapie_accepts(
    scores: NDArray[np.float64], wrong: NDArray[np.bool_], grid: NDArray[np.float64]
) -> tuple[set[int], NDArray[np.float64]]:
    """The places of the thresholds that MAPIE's fixed sequence accepts, and its p-values along `grid`."""

    def certainty(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([x, 1 - x], axis=1)

    controller = BinaryClassificationController(
        certainty,
        "precision",
        target_level=1 - A_QUARTER,
        confidence_level=1 - AN_EIGHTH,
        list_predict_params=(1 - grid)[::-1],
        fwer_method="fixed_sequence",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controller.calibrate(scores, (~wrong).astype(int))
    kept = set((1 - grid).tolist()) & set(controller.valid_predict_params.tolist())
    return {at for at, threshold in enumerate((1 - grid).tolist()) if threshold in kept}, controller.p_values[::-1, 0]


def test_the_walk_equals_mapie() -> None:
    """In sixty sets; where MAPIE rounds, it may be more cautious. Most are free of that, and accept some gates."""
    equal = some = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(60, gates.ENOUGH_TO_LOOK_AHEAD))
        scores = rng.integers(0, 1024, n) / 1024
        wrong = rng.random(n) < rng.choice([0.4, 0.6, 0.9]) * scores
        walk = gates.walk(scores, wrong, alpha=A_QUARTER, delta=AN_EIGHTH)
        grid = np.array(walk.thresholds)
        theirs, their_p = mapie_accepts(scores, wrong, grid)
        answered = np.array([(scores <= t).sum() for t in grid])
        errors = np.array([wrong[scores <= t].sum() for t in grid])
        my_p = gates.p_values(errors, answered, alpha=A_QUARTER)
        # MAPIE rounds n * (1 - correct / n) up: a float error there counts one error more
        rounded = np.array([ceil(m * (1 - (m - k) / m)) > k for m, k in zip(answered, errors, strict=True)])
        np.testing.assert_allclose(their_p[~rounded], my_p[~rounded], rtol=1e-9)
        assert (their_p >= my_p * (1 - 1e-9)).all()
        accepted = set() if walk.accepted is None else set(range(walk.accepted + 1))
        assert theirs <= accepted
        assert theirs == accepted or rounded.any()
        equal += theirs == accepted
        some += 0 < len(accepted) < len(grid)
    assert equal >= 45
    assert some >= 20
