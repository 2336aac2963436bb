"""The benchmarks' own arithmetic: ratios, the ways that they compare, and grades about countries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from semgrad_guard.engine.scores.tape import Memory

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scoring
from countries import COUNTRIES, TOPICS, countries, facts_in_passage, is_right, known_facts, other_of, passage
from shapes import Setting

CONFIG = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "vocab_size": 2100,
}


class TestRatios:
    def test_are_taken_round_by_round(self) -> None:
        seconds = {
            "plain": [9.0, 18.0, 9.0],
            "first_token": [2.0, 4.0, 2.0],
            "written": [1.0, 6.0, 3.0],
        }
        found = scoring.ratios(seconds, Setting(60, 8))
        assert found["share_of_plain"]["written"] == pytest.approx([1 / 3, 1 / 9, 1 / 3])
        assert found["decode_steps"] == pytest.approx([3, 1, 3])  # steps of 1, 2 and 1 seconds

    def test_one_token_has_no_decode_step(self) -> None:
        seconds = {"plain": [1.0], "first_token": [1.0], "written": [0.5]}
        assert "decode_steps" not in scoring.ratios(seconds, Setting(60, 1))


def test_the_frugal_way_says_the_same_and_leaves_the_budgets_alone() -> None:
    torch.manual_seed(0)
    bench = scoring.Bench(Qwen2ForCausalLM(Qwen2Config(**CONFIG)).eval(), Setting(9, 4, 2))
    usual = bench.written()
    bench.capturing()
    assert bench.frugal() == [pytest.approx(scores, rel=1e-4) for scores in usual]
    assert bench.scorer.memory == Memory()
    assert scoring.difference(usual, usual) == 0


# The grades of the benchmark about countries, by sentences that a model wrote.

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
