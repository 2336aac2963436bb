"""Which answers mean the same: by words, by NLI in both directions, and the clusters that follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.errors import InputError
from semgrad_guard.estimators.equivalence import (
    F1Equivalence,
    NLIEquivalence,
    clusters,
)
from semgrad_guard.estimators.text_pairs import Entailment

TEXTS = st.lists(
    st.sampled_from(["", "Paris", "the Paris.", "Paris France", "It is Paris", "Rome", "rome"]), min_size=1
)


def test_by_words() -> None:
    pairs = [
        ("The Paris.", "paris"),
        ("Paris", "It is Paris"),
        ("New York", "New Delhi"),
        ("New York City", "New York"),
    ]
    assert F1Equivalence()(pairs, "q") == [True, False, False, True]
    assert F1Equivalence(0.25)(pairs, "q") == [True, True, True, True]
    assert [scores.entailment for scores in F1Equivalence().relations(pairs, "q")] == pytest.approx([1, 0.5, 0.5, 0.8])
    with pytest.raises(InputError):
        F1Equivalence(1.0)


def test_nli_asks_both_ways_after_the_question(make_pair_model) -> None:
    labels = ("contradiction", "neutral", "entailment")
    model = Entailment.from_pretrained(str(make_pair_model(labels=labels)))
    answers = ["Paris", "Rome", "It is Paris.", "x", "yes", "no", "42", "A long answer that says little"]
    pairs = [(first, second) for first in answers for second in answers if first < second]
    strict = NLIEquivalence(model)(pairs, "Where?")
    relations = NLIEquivalence(model).relations(pairs, "Where?")
    for (first, second), same, scores in zip(pairs, strict, relations, strict=True):
        there, back = model.probabilities(
            [(f"Where? {first}", f"Where? {second}"), (f"Where? {second}", f"Where? {first}")]
        )
        assert same == (there.entails and back.entails)
        assert scores.entailment == pytest.approx((there.entailment + back.entailment) / 2)
        assert scores.neutral == pytest.approx((there.neutral + back.neutral) / 2)
        assert scores.contradiction == pytest.approx((there.contradiction + back.contradiction) / 2)
    assert NLIEquivalence(model).relations(pairs, "When?") != relations
    assert 0 < sum(strict) < len(pairs)


@given(TEXTS, st.sampled_from([F1Equivalence(), F1Equivalence(0.25)]))
def test_clusters_one_text_after_the_other(texts: list[str], equivalence) -> None:
    heads: list[str] = []
    expected = []
    for text in texts:
        for number, head in enumerate(heads):
            if text == head or equivalence([(head, text)], "q") == [True]:
                expected.append(number)
                break
        else:
            expected.append(len(heads))
            heads.append(text)
    assert clusters(texts, "q", equivalence) == expected
