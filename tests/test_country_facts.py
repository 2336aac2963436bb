"""The grades of the benchmark about countries, by sentences that a model wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from countries import COUNTRIES, TOPICS, countries, facts_in_passage, is_right, known_facts, other_of, passage

KNOWN = known_facts()


@pytest.mark.parametrize(
    ("country", "sentence", "right"),
    [
        ("Colombia", "The capital of Colombia is Bogotá.", True),
        ("Norway", "The currency of Norway is the kroner.", True),
        ("Nepal", "Nepal lies in South Asia.", True),
        ("Saudi Arabia", "Saudi Arabia lies in North Africa.", False),
        ("Tunisia", "The official language of Tunisia is Tunisian.", False),
        ("Chad", "The capital of Chad is Chad.", False),
        ("Peru", "The capital of Chile is Santiago.", False),
        ("Liberia", "Liberia is a country in West Africa.", False),
    ],
)
def test_a_recalled_sentence_is_graded_by_the_table(country: str, sentence: str, right: bool) -> None:
    assert is_right(sentence, country, "recalled", KNOWN) is right


def test_a_sentence_from_a_passage_has_to_follow_from_it() -> None:
    missing = next(topic for topic in TOPICS if topic not in facts_in_passage("Peru"))
    other = other_of("Peru", KNOWN)
    assert KNOWN["Peru"][facts_in_passage("Peru")[0]][0] in passage("Peru", KNOWN)
    true = {
        "capital": "The capital of Peru is Lima.",
        "continent": "Peru lies in South America.",
        "language": "The official language of Peru is Spanish.",
        "currency": "The currency of Peru is the sol.",
    }
    assert {topic: is_right(text, "Peru", "read", KNOWN) for topic, text in true.items()} == {
        topic: topic != missing for topic in TOPICS
    }
    assert is_right(f"The capital of {other} is {KNOWN[other]['capital'][0]}.", "Peru", "read", KNOWN) is (
        "capital" in facts_in_passage(other)[:2]
    )


def test_the_countries_are_as_many_as_their_answers() -> None:
    assert len(countries(KNOWN)) == len(set(countries(KNOWN))) == COUNTRIES
