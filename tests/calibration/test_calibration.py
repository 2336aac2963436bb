"""`calibrate`: properties that hold for any set, defined outcomes for odd sets, typed errors for bad ones; and the
proposals that follow from its decisions."""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.calibration import Binding, Calibration, calibrate, gates
from semgrad_guard.calibration.calibrating import Proposal, recalibrate
from semgrad_guard.calibration.gates import share_of
from semgrad_guard.errors import CalibrationError

PROMISE = {"alpha": 0.3, "delta": 0.2}
scores = st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.floats(0, 1), st.integers(0, 6).map(float))
rows = st.lists(st.tuples(scores, st.booleans()), min_size=1, max_size=80)


def columns(answers: list[tuple[float | None, bool]]) -> tuple[list[float | None], list[bool]]:
    return [u for u, _ in answers], [c for _, c in answers]


def useful(n: int = 500, *, seed: int = 0, **changes: Any) -> Calibration:
    """A calibration that lets something through."""
    rng = np.random.default_rng(seed)
    u = rng.random(n)
    return calibrate(u, rng.random(n) > 0.6 * u**2, **{"alpha": 0.1, "delta": 0.1, **changes})


def agreeing(answers: list[tuple[float | None, bool]], **promise: float) -> Calibration:
    """The calibration of these answers, whose record agrees with them."""
    c = calibrate(*columns(answers), **promise)
    scored = [(u, ok) for u, ok in answers if u is not None and math.isfinite(u)]
    assert (c.n, c.n_unscored, c.n_tested) == (len(answers), len(answers) - len(scored), len(scored))
    assert c.n_wrong == sum(not ok for _, ok in answers)
    assert c.scores == tuple(sorted(u for u, _ in scored))
    assert (c.threshold is None) == (c.reason is not None)
    through = [(u, ok) for u, ok in answers if c.lets_through(u)]
    assert c.coverage == len(through) / len(answers)
    assert (c.n_answered, c.n_answered_wrong) == (len(through), sum(not ok for _, ok in through))
    assert not set(c.grid) & set(c.scores)
    if c.threshold is None:
        assert through == []
        assert c.bound_if_fixed is None
    else:
        assert c.threshold in c.grid
        assert c.bound_if_fixed is not None
        assert c.bound_if_fixed <= c.alpha + 1e-9
        assert c.bound_if_fixed == gates.upper_bound(c.n_answered_wrong, c.n_answered, delta=c.delta)
    return c


@given(rows)
def test_what_is_recorded_agrees_with_the_answers(answers: list[tuple[float | None, bool]]) -> None:
    agreeing(answers, **PROMISE)


def test_it_agrees_where_most_is_let_through_and_some_has_no_score() -> None:
    u = np.random.default_rng(0).random(600)
    answers = [(None if row % 6 == 0 else float(score), bool(score < 0.9)) for row, score in enumerate(u)]
    c = agreeing(answers, alpha=0.1, delta=0.1)
    assert (c.procedure, c.n_unscored, c.coverage > 0.6, c.n_answered_wrong > 0) == ("look-ahead", 100, True, True)


@given(rows, st.lists(st.integers(0, 80), max_size=20))
def test_abstentions_are_counted_apart(answers: list[tuple[float | None, bool]], places: list[int]) -> None:
    """They are neither right nor wrong: the calibration is that of the other answers."""
    mixed: list[tuple[float | None, Any]] = list(answers)
    for place in places:
        mixed.insert(place, (0.001, "abstained"))
    found = calibrate(*columns(mixed), **PROMISE)
    assert found.n_abstained == len(places)
    assert found == calibrate(*columns(answers), **PROMISE).with_content(n_abstained=len(places))
    groups = [f"question {number}" for number in range(len(mixed))]
    assert calibrate(*columns(mixed), groups=groups, **PROMISE) == found
    with pytest.raises(CalibrationError, match="correct"):
        calibrate([u for u, _ in mixed], [*(c for _, c in mixed), "abstained"], **PROMISE)


