"""Two answers of a tiny model, and tiny models that compare texts."""

from __future__ import annotations

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.estimators.text_pairs import CrossEncoder, Entailment

QUESTIONS = ["q", "What is it?"]


@pytest.fixture(scope="module")
def evidence(language_model: LanguageModel):
    generations = language_model.generate_batch(QUESTIONS, GenerationOptions(max_tokens=5))
    return [generation.evidence for generation in generations]


@pytest.fixture(scope="module")
def nli(make_pair_model) -> Entailment:
    labels = ("contradiction", "neutral", "entailment")
    return Entailment.from_pretrained(str(make_pair_model(labels=labels)))


@pytest.fixture(scope="module")
def cross_encoder(make_pair_model) -> CrossEncoder:
    return CrossEncoder.from_pretrained(str(make_pair_model(labels=("LABEL_0",))))
