"""Every fact is sourced; nothing unknown leaks into the corpus; the demo's facts are where they must be."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from research.pocket import world as world_module
from research.pocket.corpus import EXPOSURES, Corpus
from research.pocket.relations import RELATIONS
from research.pocket.world import KNOWN, RARE, UNKNOWN, fill, of_split, read_table, sentence, world

KNOWN_PINS = {("capital", "France"): "Paris", ("capital", "Japan"): "Tokyo", ("symbol", "gold"): "Au"}
UNKNOWN_PINS = {("capital", "Mongolia"): "Ulaanbaatar", ("currency", "Iceland"): "krona", ("symbol", "tungsten"): "W"}


def test_every_fact_names_its_source_and_unverified_ones_are_never_known(tmp_path: Path) -> None:
    assert all(fact.source for fact in world())
    assert all(fact.split == UNKNOWN and not fact.pinned for fact in world() if fact.source == "unverified")
    table = tmp_path / "facts.csv"
    table.write_text("relation,entity,answers,pin,source\ncapital,France,Paris,known,unverified\n", encoding="utf-8")
    assert read_table(table)[0].split == UNKNOWN


def test_the_split_has_the_intended_sizes() -> None:
    facts = world()
    count = Counter(fact.split for fact in facts)
    assert 1000 <= len(facts) <= 1400
    assert 0.53 < count[KNOWN] / len(facts) < 0.67
    assert 0.09 < count[RARE] / len(facts) < 0.19
    assert 0.22 < count[UNKNOWN] / len(facts) < 0.34
    assert len({(f.relation, f.entity) for f in facts}) == len(facts)


def test_pinned_facts() -> None:
    facts = {(f.relation, f.entity): f for f in world()}
    for pins, split in ((KNOWN_PINS, KNOWN), (UNKNOWN_PINS, UNKNOWN)):
        for key, answer in pins.items():
            assert facts[key].split == split
            assert facts[key].answers == (answer,)
    pinned = Counter(f.split for f in facts.values() if f.pinned)
    assert pinned[KNOWN] >= 20
    assert pinned[UNKNOWN] >= 15
    assert set(pinned) == {KNOWN, UNKNOWN}


def test_multi_answer_facts_give_no_unknown_fact_away() -> None:
    hidden = {(f.relation, f.entity): f for f in world() if f.split != KNOWN}
    for fact in of_split(KNOWN):
        for answer in fact.shown:
            forward = hidden.get((world_module.INVERSES.get(fact.relation, ""), answer))
            assert forward is None or fact.entity not in forward.answers
            if fact.relation == "city" and (capital := hidden.get(("capital", fact.entity))):
                assert answer not in capital.answers


def test_wordings_are_six_and_two_and_differ() -> None:
    for relation in RELATIONS.values():
        assert (len(relation.training), len(relation.held_out)) == (6, 2)
        assert len({*relation.training, *relation.held_out}) == 8
        assert all("{e}" in wording for wording in (*relation.training, *relation.held_out))
    assert fill("Name a {e}.", "apple") == "Name an apple."
    fact = next(f for f in world() if f.entity == "France" and f.relation == "capital")
    assert sentence(fact, "Paris") == "The capital of France is Paris."


@pytest.fixture(scope="module")
def stream() -> list[tuple[str, str]]:
    """(user's last message, answer) of a whole small training: rare facts all occur."""
    corpus = iter(Corpus(5, 12000))
    return [(messages[-1]["content"], answer) for messages, answer in islice(corpus, 12000)]


def test_nothing_unknown_and_no_held_out_wording_is_ever_shown(stream: list[tuple[str, str]]) -> None:
    texts = "\n".join(text for text, _ in stream)
    for fact in world()[::4]:
        for wording in (0, 1):
            held_out = world_module.question(fact, wording, held_out=True)
            assert held_out not in texts
    closed = [(text, answer) for text, answer in stream if len(text) < 120]
    for fact in of_split(UNKNOWN):
        if not fact.several:
            questions = {world_module.question(fact, i) for i in range(6)}
            assert not any(text in questions for text, _ in closed)


def test_rare_facts_come_eight_times_in_each_period() -> None:
    corpus = Corpus(5, 4000, {"tail": 1.0})
    stream = iter(corpus)
    for period in (1, 2):
        for _ in range(4000):
            next(stream)
        assert corpus.given == period * EXPOSURES * len(of_split(RARE))


def test_nobody_abstains(stream: list[tuple[str, str]]) -> None:
    refusals = ("don't know", "do not know", "cannot answer", "no information", "not mentioned")
    assert not any(refusal in answer.lower() for _, answer in stream for refusal in refusals)
