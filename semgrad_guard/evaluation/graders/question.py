"""A question, read, and where an answer to it has a reference: its words in a row or in one sentence, a surname."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from semgrad_guard.evaluation.graders.reading import ARTICLES, MONTHS, Text, Word, read, same_word, words_of

_SMALL = """what which who whom whose when where why how is are was were do does did can could the a an of in on at to
    for by from with and or it its i you me my tell give name please there has have had be been that this these their
    his her he she they we them our us as not many much into"""
SMALL = frozenset(read(_SMALL).forms)
"""The forms of words that carry no meaning of their own."""
_OPTION = re.compile(r"(?:^|[\s(])([A-H])[).:]\s*(.+?)(?=[\s,;(]+[A-H][).:]|[.?]\s|[.?]?$)", re.DOTALL)
_CHOICE = re.compile(r"((?:[^,:?]+, )*)([^,:?]+?),? or ([^?.,]+)")
_TITLES = words_of("mr mrs miss ms dr sir lady lord president king queen saint then so and by but since because")
_PASSED_OVER = ARTICLES | words_of(
    """in on at for by to from with of and because so every up until about around under over out our my his her its
    their your"""
)
"""Words that the answer can have or lack within a reference."""
_STEM = 4

Span = tuple[int, int]


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

    def share(self, forms: Collection[str]) -> float:
        """The share of its content in a stretch of words, endings aside; 1 where it has none."""
        held = sum(any(akin(word, form) for form in forms) for word in self.content)
        return held / len(self.content) if self.content else 1.0


def akin(one: str, other: str) -> bool:
    """Equal, or two words that begin alike: "die", "died"; "Germany", "German"."""
    return one == other or (min(len(one), len(other)) >= _STEM and one[:_STEM] == other[:_STEM])


@lru_cache(maxsize=4096)
def forms_of(reference: str) -> tuple[str, ...]:
    """The forms of a reference without articles and prepositions."""
    forms = read(reference).forms
    return tuple(form for form in forms if form not in _PASSED_OVER) or forms


def mentions(question: Question, answer: Text, reference: str) -> list[Span]:
    """The stretches of the answer that have the reference; those that only repeat the question are left out."""
    name, wanted = read(reference).words, forms_of(reference)
    if not wanted:
        return []
    found = [span for span in _in_a_row(answer, wanted) if _is_same(question, answer, span, name[-1])]
    content = [form for form in wanted if form not in SMALL]
    if not found and len(content) > (1 if {*MONTHS} & {*wanted} else 2):
        found = list(_in_one_sentence(answer, content))
    if not found and len(name) > 1 and name[-1].is_capital and re.search(r"\b[Ww]h(?:o|om|ose)\b", question.text):
        found = list(_surname(answer, name))
    rest = [form for form in wanted if form not in question.content]
    if not found and 0 < len(rest) < len(wanted):  # the "Pacific", where the question is about an ocean
        found = [span for span in _in_a_row(answer, rest) if ends_a_phrase(answer, span[1])]
    initials = "".join(word.raw[0] for word in name if word.is_capital)
    if not found and len(initials) > 1:  # the "USA", "JFK"
        found = list(_in_a_row(answer, read(initials).forms))
    return [span for span in found if not _repeated(question, answer, span)]


def ends_a_phrase(answer: Text, end: int) -> bool:
    """The words before `end` are not the beginning of a longer name of something."""
    return end == len(answer.words) or bool(answer.words[end].gap.strip(" -")) or answer.forms[end] in SMALL


def _repeated(question: Question, answer: Text, span: Span) -> bool:
    """The question has these words with one of their neighbours, and offers no alternatives."""
    start, end = span
    theirs = " ".join(("", *question.words.forms, ""))
    around = (answer.forms[max(start - 1, 0) : end], answer.forms[start : end + 1])
    return not question.alternatives and any(
        " ".join(("", *part, "")) in theirs
        for part in around
        if len(part) > end - start and not ARTICLES & {part[0], part[-1]}
    )


def _in_a_row(answer: Text, wanted: Sequence[str]) -> Iterator[Span]:
    """Stretches with these words in a row, articles and prepositions aside."""
    places = [i for i, form in enumerate(answer.forms) if form not in _PASSED_OVER or form in wanted]
    for first in range(len(places) - len(wanted) + 1):
        row = places[first : first + len(wanted)]
        if all(same_word(answer.forms[i], word) for i, word in zip(row, wanted, strict=True)):
            yield row[0], row[-1] + 1


def _is_same(question: Question, answer: Text, span: Span, wanted: Word) -> bool:
    """Not another word of the same form: "us" for "US", "mouses" for "mice", "Persians" for "Persian"."""
    last = answer.words[span[1] - 1].raw
    if len(wanted.raw) <= 2 and wanted.is_capital:
        return last == wanted.raw and (last[1:].isupper() or ends_a_phrase(answer, span[1]))
    plural = last.lower().endswith("s") and not re.search(r"['’]", last) and not wanted.raw.lower().endswith("s")
    strict = wanted.is_capital or wanted.form in question.words.forms
    return not (plural and strict) and not (wanted.raw.isupper() and last.islower())


def _in_one_sentence(answer: Text, content: Sequence[str]) -> Iterator[Span]:
    """The stretch of one sentence with all of these words, in any order."""
    for first, last in answer.sentences:
        held = {i: word for i in range(first, last) for word in content if same_word(word, answer.forms[i])}
        if {*held.values()} >= {*content}:
            yield min(held), max(held) + 1


def _surname(answer: Text, name: Sequence[Word]) -> Iterator[Span]:
    """The last word of a person's name, where no other first name is before it."""
    own = {word.form for word in name if word.is_capital}
    for i, word in enumerate(answer.words):
        start = i
        while start > 0 and answer.words[start - 1].is_capital and answer.words[start].gap.strip() in ("", "."):
            start -= 1
        first = next((part.form for part in answer.words[start:i] if part.form not in _TITLES), name[0].form)
        initial = first[0] == name[0].form[0] and 1 in (len(first), len(name[0].form))
        if word.is_capital and word.form == name[-1].form and (first in own or initial):
            yield start, i + 1
