"""M.I.: the formula against one written with dictionaries, and what it puts into the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard import LanguageModel
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.engine.words import token_f1
from semgrad_guard.estimators import MutualInformation
from semgrad_guard.estimators.reading import mutual_information

LOG_PROBS = st.floats(-30, 0)


def information(cluster_of: Sequence[int], first: Sequence[float], second: Sequence[Sequence[float]]) -> float:
    """Algorithm 3, line by line, over dictionaries."""
    S = sorted(set(cluster_of))
    D = {i: [j for j, number in enumerate(cluster_of) if number == i] for i in S}
    mu1 = {i: sum(math.exp(first[j]) for j in D[i]) for i in S}
    mu2 = {(t, i): sum(math.exp(second[i][j]) for j in D[t]) for t in S for i in S}
    Z = sum(mu1.values())
    Zi = {i: sum(mu2[j, i] for j in S) for i in S}
    p1 = {i: mu1[i] / Z for i in S}
    p2 = {(t, i): mu2[t, i] / Zi[i] for t in S for i in S}
    total = 0.0
    for i in S:
        for t in S:
            joint = p1[i] * p2[t, i]
            product = p1[i] * sum(p1[j] * p2[t, j] for j in S)
            total += joint * math.log(joint / product) if joint else 0.0
    return total


@given(st.data())
def test_mutual_information(data: st.DataObject) -> None:
    clusters = [0, 1, *data.draw(st.lists(st.integers(0, 2).map(lambda n: min(n, 1)), max_size=3)), 2]
    row = st.lists(LOG_PROBS, min_size=len(clusters), max_size=len(clusters))
    first, second = data.draw(row), data.draw(st.lists(row, min_size=3, max_size=3))
    found = mutual_information(clusters, np.array(first), np.array(second))
    assert found == pytest.approx(information(clusters, first, second), abs=1e-9)
    assert -1e-9 <= found <= math.log(3) + 1e-9


def test_mutual_information_at_its_ends() -> None:
    even = np.log([0.5, 0.5])
    # The second answer is the same whatever the first: nothing is learnt.
    assert mutual_information([0, 1], even, np.log([[0.3, 0.7], [0.3, 0.7]])) == pytest.approx(0.0, abs=1e-12)
    # The second answer repeats the first: all of its entropy.
    repeats = np.array([[0.0, -800.0], [-800.0, 0.0]])
    assert mutual_information([0, 1], even, repeats) == pytest.approx(math.log(2))
    # By hand: joint (.45, .05; .25, .25), second marginal (.7, .3)
    expected = 0.45 * math.log(0.45 / 0.35) + 0.05 * math.log(0.05 / 0.15) + 0.25 * math.log(0.25 / 0.35)
    expected += 0.25 * math.log(0.25 / 0.15)
    found = mutual_information([0, 1], even, np.log([[0.9, 0.1], [0.5, 0.5]]))
    assert found == pytest.approx(expected)


def likelihood(model: LanguageModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    with torch.no_grad():
        log_p = model._model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return sum(float(log_p[i, token]) for i, token in enumerate(answer))


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
