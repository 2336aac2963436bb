"""Which answers mean the same: by words, by NLI in both directions, and the clusters that follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.errors import InputError
from semgrad_guard.estimators.equivalence import F1Equivalence, clusters

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
