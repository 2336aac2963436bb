"""The walk over gates against MAPIE's fixed-sequence test of the same thresholds."""

import warnings
from math import ceil

import numpy as np
from mapie.risk_control import BinaryClassificationController
from numpy.typing import NDArray

from semgrad_guard.calibration import gates

ALPHA, DELTA = 0.25, 0.125  # exact in binary, so that MAPIE's 1 - (1 - delta) is delta itself


def mapie_accepts(
    scores: NDArray[np.float64], wrong: NDArray[np.bool_], grid: NDArray[np.float64]
) -> tuple[set[int], NDArray[np.float64]]:
    """The places of the thresholds that MAPIE's fixed sequence accepts, and its p-values along `grid`."""

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
        walk = gates.walk(scores, wrong, alpha=ALPHA, delta=DELTA)
        grid = np.array(walk.thresholds)
        theirs, their_p = mapie_accepts(scores, wrong, grid)
        answered = np.array([(scores <= t).sum() for t in grid])
        errors = np.array([wrong[scores <= t].sum() for t in grid])
        my_p = gates.p_values(errors, answered, alpha=ALPHA)
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
