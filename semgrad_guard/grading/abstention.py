"""Answers that give none: "I don't know.", "The context does not say.", by the English wordings in `refusals.toml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from semgrad_guard.files import table_of

_APART = re.compile(
    r"(?<=[.!?])\s+|\n+|[;:]\s*|\s+[-–—]\s+|,?\s+(?:but|however|yet)\b,?\s+|"
    r",\s+(?=(?:it|he|she|they|the|this|that|there|i|we|none|no|so|sorry|perhaps|possibly|maybe|probably|presumably"
    r"|likely|about|around|roughly|approximately)\b)"
)
_FULL = (
    (re.compile(r"^\s*no, (?=i\b)"), ""),
    (re.compile(r"[’‘`]"), "'"),
    (re.compile(r"\b(?:cannot|can't|cant)\b"), "can not"),
    (re.compile(r"\b(?:won't|wont)\b"), "will not"),
    (re.compile(r"\b(do|does|did|is|are|was|were|could|would|have|has|had|should)n't\b"), r"\1 not"),
    (re.compile(r"\b(do|does|did|is|was|are|could|would|have|has)nt\b"), r"\1 not"),
    (re.compile(r"\bi'?m\b"), "i am"),
    (re.compile(r"\b(i|we|it|that)'ll\b"), r"\1 will"),
    (re.compile(r"\b(there|it|that|what)'s\b"), r"\1 is"),
    (re.compile(r"\b(i|we|you|they)'ve\b"), r"\1 have"),
    (re.compile(r"\b(i|we|you|they)'d\b"), r"\1 would"),
    (re.compile(r"\b(we|you|they)'re\b"), r"\1 are"),
)
"""Short forms, written out; "No, I don't know." says no more than the rest of it."""


def abstains(text: str, own: tuple[str, ...] = ()) -> bool:
    """Whether a text gives no answer, and claims none: "I don't know, perhaps Paris" claims one.

    `own` are further beginnings of clauses that give none, in any language; then clauses end at commas, too.
    """
    wordings, found = _wordings(), text.lower()
    if own and _begin_with(own, found):
        return True
    for short, full in _FULL:
        found = short.sub(full, found)
    clauses = [clause for part in _APART.split(found) if (clause := _plain(part))]
    refusing = [
        bool(wordings["refusal"].match(_opened(clause, wordings["opening"]))) and not wordings["claim"].match(clause)
        for clause in clauses
    ]
    return any(refusing) and all(
        refuses or wordings["aside"].match(clause) for refuses, clause in zip(refusing, clauses, strict=True)
    )


def _begin_with(own: tuple[str, ...], text: str) -> bool:
    """Every clause of a text begins with one of these words."""
    beginnings = tuple(plain for phrase in own if (plain := _plain(phrase.lower())))
    clauses = [clause for part in re.split(r"[.,;:!?。，、！？\n]+", text) if (clause := _plain(part))]
    return bool(clauses) and all(any(_begins(clause, words) for words in beginnings) for clause in clauses)


def _begins(clause: str, words: str) -> bool:
    """Whole words: "na" does not begin "Narnia"; scripts without spaces have no small letters."""
    return clause.startswith(words) and not clause[len(words) :][:1].islower()


@cache
def _wordings() -> Mapping[str, re.Pattern[str]]:
    """How clauses begin that give no answer, open such a one, or are an aside."""
    data = table_of("semgrad_guard.grading", "refusals.toml")
    words: dict[str, str] = {}

    def filled(pattern: str) -> str:
        return re.sub(r"<(\w+)>", lambda name: words[name[1]], pattern.replace("\n", ""))

    for name, pattern in data["words"].items():
        words[name] = f"(?:{filled(pattern)})"
    return {name: re.compile("|".join(map(filled, patterns))) for name, patterns in data["clauses"].items()}


def _plain(clause: str) -> str:
    return " ".join(re.sub(r"[^\w\s'/-]", " ", clause).split()).strip("-' ")


def _opened(clause: str, opening: re.Pattern[str]) -> str:
    """A clause without the words before its matter."""
    while (found := opening.match(clause)) and found.end() < len(clause):
        clause = clause[found.end() :]
    return clause
