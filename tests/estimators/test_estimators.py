"""Every estimator against a formula written out by hand on the same replay."""

from __future__ import annotations

import json
import math

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.errors import EmptyLayerSpanError, InputError
from semgrad_guard.estimators import ESTIMATORS, GreedyNLL, HybridGrad, MeanEntropy, ParaGrad, SemGrad


@pytest.fixture(scope="module")
def evidence(language_model: LanguageModel):
    return language_model.generate("q", GenerationOptions(max_new_tokens=6, temperature=1.0, seed=0)).evidence


def test_each_reads_its_number(evidence) -> None:
    scores = evidence.gradients().scores
    balance = math.exp(-sum(scores.entropies) / len(scores.entropies))
    assert SemGrad()(evidence).uncertainty == scores.semgrad
    assert ParaGrad()(evidence).uncertainty == scores.paragrad
    assert GreedyNLL()(evidence).uncertainty == pytest.approx(-sum(scores.log_probs))
    assert MeanEntropy()(evidence).uncertainty == pytest.approx(sum(scores.entropies) / len(scores.entropies))
    expected = (1 - balance) * scores.semgrad + balance * scores.paragrad
    assert HybridGrad()(evidence).uncertainty == pytest.approx(expected)


def test_the_official_variant_averages(evidence) -> None:
    n = len(evidence.response_ids)
    assert ParaGrad("official")(evidence).uncertainty == pytest.approx(ParaGrad()(evidence).uncertainty / n)


def test_tau_and_beta_lean_to_either_side(evidence) -> None:
    assert HybridGrad(tau=1e-9)(evidence).uncertainty == pytest.approx(SemGrad()(evidence).uncertainty)
    assert HybridGrad(tau=1e9)(evidence).uncertainty == pytest.approx(ParaGrad()(evidence).uncertainty)
    assert HybridGrad(beta=0.0)(evidence).uncertainty < HybridGrad()(evidence).uncertainty


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_settings_and_details_are_plain_json(estimator, evidence) -> None:
    json.dumps(estimator().settings())
    score = estimator()(evidence)
    assert json.loads(json.dumps(score.details)) == score.details
    assert score.details["scored_tokens"] == len(evidence.response_ids)


def test_layers_override_the_span(evidence) -> None:
    assert SemGrad(layers=(3,))(evidence).uncertainty == pytest.approx(SemGrad()(evidence).uncertainty)
    assert SemGrad(layers=(1, 2, 3))(evidence).uncertainty != SemGrad()(evidence).uncertainty
    with pytest.raises(InputError):
        SemGrad(layers=(7,))(evidence)
    with pytest.raises(EmptyLayerSpanError):
        SemGrad(layers=())(evidence)


@pytest.mark.parametrize("bad", [{"tau": 0.0}, {"tau": float("nan")}, {"beta": -1.0}])
def test_bad_settings(bad) -> None:
    with pytest.raises(InputError):
        HybridGrad(**bad)