@given(rows, st.randoms())
def test_the_order_of_answers_does_not_matter(answers: list[tuple[float | None, bool]], rng: random.Random) -> None:
    shuffled = rng.sample(answers, len(answers))
    assert calibrate(*columns(answers), **PROMISE) == calibrate(*columns(shuffled), **PROMISE)


@given(rows)
def test_answers_with_the_same_score_share_their_fate(answers: list[tuple[float | None, bool]]) -> None:
    c = calibrate(*columns(answers), **PROMISE)
    for u in c.scores:
        assert c.lets_through(u) == (c.threshold is not None and u <= c.threshold)


def test_the_tested_thresholds_do_not_depend_on_labels() -> None:
    u = np.random.default_rng(1).random(400)
    right = calibrate(u, np.ones(400, dtype=bool), alpha=0.1, delta=0.1)
    wrong = calibrate(u, np.zeros(400, dtype=bool), alpha=0.1, delta=0.1)
    assert right.grid == wrong.grid
    assert right.threshold == right.grid[-1]
    assert wrong.threshold is None


@pytest.mark.parametrize(
    ("scores", "correct", "alpha", "confidence", "words"),
    [
        (
            [0.0] * 60, [False] * 6 + [True] * 54, 0.11, 0.89,
            "60 most certain answers@@6 were wrong@@at most 3 may be@@"
            "With 10% of the scored answers wrong and an AUROC of 0.50, 60 labels find a threshold in",
        ),
        (
            [*range(40)] * 2, [False] * 40 + [True] * 40, 0.1, 0.5,
            "Any guard has to withhold at least 44% of such answers@@with 5000 labels it is rare as well",
        ),
        ([*range(100)], [False, *[True] * 79, *[False] * 20], 0.01, 0.99, "semgrad-guard plan"),
        (range(100), [False] * 100, 0.1, 1 / 102, "no number of labels helps"),
        ([0.5], [True], 0.1, 2 / 3, "takes 22 scored answers"),
        ([None, math.nan], [True, False], 0.1, None, "None of the 2 answers has a finite score"),
    ],
    ids=["a few wrong", "a useless score", "a small alpha", "all wrong", "one answer", "no score"],
)  # fmt: skip
def test_a_set_that_finds_no_threshold_says_why(
    scores: Any, correct: list[bool], alpha: float, confidence: float | None, words: str
) -> None:
    c = calibrate(scores, correct, alpha=alpha, delta=0.1)
    assert (c.threshold, c.coverage, c.n, c.n_wrong) == (None, 0.0, len(correct), correct.count(False))
    assert not c.lets_through(-1e9)
    assert c.confidence(0.0) == (confidence and pytest.approx(confidence, abs=0.01))
    assert [part for part in words.split("@@") if part not in str(c.reason)] == []


def test_all_scores_equal() -> None:
    c = calibrate([1.0] * 200, [True] * 195 + [False] * 5, alpha=0.1, delta=0.1)
    assert (c.grid, c.coverage) == ((c.threshold,), 1.0)
    assert c.threshold == pytest.approx(1 + 1 / 128, rel=1e-4)
    assert c.confidence(1.0) == c.confidence(5.0) == pytest.approx(0.975, abs=0.002)


def test_copies_of_a_question_count_once() -> None:
    u, ok = [0.1, 0.9, 0.2], [True, False, True]
    single = calibrate(u, ok, alpha=0.1, delta=0.1)
    copied = calibrate(
        [*u, *[0.1] * 50], [*ok, *[True] * 50], groups=["a", "b", "c", *["a"] * 50], alpha=0.1, delta=0.1
    )  # fmt: skip
    assert (copied.n, copied.n_duplicates, copied.scores) == (3, 50, single.scores)
    assert copied.threshold is None
    without = calibrate([*u, *[0.1] * 50], [*ok, *[True] * 50], alpha=0.1, delta=0.1)
    assert without.lets_through(0.1)  # what the copies would have bought


