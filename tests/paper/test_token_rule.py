"""The rule for t* on constructed cases: the trap of bare SPS, chance, and evidence."""

from __future__ import annotations

import numpy as np
import pytest

from semgrad_guard.paper.probe_record import FEWEST, with_answers, without_answers

OWN = -3


def simulated(n: int, separations: dict[int, float], *, seed: int = 0) -> tuple[dict[int, list[float]], list[bool]]:
    """SemGrad by offset, wrong answers so many standard deviations above right ones; the noise is partly shared."""
    rng = np.random.default_rng(seed)
    correct = rng.random(n) < 0.6
    shared = rng.normal(size=n)
    scores = {
        offset: (0.7 * shared + 0.7 * rng.normal(size=n) + np.where(correct, 0.0, gap)).tolist()
        for offset, gap in separations.items()
    }
    return scores, correct.tolist()


def decide(n: int, separations: dict[int, float], seed: int = 0):
    scores, correct = simulated(n, separations, seed=seed)
    own = scores.pop(OWN)
    return with_answers(OWN, own, scores, correct, seed=seed)


def test_the_trap_preservation_alone_does_not_move_the_token() -> None:
    """On a small model the last token has the highest score and the worst SemGrad."""
    found = without_answers(OWN, {-4: 0.5, -3: 0.49, -2: 0.3, -1: 0.66})
    assert found.offset is None
    assert "highest at -1 (0.660, against 0.490)" in found.reason
    assert "highest" not in without_answers(OWN, {-3: 0.7, -1: 0.5}).reason


def test_clear_evidence_moves_it() -> None:
    found = decide(800, {-4: 2.0, OWN: 0.5, -2: 0.4, -1: 0.2})
    assert (found.offset, found.proposal) == (-4, -4)
    assert found.difference.low is not None
    assert found.difference.low > 0
    assert "no part in the choice" in found.reason


def test_the_own_token_stays_where_it_is_best() -> None:
    found = decide(800, {-4: 0.5, OWN: 2.0, -1: 0.2})
    assert found.offset is None
    assert found.difference is None
    assert "best there as well" in found.reason


def test_chance_does_not_move_it() -> None:
    """Six tokens that are equally good: the best of them looks better on one half, and is put to the test."""
    equal = dict.fromkeys(range(-6, 0), 1.0)
    moved = [decide(200, equal, seed).offset is not None for seed in range(40)]
    assert sum(moved) <= 4  # a two-sided interval of 95 % errs upward in 2.5 % of them


def test_what_is_not_confirmed_says_so() -> None:
    found = next(f for f in (decide(200, {-4: 1.0, OWN: 1.0}, seed) for seed in range(20)) if f.proposal == -4)
    assert found.offset is None
    assert "did not confirm it" in found.reason


@pytest.mark.parametrize("right", [0, 2 * FEWEST - 2, 300])
def test_too_few_of_a_kind_say_so(right: int) -> None:
    correct = [True] * right + [False] * (300 - right)
    scores = [float(not c) for c in correct]
    found = with_answers(OWN, [0.0] * 300, {-1: scores}, correct)
    assert found.offset is None
    assert f"{right} right and {300 - right} wrong" in found.reason
    assert "too few" in found.reason


def test_just_enough_of_each_kind_may_speak() -> None:
    correct = [True] * (2 * FEWEST) + [False] * (2 * FEWEST)
    scores = [float(not c) for c in correct]
    assert with_answers(OWN, [0.0] * len(correct), {-1: scores}, correct).offset == -1


def test_answers_without_a_score_are_no_evidence() -> None:
    """A token of which nothing is known is never proposed; one known in part is compared on that part."""
    scores, correct = simulated(400, {OWN: 1.0, -1: 3.0})
    none: list[float | None] = [None] * 400
    assert with_answers(OWN, scores[OWN], {-1: none}, correct).offset is None
    partly = [None if i % 2 else s for i, s in enumerate(scores[-1])]
    assert with_answers(OWN, scores[OWN], {-1: partly}, correct).offset == -1


def test_ties_go_to_the_own_token() -> None:
    scores, correct = simulated(200, {OWN: 1.0})
    assert with_answers(OWN, scores[OWN], {-1: scores[OWN]}, correct).proposal is None


def test_the_same_seed_decides_the_same() -> None:
    first, second = (decide(300, {-4: 1.3, OWN: 1.0}, seed=3) for _ in range(2))
    assert (first.offset, first.reason) == (second.offset, second.reason)
