"""Methods that generating pays for: the same in a batch and alone, and none for an empty answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.estimators import GreatestEntropy, GreedyNLL, MaxProbability, MeanEntropy

FREE = (GreatestEntropy(), GreedyNLL(), MaxProbability(), MeanEntropy())


@pytest.fixture(scope="module")
def answers(language_model: LanguageModel):
    return language_model.generate_batch(["q", "What is it?"], GenerationOptions(max_tokens=6, temperature=1.0, seed=0))


def test_one_doubtful_word_is_enough(answers) -> None:
    for answer in answers:
        assert GreatestEntropy()(answer.evidence).uncertainty == max(answer.evidence.observed().entropies)


def test_a_score_does_not_depend_on_its_batch(answers) -> None:
    for answer in answers:
        alone = answer.evidence.alone()
        for estimator in FREE:
            expected = estimator(answer.evidence)
            assert estimator(alone).uncertainty == pytest.approx(expected.uncertainty, rel=1e-6)
            assert MaxProbability.name in expected.details


def test_an_empty_answer_has_no_score(make_language_model) -> None:
    model = make_language_model()
    model._model.generation_config.eos_token_id = list(range(258))
    empty = model.generate("q", GenerationOptions(max_tokens=3)).evidence
    assert {estimator(empty).reason for estimator in FREE} == {"the response is empty"}
    cut = replace(empty, cut="\n")
    assert {estimator(cut).reason for estimator in FREE} == {
        "the response is empty: the model began with '\\n', where it was to stop"
    }
