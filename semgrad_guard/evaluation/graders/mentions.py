"""Where an answer has a reference: its words in a row or in one sentence, a surname, initials, the ends of a range."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from semgrad_guard.evaluation.graders.question import SMALL, Question, forms_of
from semgrad_guard.evaluation.graders.reading import ARTICLES, MONTHS, Text, Word, read, same_word, words_of

Span = tuple[int, int]
_TITLES = words_of("mr mrs miss ms dr sir lady lord president king queen saint then so and by but since because")
_MANY, _MOST, _RANGE, _ENDS, _SYMBOL = 6, 0.75, 9, 2, 2


def mentions(question: Question, answer: Text, reference: str) -> list[Span]:
    """The stretches of the answer that have the reference; those that only repeat the question are left out."""
    wanted, name = forms_of(reference), read(reference).words
    if not wanted:
        return []
    last = name[-1]
    found = [span for span in _in_a_row(answer, wanted) if _is_same(question, answer, span, last)]
    content = [form for form in wanted if form not in SMALL]
    if not found and len(content) > (1 if {"and", "or", *MONTHS} & {*wanted} else 2):
        found = list(_in_one_sentence(answer, content))
    if not found and question.is_about_a_person and len(name) > 1 and last.is_capital:
        found = list(_surname(answer, name))
    rest = [form for form in wanted if form not in question.content]
    if not found and 0 < len(rest) < len(wanted):  # the "Pacific", where the question is about an ocean
        spans = _in_a_row(answer, rest)
        found = [
            s for s in spans if (answer.words[s[0]].is_capital if last.is_capital else ends_a_phrase(answer, s[1]))
        ]
    found = found or list(_initials(answer, name)) or list(_from_to(answer, name))
    return [span for span in found if not repeated(question, answer, span)]


def ends_a_phrase(answer: Text, end: int) -> bool:
    """The words before `end` are not the beginning of a longer name of something."""
    return end == len(answer.words) or bool(answer.words[end].gap.strip(" -")) or answer.forms[end] in SMALL


def repeated(question: Question, answer: Text, span: Span) -> bool:
    """The question has these words with one of their neighbours; not where it offers them as an alternative."""
    start, end = span
    forms, size = question.words.forms, end - start + 1
    theirs = {forms[i : i + size] for i in range(len(forms) - size + 1)}
    mine = [answer.forms[start - 1 : end]] * (start > 0) + [answer.forms[start : end + 1]] * (end < len(answer.forms))
    offered = any({*answer.forms[start:end]} <= {*option} for option in question.alternatives)
    return not offered and any(part in theirs and not ARTICLES & {part[0], part[-1]} for part in mine)


def _in_a_row(answer: Text, wanted: Sequence[str]) -> Iterator[Span]:
    """Stretches with these words in a row, articles aside."""
    places = [i for i, form in enumerate(answer.forms) if form not in ARTICLES or form in wanted]
    for first in range(len(places) - len(wanted) + 1):
        row = places[first : first + len(wanted)]
        if all(same_word(answer.forms[i], word) for i, word in zip(row, wanted, strict=True)):
            yield row[0], row[-1] + 1


def _is_same(question: Question, answer: Text, span: Span, wanted: Word) -> bool:
    """Not another word of the same form: "us" for "US", "mouses" for "mice", "Persians" for "Persian"."""
    last = answer.words[span[1] - 1].raw
    if len(wanted.raw) <= _SYMBOL and wanted.is_capital:
        return last == wanted.raw and (last[1:].isupper() or ends_a_phrase(answer, span[1]))
    plural = last.lower().endswith("s") and not re.search(r"['’]", last) and not wanted.raw.lower().endswith("s")
    strict = wanted.is_capital or wanted.form in question.words.forms
    return not (plural and strict) and not (wanted.raw.isupper() and last.islower())


def _in_one_sentence(answer: Text, content: Sequence[str]) -> Iterator[Span]:
    """A stretch of one sentence with all of these words, in any order; of six and more, with three quarters."""
    needed = len(content) if len(content) < _MANY else round(_MOST * len(content))
    for start in range(len(answer.forms)):
        last = min(answer.sentence(start)[1], start + 3 * len(content) + 2)
        held = {i: word for i in range(start, last) for word in content if same_word(word, answer.forms[i])}
        if start in held and len({*held.values()}) >= needed:
            yield start, max(held) + 1
            return


def _surname(answer: Text, name: Sequence[Word]) -> Iterator[Span]:
    """The last word of a person's name, where no other first name is before it."""
    own = {word.form for word in name if word.is_capital}
    for i, word in enumerate(answer.words):
        if not (word.is_capital and word.form == name[-1].form):
            continue
        start = i
        while start > 0 and answer.words[start - 1].is_capital and answer.words[start].gap.strip() in ("", "."):
            start -= 1
        given = [part for part in answer.words[start:i] if part.form not in _TITLES]
        initial = bool(given) and given[0].form[0] == name[0].form[0] and 1 in (len(given[0].raw), len(name[0].raw))
        if not given or initial or own & {part.form for part in given if len(part.raw) > 1}:
            yield start, i + 1


def _initials(answer: Text, name: Sequence[Word]) -> Iterator[Span]:
    """The "USA" for the United States, "JFK" for John F. Kennedy."""
    initials = "".join(word.raw[0] for word in name if word.is_capital)
    wanted = read(initials).forms if len(initials) > 1 else ()
    yield from ((i, i + 1) for i, word in enumerate(answer.words) if word.raw.isupper() and (word.form,) == wanted)


def _from_to(answer: Text, name: Sequence[Word]) -> Iterator[Span]:
    """The two ends of a range in one sentence, in any words: "from 1939 to 1945", "begun 1939, ended 1945"."""
    ends = [word.form for word in name if word.is_number]
    other = {word.form for word in name if not word.is_number} - SMALL
    numbers = [i for i, word in enumerate(answer.words) if word.is_number and len(word.form) in map(len, ends)]
    for start, end in pairwise(numbers if len(ends) == _ENDS else ()):
        near = answer.sentence(start) == answer.sentence(end) and end - start < _RANGE
        apart = {"or", "not"} & {*answer.forms[start:end]} or not other <= {*answer.forms[end:]}
        if [answer.forms[start], answer.forms[end]] == ends and near and not apart:
            yield start - (answer.forms[start - 1] == "between"), end + 1
