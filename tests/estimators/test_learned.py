"""FusedStates: what it reads, what it fits (against scikit-learn's own pipeline), and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.linear_model import LogisticRegression

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import BatchScoring
from semgrad_guard.errors import FitError, MissingExtraError
from semgrad_guard.estimators import FusedStates, learned
from semgrad_guard.estimators.learned import MIN_ANSWERS, MIN_EACH, SHARES, STATE, fit_weights
from semgrad_guard.records import FusedWeights

Record = dict[str, float]


def graded(n: int = 120, *, seed: int = 0, extra: int = 2) -> tuple[list[Record], list[bool]]:
    """Answers whose features all speak of one hidden difficulty, and whether they are right."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(size=n)
    names = ["greatest_nll", "mean_entropy", "gnll", "length", *(f"more/{i}" for i in range(extra))]
    values = np.exp(hard[:, None] + rng.normal(size=(n, len(names))))
    return [dict(zip(names, row, strict=True)) for row in values.tolist()], (rng.normal(size=n) > hard).tolist()


@pytest.fixture(scope="module")
def evidence(language_model: LanguageModel):
    return language_model.generate("q", GenerationOptions(max_tokens=6, temperature=1.0, seed=0)).evidence


def test_features_are_what_generating_has_seen(evidence) -> None:
    seen = evidence.observed(own=True)
    score = FusedStates()(evidence)
    found = score.features
    assert (found["gnll"], found["length"]) == (pytest.approx(-sum(seen.log_probs)), 6)
    assert found["mean_nll"] == pytest.approx(found["gnll"] / 6)
    assert (found["first_nll"], found["first_entropy"]) == (-seen.log_probs[0], seen.entropies[0])
    assert (found["greatest_nll"], found["greatest_entropy"]) == (-min(seen.log_probs), max(seen.entropies))
    states = [value for name, value in found.items() if name.startswith(STATE)]
    assert states == pytest.approx(seen.state, rel=1e-4)
    assert json.loads(json.dumps(found)) == found


def test_without_weights_there_are_features_and_no_score(evidence) -> None:
    score = FusedStates()(evidence)
    assert score.uncertainty is None
    assert "not fitted" in str(score.reason)
    assert score.details["gnll"] > 0


def test_fitted_it_scores_by_its_features(evidence) -> None:
    rng = np.random.default_rng(0)
    own = FusedStates()(evidence).features
    records = [{k: v * math.exp(rng.normal()) for k, v in own.items()} for _ in range(60)]
    fitted = FusedStates().fitted(records, [i % 2 == 0 for i in range(60)])
    score = fitted(evidence)
    assert score.uncertainty == fitted.weights.logit(own)
    assert score.reason is None
    assert fitted.settings()["weights"] == fitted.weights.id
    assert not fitted.objective.gradients


def test_an_empty_answer_has_nothing_to_read(evidence) -> None:
    empty = BatchScoring(evidence.model, [replace(evidence.answer, ids=())]).evidence[0]
    score = FusedStates()(empty)
    assert (score.uncertainty, score.reason, score.features) == (None, "the response is empty", None)


def test_the_fit_is_that_of_a_pipeline_written_out() -> None:
    records, right = graded()
    fitted = FusedStates().fitted(records, right)
    logs = [*records[0]]
    as_is = ["mean_entropy", "gnll", "length"]
    x = np.array([[*(math.log(r[k]) for k in logs), *(r[k] for k in as_is)] for r in records])
    z = (x - x.mean(0)) / x.std(0)
    wrong = [not r for r in right]
    regression = LogisticRegression(C=1.7, max_iter=1000).fit(z / 6, wrong)
    learned, label_free = z / 6 @ regression.coef_[0], z[:, logs.index("mean_entropy")]
    expected = [
        regression.intercept_[0] + (learned + share * label_free * learned.std() / label_free.std()) / (1 + share)
        for share in SHARES
    ]
    found = [fitted.weights.logit(r) for r in records]
    assert any(found == pytest.approx(value, abs=1e-6) for value in expected), "one of the shares that may be leant by"
    assert fitted.weights.n == 120
    assert fitted.weights.n_wrong == right.count(False)


def other_kind(
    rng: np.random.Generator, n: int, *, informative: bool, rises: float = 1.0
) -> tuple[list[Record], list[bool]]:
    """Answers whose likelihoods predict a little, and whose states nothing, or much if `informative`."""
    wrong = rng.random(n) < 0.5
    states = rng.normal(size=(n, 40)) + (wrong[:, None] * rng.uniform(0.2, 0.6, 40) if informative else 0)
    likelihood = np.exp(rng.normal(size=n) + 0.8 * rises * wrong)
    rows = [
        {"mean_nll": x, **{f"{STATE}{i}": v for i, v in enumerate(s)}}
        for x, s in zip(likelihood.tolist(), states.tolist(), strict=True)
    ]
    return rows, wrong.tolist()


