"""A question, read: its words that carry meaning, and the alternatives that it offers."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache

from semgrad_guard.evaluation.graders.reading import ARTICLES, Text, read, words_of

_SMALL = """what which who whom whose when where why how is are was were do does did can could the a an of in on at to
    for by from with and or it its i you me my tell give name please there has have had be been that this these their
    his her he she they we them our us as not many much into"""
SMALL = frozenset(read(_SMALL).forms)
"""The forms of words that carry no meaning of their own."""
_LEADING = words_of(
    """in on at for by to from with of because so every up until about around under over out our my his her its their
    your"""
)
_PERSON = re.compile(r"\b(?:[Ww]h(?:o|om|ose)|[Ww]hich (?:person|author|writer|artist|composer|scientist|president))\b")
_SEVERAL = re.compile(r"^\W*(?:name|list|give)\b|\b(?:example|can you (?:name|tell me an?|give))\b", re.IGNORECASE)
_OPTION = re.compile(r"(?:^|[\s(])([A-H])[).:]\s*(.+?)(?=[\s,;(]+[A-H][).:]|[.?]\s|[.?]?$)", re.DOTALL)
_CHOICE = re.compile(r"((?:[^,:?]+, )*)([^,:?]+?),? or ([^?.,]+)")
_STEM = 4


@dataclass(frozen=True)
class Question:
    """A question's text."""

    text: str

    @cached_property
    def options(self) -> dict[str, str]:
        """The lettered options: "A) Madrid B) Rome"."""
        found = {letter: text.strip(" ,;()") for letter, text in _OPTION.findall(self.text)}
        return found if len(found) > 1 and "A" in found else {}

    @cached_property
    def words(self) -> Text:
        """Its words, without lettered options."""
        return read(_OPTION.sub(" ", self.text) if self.options else self.text)

    @cached_property
    def alternatives(self) -> list[tuple[str, ...]]:
        """The forms of the alternatives that it offers: "Jupiter or Mars", "apple, carrot or pear", or its options."""
        if self.options:
            return [forms_of(option) for option in self.options.values()]
        found = _CHOICE.search(self.text)
        if found is None:
            return []
        last = forms_of(found[3])
        before = [part for part in found[1].split(", ") if part and not re.match(r"(?i)(?:\w+ )?wh|how", part)]
        return [last, *(forms_of(part)[-len(last) :] for part in (*before, found[2]))]

    @cached_property
    def content(self) -> frozenset[str]:
        """The forms of its words that carry meaning, without those of its alternatives."""
        return frozenset(self.words.forms).difference(SMALL, *self.alternatives)

    @property
    def is_about_a_person(self) -> bool:
        """The answer is a person."""
        return bool(_PERSON.search(self.text))

    @property
    def wants_several(self) -> bool:
        """The answer is a list, or any one of several."""
        return bool(_SEVERAL.search(self.text))

    def held(self, forms: Collection[str]) -> int:
        """How many words of its content a stretch of words has, endings aside."""
        return sum(any(akin(word, form) for form in forms) for word in self.content)

    def share(self, forms: Collection[str]) -> float:
        """The share of its content in a stretch of words; 1 where it has none."""
        return self.held(forms) / len(self.content) if self.content else 1.0


def akin(one: str, other: str) -> bool:
    """Equal, or two words that begin alike: "die", "died"; "Germany", "German"."""
    return one == other or (min(len(one), len(other)) >= _STEM and one[:_STEM] == other[:_STEM])


@lru_cache(maxsize=4096)
def forms_of(reference: str) -> tuple[str, ...]:
    """The forms of a reference without articles, and without a preposition before the rest."""
    forms = [form for form in read(reference).forms if form not in ARTICLES]
    while len(forms) > 1 and forms[0] in _LEADING:
        forms = forms[1:]
    return tuple(forms) or read(reference).forms
