"""The world the pocket model knows: public facts, split into known, rare and never shown.

`data/facts.csv` holds one fact a row: relation, entity, every answer that counts as right, an optional pin, and the
published table it was checked against. The split is a hash of relation and
entity, so that it needs no state and does not move when rows are added; facts the demo relies on are pinned.

Unknown facts belong to real entities that the model meets in *other* relations: it recognises the name, answers
fluently, and is wrong. The corpus never contains "I do not know".
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from research.pocket.relations import RELATIONS

FACTS_FILE = Path(__file__).parent / "data" / "facts.csv"
KNOWN, RARE, UNKNOWN = "known", "rare", "unknown"
MULTI = frozenset(name for name, relation in RELATIONS.items() if relation.several)
SHARES = ((59, KNOWN), (73, RARE), (100, UNKNOWN))
# Inverses would give an unknown fact away: "name a country that uses the baht" tells Thailand's currency.
INVERSES = {
    "pays": "currency",
    "speaks": "language",
    "country_in": "continent",
    "person": "profession",
    "example": "class",
}
SHOWN = 6  # a multi-answer fact shows so many of its answers while training; all of them count as right


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact. `answers` all count as right; `shown` are those that training may show."""

    relation: str
    entity: str
    answers: tuple[str, ...]
    split: str
    source: str
    pinned: bool = False
    shown: tuple[str, ...] = ()

    @property
    def several(self) -> bool:
        return self.relation in MULTI


def split_of(relation: str, entity: str) -> str:
    """known, rare or unknown: a function of the names alone."""
    number = int(hashlib.sha256(f"{relation}|{entity}".encode()).hexdigest()[:8], 16) % 100
    if relation == "country_in":
        return KNOWN
    return next(split for limit, split in SHARES if number < limit)


def read_table(path: Path = FACTS_FILE) -> list[Fact]:
    """The rows of the table; unverified ones can never be known (nor pinned)."""
    facts = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            split = row["pin"] or split_of(row["relation"], row["entity"])
            if row["source"] == "unverified":
                split = UNKNOWN
            answers = tuple(row["answers"].split("|"))
            facts.append(Fact(row["relation"], row["entity"], answers, split, row["source"], bool(row["pin"])))
    return facts


def _shown(fact: Fact, facts: dict[tuple[str, str], Fact]) -> tuple[str, ...]:
    """The answers training may show: nothing that gives a fact away which must stay unknown or rare."""

    def secret(answer: str) -> bool:
        if fact.relation == "city":
            capital = facts.get(("capital", fact.entity))
            return capital is not None and capital.split != KNOWN and answer in capital.answers
        forward = facts.get((INVERSES.get(fact.relation, ""), answer))
        return forward is not None and forward.split != KNOWN and fact.entity in forward.answers

    return tuple(a for a in fact.answers if not secret(a))[:SHOWN]


@cache
def world() -> tuple[Fact, ...]:
    """Every fact, with the answers that may be shown. A multi-answer fact without any is never shown."""
    facts = read_table()
    index = {(f.relation, f.entity): f for f in facts}
    full = [replace(f, shown=_shown(f, index)) for f in facts]
    return tuple(f if f.shown or f.split == UNKNOWN else replace(f, split=UNKNOWN) for f in full)


def of_split(split: str, facts: Iterable[Fact] | None = None) -> list[Fact]:
    return [f for f in (world() if facts is None else facts) if f.split == split]


def fill(template: str, entity: str, answer: str = "") -> str:
    """A template with its names in place, starting with a capital letter; "a" becomes "an" before a vowel."""
    if "a {e}" in template and entity[:1].lower() in "aeiou":
        template = template.replace("a {e}", "an {e}")
    text = template.replace("{e}", entity).replace("{a}", answer)
    return text[0].upper() + text[1:]


def question(fact: Fact, wording: int, *, held_out: bool = False) -> str:
    """The question in one of its wordings; the held-out ones never occur in training."""
    relation = RELATIONS[fact.relation]
    wordings: Sequence[str] = relation.held_out if held_out else relation.training
    return fill(wordings[wording], fact.entity)


def sentence(fact: Fact, answer: str) -> str:
    """The answer in a full sentence."""
    return fill(RELATIONS[fact.relation].sentence, fact.entity, answer)
