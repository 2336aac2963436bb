"""Gates against a plain loop, their joint law against simulation, and the promise of all procedures by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from semgrad_guard.calibration import calibrate, gates

ALPHA = DELTA = 0.1
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


def simulated(draw: Draw, n: int, *, alpha: float, digits: int = 9) -> tuple[float, float]:
    """(mean coverage, share of calibrations whose risk exceeds alpha), by a population of 400,000 answers."""
    rng = np.random.default_rng(5)
    scores, wrong = draw(rng, 400_000)
    order = np.argsort(scores.round(digits), kind="stable")
    scores, risk = scores.round(digits)[order], np.cumsum(wrong[order]) / np.arange(1, 400_001)
    coverage, violations = 0.0, 0
    for _ in range(REPEATS):
        own, labels = draw(rng, n)
        threshold = gates.walk(own.round(digits), labels, alpha=alpha, delta=DELTA).threshold
        through = 0 if threshold is None else int(np.searchsorted(scores, threshold, side="right"))
        coverage += through / 400_000 / REPEATS
        violations += through > 0 and bool(risk[through - 1] > alpha)
    return coverage, violations / REPEATS


@pytest.mark.parametrize(
    ("draw", "alpha", "n", "reached"),
    [
        (normal(0.2, 0.8), 0.1, 50, 0.11),
        (normal(0.2, 0.8), 0.1, 100, 0.19),
        (normal(0.2, 0.8), 0.1, 300, 0.40),
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
    print(f"coverage {coverage:.3f}, violations {violations:.3f}")
    assert violations <= DELTA + 0.027  # two standard errors
    assert coverage >= reached


def test_the_promise_holds_with_ties() -> None:
    _, violations = simulated(normal(0.2, 0.7), 100, alpha=0.1, digits=0)
    assert violations <= DELTA


def test_a_calibration_states_its_procedure_and_assumption() -> None:
    rng = np.random.default_rng(0)
    for n, procedure in ((100, "gates"), (150, "look-ahead")):
        made = calibrate(list(rng.random(n)), [True] * n, alpha=ALPHA, delta=DELTA)
        assert (made.procedure, made.assumption) == (procedure, gates.ASSUMPTIONS[made.procedure])
    assert "all answers are wrong at a rate of at least alpha" in made.assumption