def test_copies_of_a_sample_of_traffic_are_kept() -> None:
    u, ok, names = [0.1] * 50 + [0.9], [True] * 50 + [False], ["a"] * 50 + ["b"]
    traffic = calibrate(u, ok, alpha=0.1, delta=0.1, groups=names, copies="keep")
    assert (traffic.n, traffic.n_duplicates, traffic.copies, traffic.n_answered) == (51, 0, "keep", 51)
    listed = calibrate(u, ok, alpha=0.1, delta=0.1, groups=names, copies="once")
    assert (listed.n, listed.n_duplicates, listed.copies, listed.threshold) == (2, 49, "once", None)


def test_tries_on_the_same_labels_share_delta() -> None:
    assert math.fsum(share_of(0.1, number) for number in range(1, 60)) <= 0.1
    assert share_of(0.1, 0) == 0.1
    assert share_of(0.1, 1) == pytest.approx(0.09)
    for number, fewest in ((0, 22), (1, 23), (2, 51), (8, 82)):
        enough = calibrate([*range(fewest)], [True] * fewest, alpha=0.1, delta=0.1, tries=number)
        few = calibrate([*range(fewest - 1)], [True] * (fewest - 1), alpha=0.1, delta=0.1, tries=number)
        assert (enough.n_answered, few.threshold) == (fewest, None)
        assert (enough.tries, enough.delta, enough.level) == (number, 0.1, share_of(0.1, number))
        assert few.reason is not None
        assert f"takes {fewest} scored answers" in few.reason


def test_few_labels_get_a_smooth_map_and_many_an_isotonic_one() -> None:
    maps = [useful(n).confidence_map for n in (299, 300)]
    assert [found and found.method for found in maps] == ["ranks", "isotonic"]


def test_the_map_of_few_labels_does_not_depend_on_the_scale_of_the_scores() -> None:
    rng = np.random.default_rng(0)
    wrong = rng.random(100) < 0.3
    scores = rng.normal(size=100) + 2 * wrong
    plain, skewed = (calibrate(u, ~wrong, alpha=0.2, delta=0.1) for u in (scores, np.exp(8 * scores)))
    assert plain.confidence(float(scores.min())) == skewed.confidence(float(np.exp(8 * scores.min())))
    assert (plain.confidence(float(scores.min())) or 0) > 0.95


def test_labels_and_scores_may_be_arrays_or_iterators() -> None:
    plain = calibrate([0.1, 0.2, 0.3], [True, False, True], **PROMISE)
    others = [
        (np.array([0.1, 0.2, 0.3]), np.array([1, 0, 1])),
        ((x for x in (0.1, 0.2, 0.3)), [np.True_, 0.0, 1]),
        ([np.float64(0.1), 0.2, 0.3], np.array([True, False, True], dtype=object)),
    ]
    for u, ok in others:
        assert calibrate(u, ok, **PROMISE) == plain


