"""Each rival that samples or asks, on a real (tiny) model: what it reads, draws and asks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.options import DiverseBeams, Sampling
from semgrad_guard.engine.text_units import token_f1
from semgrad_guard.estimators import (
    SAR,
    Degree,
    Inside,
    LengthNormalisedEntropy,
    MutualInformation,
    PTrue,
    SelfConsistency,
    SemanticDensity,
    SemanticEntropy,
)
from semgrad_guard.estimators.samples import cluster_entropy
from semgrad_guard.estimators.text_pairs import CrossEncoder, Entailment, F1Equivalence, NLIEquivalence, clusters

from .test_formulas import information

SHORT = Sampling(count=5, temperature=0.8, max_tokens=4)


def test_likelihood_methods_read_their_samples(evidence) -> None:
    for row in evidence:
        samples = [sample for sample in row.samples(SHORT) if sample.ids]
        means = [np.mean(sample.log_probs) for sample in samples]
        assert LengthNormalisedEntropy(SHORT)(row).uncertainty == pytest.approx(-np.mean(means))
        embeddings = np.array([sample.embedding for sample in samples])
        eigenvalues = np.linalg.eigvalsh(np.cov(embeddings) + 1e-3 * np.eye(len(samples)))
        assert Inside(SHORT)(row).uncertainty == pytest.approx(np.log(eigenvalues).mean(), rel=1e-6)
        numbers = clusters([sample.text.strip() for sample in samples], row.question, F1Equivalence())
        by_words = SemanticEntropy(SHORT, F1Equivalence())(row).uncertainty
        assert by_words == pytest.approx(cluster_entropy(numbers, means), abs=1e-9)


def test_meaning_methods_ask_the_nli_model(evidence, nli: Entailment) -> None:
    same = NLIEquivalence(nli)
    for row in evidence:
        texts = [sample.text.strip() for sample in row.samples(SHORT)]

        def both_ways(first: str, second: str, question: str = row.question):
            pair = f"{question} {first}", f"{question} {second}"
            return nli.probabilities([pair, pair[::-1]])

        def agrees(first: str, second: str, ask=both_ways) -> bool:
            return first == second or all(scores.entails for scores in ask(first, second))

        def entailment(first: str, second: str, ask=both_ways) -> float:
            return 1.0 if first == second else sum(scores.entailment for scores in ask(first, second)) / 2

        expected = np.mean([not agrees(row.text.strip(), text) for text in texts])
        assert SelfConsistency(SHORT, same)(row).uncertainty == pytest.approx(expected)
        matrix = [[entailment(first, second) for second in texts] for first in texts]
        assert Degree(SHORT, same)(row).uncertainty == pytest.approx(1 - np.mean(matrix))


def test_semantic_density_weighs_its_references(evidence, nli: Entailment) -> None:
    plan = DiverseBeams(count=4, penalty=1.0, max_tokens=5)
    for row in evidence:
        above = below = 0.0
        for text, sample in {s.text.strip(): s for s in row.samples(plan, temperature=0.1) if s.ids}.items():
            pair = f"{row.question} {row.text.strip()}", f"{row.question} {text}"
            there, back = nli.probabilities([pair, pair[::-1]])
            distance = sum(0.5 * (scores.contradiction + scores.neutral / 2) for scores in (there, back))
            weight = math.exp(np.mean(sample.log_probs))
            above += weight * (1.0 if text == row.text.strip() else max(0.0, 1 - distance))
            below += weight
        found = SemanticDensity(plan, NLIEquivalence(nli))(row).uncertainty
        assert found == pytest.approx(1 - above / below, abs=1e-9)


def test_sar_leaves_each_token_out(evidence, cross_encoder: CrossEncoder, language_model: LanguageModel) -> None:
    row, g = evidence[0], cross_encoder.similarities
    samples = [sample for sample in row.samples(SHORT) if sample.ids]
    texts = [f"{row.question} {sample.text.strip()}" for sample in samples]
    p = []
    for sample, whole in zip(samples, texts, strict=True):
        cropped = [sample.ids[:i] + sample.ids[i + 1 :] for i in range(len(sample.ids))]
        rest = [f"{row.question} {language_model.decode(ids).strip()}" for ids in cropped]
        relevance = 1 - np.array(g([(whole, text) for text in rest]))
        p.append(math.exp((relevance / relevance.sum() * np.array(sample.log_probs)).sum()))
    energies = []
    for j, one in enumerate(texts):
        # Asked for in one direction only: a cross-encoder is nearly symmetric.
        alike = [1.0 if texts[k] == one else g([(texts[max(j, k)], texts[min(j, k)])])[0] for k in range(len(texts))]
        energies.append(-math.log(p[j] + sum(alike[k] * p[k] for k in range(len(p)) if k != j) / 1e-3))
    assert SAR(SHORT, cross_encoder)(row).uncertainty == pytest.approx(np.mean(energies), rel=1e-5)


def likelihood(model: LanguageModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    with torch.no_grad():
        log_p = model._model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return sum(float(log_p[i, token]) for i, token in enumerate(answer))


@pytest.mark.parametrize(("template", "blank"), [({}, ""), ({"chat_template": None}, " ")], ids=["chat", "plain"])
def test_p_true_asks_through_the_template(make_language_model, template: dict[str, None], blank: str) -> None:
    """A blank comes before the word where the prompt ends in no white space."""
    model = make_language_model(**template)
    row = model.generate("q", GenerationOptions(max_tokens=3)).evidence
    prompt = model.render(
        f"Question: q\nProposed Answer: {row.text.strip()}\nIs the proposed answer:\n (A) True\n (B) False\n"
        "The proposed answer is:"
    )
    forms = ("True", "(A)", "False", "(B)")
    p = [math.exp(likelihood(model, prompt.ids, model.tokenizer(blank + form)["input_ids"])) for form in forms]
    assert PTrue()(row).uncertainty == pytest.approx(sum(p[2:]) / sum(p))


def test_mutual_information_puts_the_first_answer_into_the_prompt(evidence, language_model: LanguageModel) -> None:
    plan = Sampling(count=6, temperature=0.3, max_tokens=4)
    row = evidence[1]
    samples = {s.text.strip(): s for s in reversed([s for s in row.samples(plan) if s.ids])}
    order = list(dict.fromkeys(s.text.strip() for s in row.samples(plan) if s.ids))
    heads: list[str] = []
    cluster_of = []
    for text in order:
        home = next((i for i, head in enumerate(heads) if token_f1(head, text) > 0.25), len(heads))
        heads += [text] if home == len(heads) else []
        cluster_of.append(home)
    assert len(heads) > 1
    second = []
    for head in heads:
        prompt = (
            f"Consider the following question:\nQ: {row.question}\nOne answer to question Q is {head}.\n"
            f"Provide an answer to the following question:\nQ: {row.question}\nA:"
        )
        ids = language_model.render(prompt).ids
        second.append([likelihood(language_model, ids, samples[text].ids) for text in order])
    first = [likelihood(language_model, row.prompt.ids, samples[text].ids) for text in order]
    found = MutualInformation(plan)(row).uncertainty
    assert found == pytest.approx(information(cluster_of, first, second), rel=1e-6)
