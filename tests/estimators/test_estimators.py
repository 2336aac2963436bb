"""Every estimator against a formula written out by hand on the same replay."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.errors import EmptyLayerSpanError, InputError
from semgrad_guard.estimators import (
    ESTIMATORS,
    ExGrad,
    GreedyNLL,
    HybridGrad,
    MaxProbability,
    MeanEntropy,
    ParaGrad,
    SemGrad,
)


@pytest.fixture(scope="module")
def evidence(language_model: LanguageModel):
    return language_model.generate("q", GenerationOptions(max_tokens=6, temperature=1.0, seed=0)).evidence


def test_each_reads_its_number(evidence) -> None:
    scores = evidence.gradients().scores
    balance = math.exp(-sum(scores.entropies) / len(scores.entropies))
    assert SemGrad()(evidence).uncertainty == scores.semgrad
    assert ParaGrad()(evidence).uncertainty == scores.paragrad
    assert GreedyNLL()(evidence).uncertainty == pytest.approx(-sum(scores.log_probs))
    assert MeanEntropy()(evidence).uncertainty == pytest.approx(sum(scores.entropies) / len(scores.entropies))
    expected = (1 - balance) * scores.semgrad + balance * scores.paragrad
    assert HybridGrad()(evidence).uncertainty == pytest.approx(expected)


def test_max_probability_is_one_minus_the_geometric_mean(evidence) -> None:
    probabilities = [math.exp(log_p) for log_p in evidence.gradients().scores.log_probs]
    expected = 1 - math.prod(probabilities) ** (1 / len(probabilities))
    assert MaxProbability()(evidence).uncertainty == pytest.approx(expected)


def test_max_probability_keeps_its_digits_near_certainty() -> None:
    sure = GradientScores(0.0, 0.0, 0.0, 3e-18, (0.0,), (-3e-18,), "full")
    assert MaxProbability().value(sure) == pytest.approx(3e-18)


def test_exgrad_is_paragrad_without_weights(evidence) -> None:
    assert ExGrad()(evidence).uncertainty == ParaGrad(weighted=False)(evidence).uncertainty
    assert ExGrad()(evidence).uncertainty != ParaGrad()(evidence).uncertainty
    n = len(evidence.response_ids)
    assert ExGrad("official")(evidence).uncertainty == pytest.approx(ExGrad()(evidence).uncertainty / n)


def test_the_ablations_reach_the_replay(evidence) -> None:
    plain = evidence.gradients(Objective(weighted=False)).scores
    squared = evidence.gradients(Objective(norm="l2")).scores
    last = evidence.gradients(Objective(token=-1)).scores
    assert SemGrad(weighted=False)(evidence).uncertainty == plain.semgrad
    assert SemGrad(norm="l2")(evidence).uncertainty == squared.semgrad
    assert ParaGrad(norm="l2")(evidence).uncertainty == squared.paragrad
    assert SemGrad(token=-1)(evidence).uncertainty == last.semgrad
    assert HybridGrad(token=-1)(evidence).uncertainty == last.hybridgrad
    assert len({plain.semgrad, squared.semgrad, last.semgrad, evidence.gradients().scores.semgrad}) == 4


def test_older_calibrations_stay_valid() -> None:
    """Settings that came later are recorded only where they differ from their defaults."""
    assert HybridGrad().settings() == {"variant": "paper", "layers": None, "tau": 1.0, "beta": 1.0}
    assert SemGrad().settings() == {"variant": "paper", "layers": None}
    assert ParaGrad().settings() == {"variant": "paper"}
    assert SemGrad(norm="l2", weighted=False, token=-2).settings() == {
        "variant": "paper", "layers": None, "norm": "l2", "weighted": False, "token": -2,
    }  # fmt: skip


def test_names_and_titles_are_unique() -> None:
    assert len({estimator.name for estimator in ESTIMATORS}) == len(ESTIMATORS)
    assert len({estimator.title for estimator in ESTIMATORS}) == len(ESTIMATORS)
    assert all(estimator.name.isidentifier() and estimator.name.islower() for estimator in ESTIMATORS)


def test_the_official_variant_averages(evidence) -> None:
    n = len(evidence.response_ids)
    assert ParaGrad("official")(evidence).uncertainty == pytest.approx(ParaGrad()(evidence).uncertainty / n)


def test_tau_and_beta_lean_to_either_side(evidence) -> None:
    assert HybridGrad(tau=1e-9)(evidence).uncertainty == pytest.approx(SemGrad()(evidence).uncertainty)
    assert HybridGrad(tau=1e9)(evidence).uncertainty == pytest.approx(ParaGrad()(evidence).uncertainty)
    assert HybridGrad(beta=0.0)(evidence).uncertainty < HybridGrad()(evidence).uncertainty


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_settings_and_details_are_plain_json(estimator, evidence) -> None:
    made = estimator()
    json.dumps(made.settings())
    if hasattr(made, "plan"):
        made = replace(made, plan=replace(made.plan, max_tokens=3))
    score = made(evidence)
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
