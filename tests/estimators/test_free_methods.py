"""Methods that cost a pass or nothing: RAUQ, LLM-Check's two scores, the greatest entropy, by formulas written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.scores.observed import Observation, observed_layer
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import RAUQ, AttentionScore, GreatestEntropy, HiddenScore, MaxProbability
from semgrad_guard.estimators.observed import recurrent

FREE = (GreatestEntropy(), HiddenScore(), AttentionScore(), RAUQ())
LOG_PROBS = st.lists(st.floats(-20, 0), min_size=2, max_size=6)


@pytest.fixture(scope="module")
def answers(language_model: LanguageModel):
    return language_model.generate_batch(["q", "What is it?"], GenerationOptions(max_tokens=6, temperature=1.0, seed=0))


@given(LOG_PROBS, st.floats(0.05, 1), st.data())
def test_rauq_is_its_recurrence(log_probs: list[float], alpha: float, data: st.DataObject) -> None:
    size = len(log_probs) - 1
    weights = data.draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))
    confidence = [math.exp(log_probs[0])]
    for log_p, weight in zip(log_probs[1:], weights, strict=True):
        confidence.append(alpha * math.exp(log_p) + (1 - alpha) * weight * confidence[-1])
    expected = -sum(map(math.log, confidence)) / len(confidence)
    assert recurrent(log_probs, weights, alpha=alpha) == pytest.approx(max(0.0, expected), rel=1e-9, abs=1e-12)


def test_rauq_takes_the_layer_that_doubts_most() -> None:
    log_probs, previous = [-0.1, -3.0, -0.2], [[0.9, 0.8], [0.1, 0.0]]
    found = RAUQ(alpha=0.3).number(log_probs, previous, [-1.0, -2.0])
    assert found == max(recurrent(log_probs, start, alpha=0.3) for start in previous)
    assert found == recurrent(log_probs, previous[1], alpha=0.3)
    assert RAUQ(alpha=1).number(log_probs, previous, []) == pytest.approx(1.1)  # the mean negative log-likelihood
    assert RAUQ().number([-2.0], [[], []], [-1.0, -1.0]) == 2.0, "one token has no token before it"
    assert RAUQ().number([-900.0, -900.0], [[0.0]], [-1.0]) == pytest.approx(900.3466), "no confidence is lost"


@pytest.mark.parametrize("alpha", [0, -0.1, 1.1, math.nan])
def test_rauq_refuses_other_alphas(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha"):
        RAUQ(alpha=alpha)


def test_they_read_the_answer(answers, language_model: LanguageModel) -> None:
    model = language_model._model
    for answer in answers:
        evidence, seen = answer.evidence, answer.evidence.observed()
        assert GreatestEntropy()(evidence).uncertainty == max(seen.entropies)
        read = evidence.attention()
        assert RAUQ()(evidence).uncertainty == RAUQ().number(seen.log_probs, read.previous, read.own)
        assert AttentionScore()(evidence).uncertainty == -read.own[len(read.own) // 2]
        ids = torch.tensor([[*answer.prompt.ids, *answer.response_ids]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[observed_layer(4)]
        z = states[0, len(answer.prompt.ids) - 1 : -1].double().T
        centre = torch.eye(len(z)) - torch.ones(len(z), len(z)) / len(z)
        values = torch.linalg.svdvals(z.T @ centre.double() @ z + 1e-3 * torch.eye(z.shape[1]))
        assert HiddenScore()(evidence).uncertainty == pytest.approx(float(values.log().mean()), rel=1e-6)


def test_a_score_does_not_depend_on_its_batch(answers, language_model: LanguageModel) -> None:
    for answer in answers:
        alone = answer.evidence.alone()
        for estimator in FREE:
            expected = estimator(answer.evidence)
            assert estimator(alone).uncertainty == pytest.approx(expected.uncertainty, rel=1e-6)
            assert MaxProbability.name in expected.details


def test_an_empty_answer_has_no_score(make_language_model) -> None:
    model = make_language_model()
    model._decoder.end_tokens = tuple(range(258))
    empty = model.generate("q", GenerationOptions(max_tokens=3)).evidence
    assert {estimator(empty).reason for estimator in FREE} == {"the response is empty"}
    cut = replace(empty, cut="\n")
    assert {estimator(cut).reason for estimator in FREE} == {
        "the response is empty: the model began with '\\n', where it was to stop"
    }


def test_states_that_are_not_known_have_no_spread() -> None:
    assert HiddenScore().value(Observation((-1.0,), (1.0,))) is None
