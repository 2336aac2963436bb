"""Every estimator against a formula written out by hand on the same numbers, and what holds for all of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradients import Observation
from semgrad_guard.errors import EmptyLayerSpanError, InputError
from semgrad_guard.estimators import (
    ESTIMATORS,
    SAR,
    ExGrad,
    GreatestEntropy,
    GreedyNLL,
    HybridGrad,
    Inside,
    MaxProbability,
    MeanEntropy,
    MutualInformation,
    ParaGrad,
    RootNLL,
    SemanticDensity,
    SemGrad,
)


@pytest.fixture(scope="module")
def evidence(language_model: LanguageModel):
    return language_model.generate("q", GenerationOptions(max_tokens=6, temperature=1.0, seed=0)).evidence


def test_each_reads_its_number(evidence) -> None:
    scores, n = evidence.gradients().scores, len(evidence.response_ids)
    balance, nll = math.exp(-sum(scores.entropies) / n), -sum(scores.log_probs)
    expected = {
        SemGrad(): scores.semgrad,
        ParaGrad(): scores.paragrad,
        ParaGrad("official"): scores.paragrad / n,
        HybridGrad(): (1 - balance) * scores.semgrad + balance * scores.paragrad,
        HybridGrad(tau=1e-9): scores.semgrad,
        HybridGrad(tau=1e9): scores.paragrad,
        HybridGrad(beta=0.0): (1 - balance) * scores.semgrad,
        SemGrad(layers=(3,)): scores.semgrad,
        GreedyNLL(): nll,
        RootNLL(): nll / n**0.5,
        MaxProbability(): 1 - math.prod(map(math.exp, scores.log_probs)) ** (1 / n),
        MeanEntropy(): sum(scores.entropies) / n,
        GreatestEntropy(): max(scores.entropies),
        ExGrad(): evidence.gradients(Objective(weighted=False)).scores.paragrad,
        ExGrad("official"): ExGrad()(evidence).uncertainty / n,
    }
    for estimator, number in expected.items():
        assert estimator(evidence).uncertainty == pytest.approx(number), estimator


def test_max_probability_keeps_its_digits_near_certainty() -> None:
    assert MaxProbability().value(Observation((-3e-18,), (0.0,))) == pytest.approx(3e-18)


def test_older_calibrations_stay_valid() -> None:
    assert HybridGrad().settings() == {"variant": "paper", "layers": None, "tau": 1.0, "beta": 1.0}
    assert SemGrad(layers=(3, 4)).settings() == {"variant": "paper", "layers": [3, 4]}
    assert ParaGrad().settings() == {"variant": "paper"}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_settings_and_details_are_plain_json(estimator, evidence) -> None:
    made = estimator()
    json.dumps(made.settings())
    if hasattr(made, "plan"):
        made = replace(made, plan=replace(made.plan, max_tokens=3))
    score = made(evidence)
    assert json.loads(json.dumps(score.details)) == score.details
    assert score.details["scored_tokens"] == len(evidence.response_ids)


def test_names_and_titles_are_unique() -> None:
    for kind in ("name", "title"):
        assert len({getattr(estimator, kind) for estimator in ESTIMATORS}) == len(ESTIMATORS)
    assert all(estimator.name.isidentifier() and estimator.name.islower() for estimator in ESTIMATORS)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: HybridGrad(tau=0.0), InputError),
        (lambda: HybridGrad(tau=float("nan")), InputError),
        (lambda: HybridGrad(beta=-1.0), InputError),
        (lambda: SemGrad(layers=(7,)), InputError),
        (lambda: SemGrad(layers=()), EmptyLayerSpanError),
        (lambda: Inside(alpha=0.0), InputError),
        (lambda: SemanticDensity(temperature=0.0), InputError),
        (lambda: SAR(t=0.0), InputError),
        (lambda: MutualInformation(f1=1.0), InputError),
    ],
)
def test_bad_settings(make, error, evidence) -> None:
    with pytest.raises(error):
        make()(evidence)
