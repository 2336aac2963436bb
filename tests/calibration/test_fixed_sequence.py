"""The walk against a plain loop and against MAPIE; what is skipped never depends on a label."""

import warnings
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapie.risk_control import BinaryClassificationController
from numpy.typing import NDArray

from semgrad_guard.calibration import gates
from semgrad_guard.calibration.gates import Walk

ALPHA, DELTA = 0.25, 0.125  # exact in binary, so that MAPIE's 1 - (1 - delta) is delta itself


def plain_walk(scores: list[float], wrong: list[bool], grid: list[float], first: int) -> Walk:
    """The procedure as one would write it on paper."""
    accepted, at = None, None
    for index in range(first, len(grid)):
        below = [w for s, w in zip(scores, wrong, strict=True) if s <= grid[index]]
        counts = (len(below), sum(below))
        if at is None:
            at = counts
        if gates.p_values(counts[1], counts[0], alpha=ALPHA) > DELTA:
            break
        accepted, at = index, counts
    assert at is not None
    return Walk(None, tuple(grid), accepted, *at)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=120),
    st.sets(st.integers(-1, 14), min_size=1),
    st.data(),
)
def test_walk_equals_the_plain_loop(rows: list[tuple[int, int]], points: set[int], data: st.DataObject) -> None:
    scores = [float(score) for score, _ in rows]
    wrong = [luck * 14 < score for score, luck in rows]
    grid = [float(point) for point in sorted(points)]
    first = data.draw(st.integers(0, len(grid) - 1))
    found = gates.walk_grid(
        np.array(scores), np.array(wrong), np.array(grid), first=first, alpha=ALPHA, delta=DELTA
    )  # fmt: skip
    assert found == plain_walk(scores, wrong, grid, first)


def test_walk_stops_at_the_first_threshold_that_fails() -> None:
    scores = np.repeat([0.0, 1.0, 2.0], [40, 40, 400])
    wrong = np.repeat([False, True, False], [40, 40, 400])  # at 2.0 the risk is low again
    walk = gates.walk_grid(scores, wrong, np.array([0.0, 1.0, 2.0]), first=0, alpha=0.2, delta=0.1)
    assert walk == Walk(None, (0.0, 1.0, 2.0), 0, 40, 0)
    assert gates.p_values(40, 480, alpha=0.2) <= 0.1


def mapie_accepts(
    scores: NDArray[np.float64], wrong: NDArray[np.bool_], grid: NDArray[np.float64]
) -> tuple[set[float], NDArray[np.float64]]:
    """Thresholds on the uncertainty that MAPIE's fixed sequence accepts, and its p-values along `grid`."""

    def certainty(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([x, 1 - x], axis=1)

    controller = BinaryClassificationController(
        certainty,
        "precision",
        target_level=1 - ALPHA,
        confidence_level=1 - DELTA,
        list_predict_params=(1 - grid)[::-1],
        fwer_method="fixed_sequence",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controller.calibrate(scores, (~wrong).astype(int))
    return set((1 - controller.valid_predict_params).tolist()), controller.p_values[::-1, 0]


@pytest.mark.parametrize("seed", range(60))
def test_walk_equals_mapie(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(80, 600))
    scores = rng.integers(0, 1024, n) / 1024  # so that 1 - u >= 1 - t exactly where u <= t
    wrong = rng.random(n) < rng.choice([0.4, 0.6, 0.9]) * scores
    grid = np.unique(rng.integers(0, 1024, 30)) / 1024
    first = gates.first_testable(scores, grid, alpha=ALPHA, delta=DELTA)
    tail = grid[first:]
    mine = gates.walk_grid(scores, wrong, grid, first=first, alpha=ALPHA, delta=DELTA)
    theirs, their_p = mapie_accepts(scores, wrong, tail)

    answered = np.array([(scores <= t).sum() for t in tail])
    errors = np.array([wrong[scores <= t].sum() for t in tail])
    my_p = gates.p_values(errors, answered, alpha=ALPHA)
    # MAPIE rounds n * (1 - correct / n) up: a float error there counts one error more, and makes it more cautious
    rounded = np.array([ceil(m * (1 - (m - k) / m)) > k for m, k in zip(answered, errors, strict=True)])
    np.testing.assert_allclose(their_p[~rounded], my_p[~rounded], rtol=1e-9)
    assert (their_p >= my_p * (1 - 1e-9)).all()
    accepted = set() if mine.accepted is None else set(grid[first : mine.accepted + 1].tolist())
    assert theirs <= accepted
    if not rounded.any():
        assert theirs == accepted


def test_the_comparison_with_mapie_means_something() -> None:
    """Of the 60 sets above most are free of MAPIE's rounding at the deciding threshold and accept some, not all."""
    equal = some = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(80, 600))
        scores = rng.integers(0, 1024, n) / 1024
        wrong = rng.random(n) < rng.choice([0.4, 0.6, 0.9]) * scores
        grid = np.unique(rng.integers(0, 1024, 30)) / 1024
        first = gates.first_testable(scores, grid, alpha=ALPHA, delta=DELTA)
        walk = gates.walk_grid(scores, wrong, grid, first=first, alpha=ALPHA, delta=DELTA)
        theirs, _ = mapie_accepts(scores, wrong, grid[first:])
        accepted = set() if walk.accepted is None else set(grid[first : walk.accepted + 1].tolist())
        equal += theirs == accepted
        some += 0 < len(accepted) < len(grid) - first
    assert equal >= 50
    assert some >= 20


def test_start_allows_for_errors_where_there_is_room() -> None:
    assert gates.start_count(1000, alpha=0.1, delta=0.1) == 66
    assert gates.start_count(100, alpha=0.1, delta=0.1) == 50
    assert gates.start_count(30, alpha=0.1, delta=0.1) == 22


def test_first_testable_is_the_first_with_enough_answers_or_the_last() -> None:
    scores = np.arange(1000.0)
    grid = np.array([10.0, 64.0, 65.0, 900.0])
    assert gates.first_testable(scores, grid, alpha=0.1, delta=0.1) == 2
    assert gates.first_testable(scores, grid[:2], alpha=0.1, delta=0.1) == 1