def lean(records: list[Record], wrong: list[bool], yields: float = 0.0) -> float:
    """By how much the likelihood outweighs the states, where leaning may cost so much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned, "_YIELDS", yields)
        weights = fit_weights(records, np.array(wrong))
    by_name = dict(zip(weights.columns, weights.weights, strict=True))
    spread = math.sqrt(sum(w * w for name, w in by_name.items() if name.startswith(STATE)))
    return by_name["ln mean_nll"] / spread


def test_it_leans_on_likelihoods_unless_labels_speak_against_it() -> None:
    rng = np.random.default_rng(0)
    idle, useful = other_kind(rng, 100, informative=False), other_kind(rng, 300, informative=True)
    assert lean(*idle) > 0.5 > lean(*useful)
    assert lean(*useful, yields=1.0) > 2 * lean(*useful), "where it may cost anything, it leans as far as it can"


def test_it_does_not_lean_on_likelihoods_that_mislead() -> None:
    records, wrong = other_kind(np.random.default_rng(1), 200, informative=True, rises=-1)
    assert lean(records, wrong, yields=1.0) == lean(records, wrong) < 0


def test_zeros_are_small_numbers_and_not_minus_infinity() -> None:
    records, right = graded()
    smallest = min(r["greatest_nll"] for r in records[1:])
    records[0] = {**records[0], "greatest_nll": 0.0}
    weights = FusedStates().fitted(records, right).weights
    assert weights.lows[weights.columns.index("ln greatest_nll")] == smallest
    assert weights.logit(records[0]) == weights.logit({**records[0], "greatest_nll": smallest})


def test_what_lies_beyond_the_fitted_range_is_held_to_it() -> None:
    records, right = graded()
    weights = FusedStates().fitted(records, right).weights
    far, top = dict.fromkeys(records[0], 1e30), {k: max(r[k] for r in records) for k in records[0]}
    assert weights.logit(far) == weights.logit(top)


def test_constant_vanished_and_partly_missing_features_are_left_out() -> None:
    records, right = graded()
    for number, record in enumerate(records):
        record |= {"constant": 4.0, "vanished": 0.0, **({"at_times": float(number)} if number else {})}
    read = FusedStates().fitted(records, right).weights.features
    assert read == set(records[0]) - {"constant", "vanished"}


def test_answers_without_finite_features_are_left_out() -> None:
    records, right = graded()
    spoiled = [None, {**records[1], "gnll": math.nan}, {**records[2], "gnll": math.inf}, *records[3:]]
    assert FusedStates().fitted(spoiled, right) == FusedStates().fitted(records[3:], right[3:])


@pytest.mark.parametrize(
    ("right", "words"),
    [
        ([True] * 60, "60 right and 0 wrong"),
        ([False] * 60, "0 right and 60 wrong"),
        ([True] * (60 - MIN_EACH + 1) + [False] * (MIN_EACH - 1), f"and {MIN_EACH - 1} wrong"),
        ([True, False] * ((MIN_ANSWERS - 2) // 2), f"there are {MIN_ANSWERS - 2}"),
        ([], "there are 0"),
    ],
)
def test_too_few_labels_are_counted(right: list[bool], words: str) -> None:
    records, _ = graded(60)
    with pytest.raises(FitError, match=words):
        FusedStates().fitted(records[: len(right)], right)


def test_other_bad_input_is_named() -> None:
    records, right = graded()
    with pytest.raises(FitError, match="120 records and 119 labels"):
        FusedStates().fitted(records, right[1:])
    with pytest.raises(FitError, match="True or False"):
        FusedStates().fitted(records, [0.5, *right[1:]])
    with pytest.raises(FitError, match="nothing to learn"):
        FusedStates().fitted([records[0]] * 120, right)


def test_scikit_learn_is_asked_for_only_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    records, right = graded()
    weights = FusedStates().fitted(records, right).weights
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(MissingExtraError, match=r"semgrad-guard\[eval\]"):
        FusedStates().fitted(records, right)
    assert FusedStates(weights=weights).uncertainty(records[0]) == (weights.logit(records[0]), None)


def test_a_missing_feature_is_a_reason_and_no_score() -> None:
    records, right = graded()
    fitted = FusedStates().fitted(records, right)
    number, reason = fitted.uncertainty({k: v for k, v in records[0].items() if k != "more/0"})
    assert number is None
    assert "has no more/0" in str(reason)
    assert fitted.uncertainty(None) == (None, "the score is not finite")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*graded(60)[0][0]]), st.floats(0, 1e300), min_size=6))
def test_any_finite_features_have_a_finite_score(features: Record) -> None:
    assert math.isfinite(_FITTED.logit(features))


_FITTED = FusedStates().fitted(*graded(60)).weights


def test_weights_survive_json_and_are_named_by_their_content() -> None:
    assert FusedWeights.model_validate_json(_FITTED.model_dump_json(), strict=True) == _FITTED
    assert _FITTED.id != _FITTED.model_copy(update={"intercept": 0.0}).id
    assert len(_FITTED.id) == 12


@pytest.mark.parametrize(
    "change",
    [
        {"lows": _FITTED.lows[1:]},
        {"scales": (0.0, *_FITTED.scales[1:])},
        {"lows": (0.0, *_FITTED.lows[1:])},
        {"weights": (math.nan, *_FITTED.weights[1:])},
        {"columns": ()},
        {"more": 1},
    ],
)
def test_broken_weights_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FusedWeights.model_validate({**_FITTED.model_dump(), **change})