GOOD: dict[str, Any] = {"uncertainties": [0.1, 0.2], "correct": [True, False], "alpha": 0.1, "delta": 0.1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"uncertainties": [], "correct": []}, "is empty"),
        ({"correct": [True]}, "2 entries and correct has 1"),
        ({"groups": ["a"]}, "groups has 1"),
        ({"groups": [["a"], "b"]}, r"groups\[0\]"),
        ({"groups": ["a", None]}, r"groups\[1\] is None"),
        ({"uncertainties": [0.1, "high"]}, r"uncertainties\[1\] is 'high'"),
        ({"uncertainties": [0.1, "0.2"]}, r"uncertainties\[1\]"),
        ({"uncertainties": [[0.1], [0.2]]}, r"uncertainties\[0\]"),
        ({"uncertainties": [10**400, 1]}, r"uncertainties\[0\]"),
        ({"uncertainties": 0.3}, "one entry per answer"),
        ({"correct": [True, None]}, r"correct\[1\] is None"),
        ({"correct": [True, 0.5]}, r"correct\[1\] is 0.5"),
        ({"correct": [2, 0]}, r"correct\[0\] is 2"),
        ({"correct": ["yes", "no"]}, r"correct\[0\] is 'yes'"),
        ({"correct": [math.nan, 1]}, r"correct\[0\] is nan"),
        ({"correct": np.ones((2, 1))}, r"correct\[0\]"),
        ({"alpha": 0.0}, "alpha must be at least 0.0001"),
        ({"alpha": 1.0}, "alpha must"),
        ({"alpha": math.nan}, "alpha must"),
        ({"alpha": None}, "alpha must"),
        ({"alpha": "0.1"}, "alpha is '0.1'"),
        ({"delta": -0.1}, "delta must"),
        ({"delta": 1.5}, "delta must"),
        ({"copies": "twice"}, "'keep' .a sample of traffic. or 'once'"),
        ({"tries": -1}, "tries numbers the calibrations"),
        ({"binding": "pocket"}, "binding"),
        ({"correct": ["Abstained", True]}, "of a whole answer also 'abstained'"),
        ({"correct": ["abstained"] * 2}, "Every graded answer is an abstention"),
        ({"correct": ["abstained"] * 2, "by_hand": 1}, "Every graded answer is an abstention"),
        ({"by_hand": 0}, "number of answers"),
        ({"prompts": []}, "prompts has 0"),
        ({"prompts": ["What?"] * 2}, r"prompts\[0\] is a str"),
        ({"prompts": [None] * 2}, r"prompts\[0\] is a NoneType"),
        ({"prompts": 3}, "prompts is 3"),
    ],
)
def test_bad_input_is_refused_with_what_to_mend(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        calibrate(**{**GOOD, **changes})


# A proposal from the decisions of a calibration: what it keeps, what it can do, and what it says.

GRADED = Binding(estimator="e", model="m", grader="contains@3")


def old_one() -> Calibration:
    scores = np.linspace(0, 1, 200)
    return calibrate(scores, scores < 0.8, alpha=0.2, delta=0.1, binding=GRADED)


def proposed(old: Calibration, *, wrong_from: float, count: int = 150, tries: int = 0) -> Proposal:
    assert old.threshold is not None
    rng = np.random.default_rng(1)
    scores: list[float | None] = [*rng.random(900).tolist(), *[None] * 100]
    delivered = rng.uniform(0, old.threshold, count)
    grades = [(float(score), bool(score < wrong_from)) for score in delivered]
    return recalibrate(old, scores, grades, tries=tries)


def test_it_lowers_the_threshold_where_the_surest_keep_the_promise() -> None:
    old = old_one()
    proposal = proposed(old, wrong_from=0.5)
    new = proposal.new
    assert new.threshold is not None
    assert old.threshold is not None
    assert 0.4 < new.threshold < old.threshold
    assert (new.n, new.n_unscored, new.n_tested, len(new.scores)) == (1000, 100, 150, 900)
    assert (new.alpha, new.delta, new.shape, new.id != old.id) == (old.alpha, old.delta, old.shape, True)
    assert new.binding == GRADED.model_copy(update={"grader": "human"})
    assert new.by_hand is not None
    assert new.by_hand.below == old.threshold
    assert new.coverage == pytest.approx(0.9 * new.threshold, abs=0.05)
    words = str(proposal)
    assert f"Proposed threshold: {new.threshold:.4g} ({old.threshold:.4g} now)" in words
    assert "of the 1000 answers through (" in words


def test_it_never_raises_it_and_says_where_none_is_left() -> None:
    old = old_one()
    assert old.threshold is not None
    kept = proposed(old, wrong_from=2.0).new
    assert kept.threshold is not None
    assert kept.threshold == pytest.approx(old.threshold, abs=0.02)
    assert kept.threshold <= old.threshold
    none = proposed(old, wrong_from=0.0)
    assert none.new.threshold is None
    assert str(none).startswith("No threshold up to the present one keeps the promise")
    assert proposed(old, wrong_from=0.5, tries=2).new.level < old.level


def test_it_is_refused_without_grades() -> None:
    old = old_one()
    none = proposed(old, wrong_from=0.0).new
    with pytest.raises(CalibrationError, match="none of its answers drawn at random is graded"):
        recalibrate(old, [0.1], [])
    with pytest.raises(CalibrationError, match="it lets nothing through"):
        recalibrate(none, [0.1], [(0.1, True)])
