"""From a calibration back to its estimator: a guard needs nothing but the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_semgrad_guard import ChatSemGrad
from llama_index_semgrad_guard import SemGradLLM
from semgrad_guard import Binding, Calibration, Guard, LanguageModel, Policy, calibrate
from semgrad_guard.calibration import EstimatorChoice
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError
from semgrad_guard.estimators import (
    ESTIMATORS,
    Estimator,
    FusedStates,
    HybridGrad,
    LengthNormalisedEntropy,
    MeanEntropy,
    SemGrad,
)
from semgrad_guard.guard.guard import as_estimator, estimator_of

ASKED = [f"What is item {i}?" for i in range(6)]


@pytest.fixture(scope="module")
def fitted(language_model: LanguageModel) -> FusedStates:
    """Fitted on copies of the tiny model's own features, jittered, with labels at random."""
    rng = np.random.default_rng(0)
    evidence = language_model.generate("q").evidence
    own = FusedStates()(evidence).features
    assert own is not None
    records = [{k: v * float(np.exp(rng.normal())) for k, v in own.items()} for _ in range(60)]
    return FusedStates().fitted(records, (rng.random(60) < 0.5).tolist())


def calibration_for(binding: Binding, **content: object) -> Calibration:
    return calibrate(
        np.linspace(-3, 3, 200), [True] * 200, alpha=0.1, delta=0.1, binding=binding, **content  # type: ignore[arg-type]
    )  # fmt: skip


def learned_calibration(model: LanguageModel, fitted: FusedStates) -> Calibration:
    bound = Guard(model, Policy(threshold=0.0), estimator=fitted).binding
    choice = EstimatorChoice(asked="states", estimator="states", reason="why", weights=fitted.weights, questions=("a",))
    return calibration_for(bound, choice=choice)


def test_a_guard_takes_the_fitted_estimator_from_the_file(
    language_model: LanguageModel, fitted: FusedStates, tmp_path: Path
) -> None:
    saved = learned_calibration(language_model, fitted).save(tmp_path / "c.json")
    guard = Guard(language_model, Policy.from_calibration(Calibration.load(saved)))
    assert guard.estimator == fitted
    verdict = guard(ASKED[0])
    expected = fitted(language_model.generate(ASKED[0]).evidence)
    assert verdict.estimator == "states"
    assert verdict.uncertainty == pytest.approx(expected.uncertainty)
    assert verdict.confidence is not None
    assert verdict.details.gnll is not None


def test_another_model_and_other_weights_are_refused(
    language_model: LanguageModel, fitted, make_language_model
) -> None:
    policy = Policy.from_calibration(learned_calibration(language_model, fitted))
    with pytest.raises(BindingMismatchError, match="fingerprint"):
        Guard(make_language_model(seed=1), policy)(ASKED[0])
    assert fitted.weights is not None
    other = FusedStates(weights=fitted.weights.model_copy(update={"intercept": 1.0}))
    with pytest.raises(BindingMismatchError, match="weights"):
        Guard(language_model, policy, estimator=other)(ASKED[0])


@pytest.mark.parametrize("estimator", [kind() for kind in ESTIMATORS] + [HybridGrad(tau=2.0), SemGrad(layers=(1, 3))])
def test_every_estimator_comes_back_with_its_settings(estimator: Estimator) -> None:
    bound = Binding(model="m", estimator=estimator.name, settings={**estimator.settings(), "dtype": "float32"})
    assert estimator_of(calibration_for(bound)) == estimator


def test_without_a_calibration_or_a_binding_it_is_hybridgrad() -> None:
    assert estimator_of(None) == HybridGrad()
    unbound = calibrate([0.0] * 50, [True] * 50, alpha=0.2, delta=0.2)
    assert estimator_of(unbound) == HybridGrad()


def test_what_cannot_be_made_again_is_named() -> None:
    with pytest.raises(CalibrationError, match="'oracle', which is not known here"):
        estimator_of(calibration_for(Binding(model="m", estimator="oracle")))
    settings = {"plan": {**LengthNormalisedEntropy().settings()["plan"], "temperature": 0.25}}
    with pytest.raises(CalibrationError, match="cannot be made again from the file"):
        estimator_of(calibration_for(Binding(model="m", estimator="ln_pe", settings=settings)))
    with pytest.raises(CalibrationError, match="holds no weights"):
        estimator_of(calibration_for(Binding(model="m", estimator="states")))


def test_an_estimator_is_named_at_every_front(language_model: LanguageModel) -> None:
    assert as_estimator("mean_entropy") == MeanEntropy()
    for made in (
        Guard(language_model, Policy(threshold=1.0), estimator="mean_entropy"),
        ChatSemGrad.from_model(language_model, estimator="mean_entropy"),
        SemGradLLM.from_model(language_model, estimator="mean_entropy", router=False),
    ):
        assert made.estimator == MeanEntropy()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("entropy", "'entropy' is no estimator; there are hybridgrad, .*states"),
        ("hybridgrat", "Did you mean hybridgrad"),
        (MeanEntropy, r"MeanEntropy is a class: pass an object, MeanEntropy\(\), or its name"),
        ("states", "FusedStates learns from graded answers first"),
        (FusedStates(), "FusedStates learns from graded answers first"),
    ],
)
def test_what_is_no_estimator_is_refused_when_a_model_is_made(
    language_model: LanguageModel, given: Any, words: str
) -> None:
    for make in (
        as_estimator,
        lambda given: Guard(language_model, Policy(threshold=1.0), estimator=given),
        lambda given: ChatSemGrad(estimator=given),
        lambda given: SemGradLLM(estimator=given, router=False),
    ):
        with pytest.raises(InputError, match=words):
            make(given)
