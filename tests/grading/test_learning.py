"""Choosing and fitting on one part, the threshold on the rest: the promise holds, and would not on the same answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from semgrad_guard.calibration import Binding, Calibration, calibrate
from semgrad_guard.calibration.calibration_record import report
from semgrad_guard.errors import CalibrationError
from semgrad_guard.estimators import Estimator, FusedStates, HybridGrad, SemGrad
from semgrad_guard.grading.candidates import (
    CANDIDATES,
    CHOOSE_FROM,
    LEARN_FROM,
    LEARN_MOST,
    LearningSet,
    calibrate_best,
    calibrate_learned,
    calibrate_scored,
    out_of_fold,
    split,
)
from semgrad_guard.grading.learning_set import GradedSentences
from semgrad_guard.metrics import auroc
from semgrad_guard.questions.run_record import AnsweredSentence, AnswerScore
from semgrad_guard.records import LOG, FusedWeights
from tests.pairwise import in_turn

ALPHA, DELTA, REPEATS = 0.3, 0.1, 16
NOISE = 60


def population(rng: np.random.Generator, n: int) -> LearningSet:
    """Answers of which two scores know something, and sixty others know nothing."""
    hard = rng.normal(size=n)
    names = ["greatest_nll", "other_nll", *(f"noise/{i}" for i in range(NOISE))]
    values = np.exp(rng.normal(size=(n, len(names))))
    values[:, :2] *= np.exp(2 * hard[:, None])
    wrong = rng.random(n) < 1 / (1 + np.exp(-2 * hard))
    features = [dict(zip(names, row, strict=True)) for row in values.tolist()]
    singles = {name: values[:, i].tolist() for i, name in enumerate(("semgrad", "hybridgrad"))}
    singles["max_probability"] = singles["hybridgrad"]
    return LearningSet([f"q{i}" for i in range(n)], (~wrong).tolist(), {"states": features}, singles)


def bind(estimator: Estimator) -> Binding:
    return Binding(model="m", estimator=estimator.name, settings=estimator.settings())


def logits(weights: FusedWeights, graded: LearningSet) -> NDArray[np.float64]:
    """`FusedWeights.logit` of many answers at once (only logarithms here)."""
    raw = np.array([[r[c.removeprefix(LOG)] for c in weights.columns] for r in graded.features["states"] if r])
    x = (np.log(np.clip(raw, weights.lows, weights.highs)) - weights.centres) / weights.scales
    return weights.intercept + x @ np.array(weights.weights)


def excess(found: Calibration, new: LearningSet) -> bool:
    """Whether the true error rate behind the threshold is above alpha."""
    if found.threshold is None or found.choice is None or found.choice.weights is None:
        return False
    let = logits(found.choice.weights, new) <= found.threshold
    return bool(let.any()) and float(1 - np.array(new.correct)[let].mean()) > ALPHA


def test_the_promise_holds_after_fitting_on_a_part() -> None:
    rng = np.random.default_rng(0)
    new = population(rng, 4000)
    found = [
        calibrate_learned(population(rng, 300), FusedStates(), bind=bind, alpha=ALPHA, delta=DELTA, seed=s).calibration
        for s in range(REPEATS)
    ]
    violations = np.mean([excess(c, new) for c in found])
    answered = np.mean([c.threshold is not None for c in found])
    print(f"violations {violations:.3f}, thresholds found {answered:.2f}")
    assert violations <= DELTA
    assert answered > 0.3  # the promise is not kept by letting nothing through


def test_fitting_and_calibrating_on_the_same_answers_breaks_it() -> None:
    rng = np.random.default_rng(0)
    new = population(rng, 4000)
    violations = 0
    for _ in range(REPEATS):
        answers = population(rng, 200)
        fitted = FusedStates().fitted(answers.features["states"], answers.correct)
        found = calibrate(answers.scores(fitted), answers.correct, alpha=ALPHA, delta=DELTA)
        let = logits(fitted.weights, new) <= (-math.inf if found.threshold is None else found.threshold)
        violations += bool(let.any()) and 1 - np.array(new.correct)[let].mean() > ALPHA
    print(f"violations on the same answers {violations / REPEATS:.3f}")
    assert violations / REPEATS > 3 * DELTA


def test_the_same_answers_are_refused() -> None:
    answers = population(np.random.default_rng(1), 300)
    choice = calibrate_learned(answers, FusedStates(), bind=bind, alpha=ALPHA, delta=DELTA).calibration.choice
    fitted = FusedStates(weights=choice.weights)
    with pytest.raises(CalibrationError, match="75 of the questions were used to choose or fit"):
        calibrate(
            answers.scores(fitted), answers.correct, alpha=ALPHA, delta=DELTA, groups=answers.questions, choice=choice
        )


def test_what_was_learned_and_from_what_is_kept() -> None:
    answers = population(np.random.default_rng(2), 300)
    outcome = calibrate_learned(answers, FusedStates(), bind=bind, alpha=ALPHA, delta=DELTA, seed=3)
    made, choice = outcome.calibration, outcome.calibration.choice
    assert (choice.asked, choice.estimator, choice.split_seed) == ("states", "states", 3)
    assert (choice.weights.n, made.n, len(outcome.correct)) == (75, 225, 225)
    assert (made.binding.estimator, made.binding.settings) == ("states", FusedStates(weights=choice.weights).settings())
    learned = answers.part([int(name[1:]) for name in choice.questions])
    assert FusedStates().fitted(learned.features["states"], learned.correct).weights == choice.weights


def test_too_few_answers_leave_all_of_them_to_a_label_free_score() -> None:
    few = LEARN_FROM - 1
    answers = population(np.random.default_rng(3), few)
    made = calibrate_learned(answers, FusedStates(), bind=bind, alpha=ALPHA, delta=DELTA).calibration
    assert (made.choice.estimator, made.binding.estimator, made.n) == ("max_probability", "max_probability", few)
    assert made.choice.reason.startswith("Max probability takes the place of FusedStates")
    assert f"from {LEARN_FROM} graded answers on; there are {few}. No label is spent" in made.choice.reason
    assert (made.choice.weights, made.choice.questions) == (None, ())
    direct = calibrate(answers.uncertainties["max_probability"], answers.correct, alpha=ALPHA, delta=DELTA)
    assert made.threshold == direct.threshold


@in_turn(row=range(0, LEARN_FROM, 20), failed=[None, {"greatest_nll": math.nan}])
def test_a_single_failed_answer_is_no_reason_not_to_learn(row: int, failed: dict[str, float] | None) -> None:
    """One of the answers has no features: it is calibrated on, unscored, and another one is learned from."""
    drawn = population(np.random.default_rng(3), LEARN_FROM + 1)
    features = [*drawn.features["states"][:row], failed, *drawn.features["states"][row + 1 :]]
    answers = LearningSet(drawn.questions, drawn.correct, {"states": features}, drawn.uncertainties)
    learned = calibrate_learned(answers, FusedStates(), bind=bind, alpha=ALPHA, delta=DELTA).calibration
    chosen = best(answers, (FusedStates(), SemGrad()))
    for made in (learned, chosen):
        assert len(made.choice.questions) == 50
        assert f"q{row}" not in made.choice.questions
    assert learned.binding.estimator == "states"


def test_too_few_wrong_ones_leave_the_rest_to_a_label_free_score() -> None:
    """That they were too few was read off labels: these answers may not choose the threshold as well."""
    drawn = population(np.random.default_rng(4), 300)
    answers = LearningSet(drawn.questions, [True] * 295 + [False] * 5, drawn.features, drawn.uncertainties)
    made = calibrate_learned(answers, FusedStates(), bind=bind, alpha=ALPHA, delta=DELTA).calibration
    assert (made.choice.estimator, made.n, len(made.choice.questions)) == ("max_probability", 225, 75)
    assert "Max probability takes the place of FusedStates. FusedStates takes at least 50" in made.choice.reason


def best(answers: LearningSet, candidates: Sequence[Estimator]) -> Calibration:
    return calibrate_best(answers, candidates, bind=bind, alpha=ALPHA, delta=DELTA).calibration


def test_auto_takes_the_best_and_says_why() -> None:
    answers = population(np.random.default_rng(5), 300)
    flipped = {
        **answers.uncertainties,
        "hybridgrad": [-x for x in answers.uncertainties["hybridgrad"] if x is not None],
    }
    answers = LearningSet(answers.questions, answers.correct, answers.features, flipped)
    made = best(answers, (HybridGrad(), SemGrad()))
    assert (made.choice.asked, made.choice.estimator, made.n) == ("auto", "semgrad", 225)
    learned = answers.part([int(name[1:]) for name in made.choice.questions])
    assert made.choice.aurocs == {
        "hybridgrad": auroc(learned.uncertainties["hybridgrad"], learned.correct),
        "semgrad": auroc(learned.uncertainties["semgrad"], learned.correct),
    }
    assert f"semgrad {made.choice.aurocs['semgrad']:.3f}" in made.choice.reason
    learned_one = best(answers, (HybridGrad(), FusedStates())).choice
    assert learned_one.weights.n == 75
    folds = np.array([out_of_fold(learned, FusedStates(), seed=seed) for seed in range(5)], dtype=np.float64)
    assert learned_one.aurocs["states"] == auroc(folds.mean(0).tolist(), learned.correct)


@pytest.mark.parametrize("n", [CHOOSE_FROM - 1, 400])
def test_every_calibration_names_the_estimator_that_auto_would_take(n: int) -> None:
    drawn = population(np.random.default_rng(5), n)
    scores = {**drawn.uncertainties, "max_probability": np.random.default_rng(0).random(n).tolist()}
    answers = replace(drawn, uncertainties=scores)
    at_hand = [one for one in CANDIDATES if one.name in {*answers.uncertainties, *answers.features}]
    how: dict[str, Any] = {"alpha": ALPHA, "delta": DELTA}
    best = calibrate_best(answers, at_hand, bind=bind, **how).calibration
    assert best.auto == ("max_probability" if n < CHOOSE_FROM else "semgrad")
    others = [
        calibrate_learned(answers, FusedStates(), bind=bind, **how).calibration,
        calibrate_scored(answers, "semgrad", binding=bind(SemGrad()), **how).calibration,
        calibrate_scored(answers, "semgrad", binding=bind(SemGrad()), copies="keep", **how).calibration,
    ]
    assert {made.auto for made in others} == {best.auto}
    assert report(others[0])["scores"].count(f"; --estimator auto takes {best.auto}: the best on a part") == 1


def test_auto_with_nothing_to_tell_apart_keeps_the_first_and_says_so() -> None:
    drawn = population(np.random.default_rng(6), 300)
    answers = LearningSet(drawn.questions, [True] * 300, drawn.features, drawn.uncertainties)
    choice = best(answers, (HybridGrad(), SemGrad(), FusedStates())).choice
    assert choice.estimator == "hybridgrad"
    assert choice.aurocs == {"hybridgrad": None, "semgrad": None, "states": None}
    assert "right and 0 wrong" in choice.reason


@pytest.mark.parametrize("n", [1, 5])
def test_a_handful_of_answers_is_no_crash(n: int) -> None:
    answers = population(np.random.default_rng(8), n)
    learned_one = calibrate_learned(answers, FusedStates(), bind=bind, alpha=ALPHA, delta=DELTA).calibration
    assert (learned_one.n, learned_one.threshold) == (n, None)
    assert best(answers, (HybridGrad(), FusedStates())).threshold is None


def test_out_of_fold_scores_are_honest() -> None:
    """Labels that nothing can predict: an honest score has an AUROC of a half, one fitted on them has more."""
    rng = np.random.default_rng(7)
    drawn = population(rng, 400)
    answers = LearningSet(drawn.questions, (rng.random(400) < 0.5).tolist(), drawn.features, drawn.uncertainties)
    honest = auroc(out_of_fold(answers, FusedStates(), seed=0), answers.correct)
    fitted = auroc(answers.scores(FusedStates().fitted(answers.features["states"], answers.correct)), answers.correct)
    assert honest is not None
    assert fitted is not None
    assert abs(honest - 0.5) < 0.08
    assert fitted > 0.65


@pytest.mark.parametrize("n", [0, 1, 2, 3, 150, 5000])
def test_a_split_takes_every_row_once_and_looks_at_nothing_but_the_seed(n: int) -> None:
    learn, rest = split([True] * n, seed=1, least=100)
    assert sorted([*learn, *rest]) == list(range(n))
    assert len(learn) == (min(LEARN_MOST, max(50, n // 4)) if n >= 100 else 0)
    assert split([True] * n, seed=1, least=100) == (learn, rest)
    assert n < 100 or split([True] * n, seed=2, least=100) != (learn, rest)


def test_a_split_keeps_near_duplicates_on_one_side() -> None:
    facts = [row // 2 for row in range(400)]
    learn, rest = split([True] * 400, seed=0, least=100, facts=facts)
    assert len(learn) >= 100
    assert sorted([*learn, *rest]) == list(range(400))
    assert not {facts[row] for row in learn} & {facts[row] for row in rest}


@pytest.mark.parametrize(("n", "spent"), [(CHOOSE_FROM - 1, 0), (CHOOSE_FROM, 50)])
def test_auto_spends_no_label_where_there_are_too_few(n: int, spent: int) -> None:
    answers = population(np.random.default_rng(0), n)
    found = calibrate_best(
        answers, (FusedStates(), SemGrad(), HybridGrad()), bind=bind, alpha=ALPHA, delta=DELTA
    ).calibration
    assert (found.n, len(found.choice.questions)) == (n - spent, spent)
    assert spent or ("semgrad is kept: comparing takes 200 graded answers, and there are 199" in found.choice.reason)


def by_sentence(rng: np.random.Generator, n: int) -> LearningSet:
    """Answers of three sentences, whose features know something about each of them."""
    flat = population(rng, 3 * n)
    rows: list[GradedSentences] = []
    for row in range(n):
        at = range(3 * row, 3 * row + 3)
        sentences = [
            AnsweredSentence(
                start=i % 3,
                end=i % 3 + 1,
                scores={
                    **{name: AnswerScore(uncertainty=column[i]) for name, column in flat.uncertainties.items()},
                    "states": AnswerScore(uncertainty=None, features=dict(flat.features["states"][i] or {})),
                },
            )
            for i in at
        ]
        rows.append(GradedSentences("abc", sentences, [flat.correct[i] for i in at]))
    names = [f"q{row}" for row in range(n)]
    empty = {name: [None] * n for name in flat.uncertainties}
    right = [all(one.correct) for one in rows]
    return LearningSet(names, right, {"states": [None] * n}, empty, facts=range(n), sentences=rows)


def test_by_sentence_answers_are_split_and_sentences_learned_from() -> None:
    graded = by_sentence(np.random.default_rng(5), 240)
    promise: dict[str, Any] = {"on_doubt": "drop", "promise": "sentence", "alpha": ALPHA, "delta": DELTA}
    best = calibrate_best(graded, [SemGrad(), HybridGrad(), FusedStates()], bind=bind, **promise)
    choice = best.calibration.choice
    assert set(choice.aurocs) == {"semgrad", "hybridgrad", "states"}
    assert "on 60 answers" in choice.reason
    assert best.calibration.n == 180
    assert len(best.correct) == 3 * 180
    learned = calibrate_learned(graded, FusedStates(), bind=bind, **promise).calibration
    assert (learned.choice.estimator, len(learned.choice.questions)) == ("states", 60)
    assert learned.sentences.n == 540


def test_by_sentence_an_answer_without_features_of_one_sentence_is_not_learned_from() -> None:
    graded = by_sentence(np.random.default_rng(5), 4)
    rows = [*(graded.sentences or ())]
    first = rows[1].sentences[0]
    broken = first.model_copy(update={"scores": {**first.scores, "states": AnswerScore(uncertainty=None)}})
    rows[1] = replace(rows[1], sentences=[broken, *rows[1].sentences[1:]])
    rows[2] = GradedSentences("", [], [])
    assert replace(graded, sentences=rows).usable([FusedStates()]) == [True, False, False, True]
    assert graded.usable([SemGrad()]) == [True] * 4
