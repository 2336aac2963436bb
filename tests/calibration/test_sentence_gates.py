"""The promises about sentences: against a plain loop, and by simulation for each form of `on_doubt`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.calibration import gates, sentences
from semgrad_guard.calibration.sentences import Promise, compared_scores, sentence_key
from semgrad_guard.settings import OnDoubt

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import check_sentences

ALPHA, DELTA = 0.3, 0.2
SENTENCE = st.tuples(st.integers(0, 9).map(float), st.booleans(), st.integers(0, 10**6).map(float))


@pytest.mark.parametrize(
    ("on_doubt", "expected"),
    [
        ("stop", [1.0, 3.0, 3.0, None, None]),
        ("drop", [1.0, 3.0, 3.0, None, 2.0]),
    ],
)
def test_a_sentence_counts_with_all_that_it_depends_on(on_doubt: OnDoubt, expected: list[float | None]) -> None:
    scores: list[float | None] = [1.0, 3.0, 0.5, math.nan, 2.0]
    assert compared_scores(scores, [None, None, 1, None, None], on_doubt=on_doubt) == expected


def test_leaning_reaches_through_a_chain_and_an_unscored_sentence() -> None:
    assert compared_scores([2.0, 1.0, 0.5], [None, 0, 1], on_doubt="drop") == [2.0, 2.0, 2.0]
    assert compared_scores([None, 1.0, 0.5], [None, 0, None], on_doubt="drop") == [None, None, 0.5]
    assert compared_scores([2.0, 1.0, 0.5], [None, None, 0], on_doubt="drop") == [2.0, 1.0, 2.0]


@pytest.mark.parametrize("on_doubt", ["drop", "stop"])
def test_the_simulation_compares_the_same_scores(on_doubt: OnDoubt) -> None:
    rng = np.random.default_rng(2)
    scores, leans = rng.normal(size=(20, 8)), rng.random((20, 8)) < 0.4
    one_by_one = [
        compared_scores(s, [n - 1 if n and one else None for n, one in enumerate(b)], on_doubt=on_doubt)
        for s, b in zip(scores.tolist(), leans.tolist(), strict=True)
    ]
    assert check_sentences.compared(scores, leans, on_doubt).tolist() == one_by_one


def padded(answers: list[list[tuple[float, bool, float]]]) -> list[np.ndarray]:
    """Scores, errors and keys as arrays, with an infinite score where there is no sentence."""
    empty = (math.inf, False, 0.0)
    width = max(map(len, answers))
    rows = [[*answer, *[empty] * (width - len(answer))] for answer in answers]
    return [np.array([[sentence[i] for sentence in row] for row in rows]) for i in range(3)]


@pytest.mark.parametrize("promise", get_args(Promise))
@given(answers=st.lists(st.lists(SENTENCE, min_size=1, max_size=4, unique_by=lambda s: s[2]), min_size=1, max_size=60))
def test_a_walk_equals_the_plain_loop(promise: Promise, answers: list[list[tuple[float, bool, float]]]) -> None:
    scores, wrong, keys = padded(answers)
    walk = sentences.walk_sentences(scores, wrong, keys, promise=promise, alpha=ALPHA, delta=DELTA)
    surest = sorted(min(score for score, _, _ in answer) for answer in answers)
    threshold, counts = None, (0, 0)
    first = gates.first_count(len(answers), alpha=ALPHA, delta=DELTA, start=sentences.START[promise])
    for count in gates.gate_counts(len(answers), alpha=ALPHA, level=DELTA, first=first).tolist():
        at = surest[count - 1]
        delivered = [kept for answer in answers if (kept := [s for s in answer if s[0] <= at])]
        if promise == "answer":
            errors = sum(any(is_wrong for _, is_wrong, _ in kept) for kept in delivered)
        else:
            errors = sum(min(kept, key=lambda s: s[2])[1] for kept in delivered)
        if gates.p_values(errors, len(delivered), alpha=ALPHA) > DELTA:
            break
        threshold, counts = at, (len(delivered), errors)
    assert (walk.threshold is None) == (threshold is None)
    if walk.threshold is not None and threshold is not None:
        assert [walk.threshold] == gates.between(np.array([threshold]), scores)
        assert (walk.answered, walk.wrong) == counts


def test_the_two_promises_differ_where_an_answer_holds_right_and_wrong_sentences() -> None:
    """One of four delivered sentences is wrong in every answer."""
    scores = np.tile(np.arange(4.0), (200, 1))
    wrong = np.tile(np.arange(4) == 3, (200, 1))
    keys = np.random.default_rng(3).random(scores.shape)
    counts = {
        promise: sentences.wrong_answers(scores, wrong, keys, np.array([2.0, 3.0]), promise=promise).tolist()
        for promise in get_args(Promise)
    }
    assert counts["answer"] == [0, 200]
    assert counts["sentence"][0] == 0
    assert 30 < counts["sentence"][1] < 70


def test_an_answer_without_a_score_is_never_counted() -> None:
    scores = np.full((30, 2), np.inf)
    walk = sentences.walk_sentences(
        scores, np.ones((30, 2), bool), np.zeros((30, 2)), promise="sentence", alpha=0.1, delta=0.1
    )
    assert (walk.threshold, walk.answered) == (None, 0)


def test_keys_follow_the_texts_and_are_uniform() -> None:
    keys = [sentence_key("Who?", f"answer {i}", 0) for i in range(2000)]
    assert keys == [sentence_key("Who?", f"answer {i}", 0) for i in range(2000)]
    assert len({*keys, sentence_key("Who?", "answer 0", 1), sentence_key("Why?", "answer 0", 0)}) == 2002
    assert abs(np.mean(keys) - 0.5) < 0.03
    assert 0 <= min(keys) < 0.01 < 0.99 < max(keys) < 1


@pytest.mark.parametrize("on_doubt", check_sentences.FORMS)
@pytest.mark.parametrize("design", check_sentences.DESIGNS, ids=lambda d: f"{d.kind}-{d.correlation}-{d.leaning}")
def test_both_promises_hold_in_simulation(design: check_sentences.Design, on_doubt: OnDoubt) -> None:
    """400 calibrations of 100 answers: three standard errors above delta are .145."""
    cells = check_sentences.simulated(design, on_doubt, 100, 400, answers=20_000)
    print(*((cell.promise, cell.coverage, cell.violated) for cell in cells))
    assert all(cell.violated <= 0.145 for cell in cells)
    assert all(cell.coverage >= cell.floor - 0.03 for cell in cells)
