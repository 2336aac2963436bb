"""What an answer says beside a reference: alternatives that it offers, and other claims of the same kind."""

from __future__ import annotations

import re
from collections.abc import Sequence

from semgrad_guard.evaluation.graders.asked import Asked
from semgrad_guard.evaluation.graders.reading import ARTICLES, Reading
from semgrad_guard.evaluation.graders.word_forms import MONTHS, words_of

Span = tuple[int, int]
_COPULAS = words_of("is are was were")
_SKIPPED = ARTICLES | words_of("called named actually indeed known as probably also currently officially city town")
_DAYS = words_of("monday tuesday wednesday thursday friday saturday sunday")
_BULLET = re.compile(r"(?:^|\n)\s*[-*•] +\W*$")
_COVERED = 0.5
_FULLY = 0.99
_LISTED = 2
_BEFORE_A_NAME = words_of("of in for from at on")
_STEM = 4
_PRONOUNS = words_of("it this that he she they there which what")
_ASIDES = words_of("although though whereas while unlike followed together alongside who which and")
_CONCEDING = words_of("although though whereas while")
_CALLED = words_of("is are was were called named known has means and")
_HAS = words_of("is are was were has have had")


def offered_with_others(asked: Asked, answer: Reading, span: Span, references: Sequence[Sequence[str]]) -> bool:
    """The mention is one of several that the answer offers: "Paris or Lyon", "could be Paris, Lyon or Nice"."""
    start, end = span
    own = {word for reference in references for word in reference}
    forms = answer.forms
    after = _next(answer, end)
    if (
        end < len(forms)
        and forms[end] == "or"
        and after is not None
        and forms[after] not in own
        and not _closed(answer, end, after)
    ):
        return True
    if start > 1 and forms[_back(answer, start - 1)] == "or":
        before = _back(answer, start - 1) - 1
        if before >= 0 and forms[before] not in own and not _opened(answer, _back(answer, start - 1)):
            return True
    return _in_list_of_names(asked, answer, span, own) or _in_list_of_items(asked, answer, span)


def _in_list_of_items(asked: Asked, answer: Reading, span: Span) -> bool:
    """One item of three or more, where the question asks for no list; not a step that says what was asked."""
    items = [i for i in range(len(answer.words)) if _begins_item(answer, i)]
    ends = [*items[1:], len(answer.words)][: len(items)]
    holding = [i for i, end in zip(items, ends, strict=True) if i <= span[0] and span[1] <= end]
    if len(items) <= _LISTED or not holding or asked.wants_several:
        return False
    item = range(holding[0], dict(zip(items, ends, strict=True))[holding[0]])
    labelled = any(":" in answer.words[i].gap for i in range(holding[0] + 1, span[0] + 1))
    return not labelled and not {answer.forms[i] for i in item} & (asked.content | _COPULAS)


def _begins_item(answer: Reading, i: int) -> bool:
    """It is the number of an item ("1. ", "2) "), or the first word behind a bullet."""
    word = answer.words[i]
    opened = i == 0 or "\n" in word.gap or ":" in word.gap
    if word.is_number and answer.gap_after(i)[:2] in (". ", ") "):
        return opened
    return opened and bool(_BULLET.search(word.gap))


def _in_list_of_names(asked: Asked, answer: Reading, span: Span, own: set[str]) -> bool:
    """Two or more other names in the same list, where the question asks for one."""
    start, end = span
    if not answer.words[start].is_capital or asked.wants_several:
        return False
    others, joined = 0, False
    for step, index in ((1, end), (-1, start - 1)):
        at = index
        while 0 <= at < len(answer.words):
            word = answer.words[at]
            if word.form in ("and", "or"):
                joined = True
            elif not word.is_capital or word.form in asked.content:
                break
            else:
                edge = word.gap if step > 0 else answer.gap_after(at)
                linked = "," in edge or answer.forms[at - step] in ("and", "or")
                if edge.strip(" ,") or (not linked and at == index):
                    break
                others += int(linked and word.form not in own)
            at += step
    return joined and others >= _LISTED


def claims_another(asked: Asked, answer: Reading, references: Sequence[Sequence[str]], found: Sequence[Span]) -> bool:
    """Some sentence of the question's own words fills its place with another name: "The capital of France is Lyon."."""
    if not found or not asked.content or not any(answer.words[start].is_capital for start, _ in found):
        return False
    if answer.sentence_of[found[0][0]] == 0 and answer.words[found[0][0]].form == answer.words[found[0][0]].raw:
        return False
    own = {word for reference in references for word in reference}
    own.update(word for span in found for word in answer.forms[slice(*span)] if not _akin(word, asked))
    at = 0
    while at < len(answer.words):
        start, end = answer.sentence(at)
        at = end
        if _names_another(asked, answer, start, end, own) or _another_is_it(asked, answer, start, end, own):
            return True
    return False


def _another_is_it(asked: Asked, answer: Reading, start: int, end: int, own: set[str]) -> bool:
    """The other way round: "Lyon is the capital of France"."""
    copula = next((i for i in range(start + 1, min(start + 5, end)) if answer.forms[i] in _COPULAS), None)
    if copula is None:
        return False
    subject = answer.words[start:copula]
    stop = next((i for i in range(copula + 1, end) if "," in answer.words[i].gap), end)
    rest = set(answer.forms[copula + 1 : stop])
    named = all(word.is_capital for word in subject) and not {word.form for word in subject} & (
        own | asked.content | _PRONOUNS
    )
    return named and len(rest & asked.content) >= _FULLY * len(asked.content)


def _names_another(asked: Asked, answer: Reading, start: int, end: int, own: set[str]) -> bool:
    for copula in (i for i in range(start + 1, end) if answer.forms[i] in _COPULAS):
        subject = set(answer.forms[start:copula])
        if len(subject & asked.content) < _COVERED * len(asked.content) or len(asked.content) < 1:
            continue
        place = next((i for i in range(copula + 1, end) if answer.forms[i] not in _SKIPPED), end)
        if place == end or not answer.words[place].is_capital or own & set(answer.forms[place:end]):
            return False
        name = answer.forms[place]
        return name not in asked.content and not subject & own and not _of_another(asked, answer, start, copula)
    return False


def _of_another(asked: Asked, answer: Reading, start: int, copula: int) -> bool:
    """The subject has a name that the question has not: "The capital of Austria is Vienna", asked about Switzerland."""
    asked_names = {word.form for word in asked.reading.words[1:] if word.is_capital}
    said = {
        answer.forms[i]
        for i in range(start + 1, copula)
        if answer.words[i].is_capital and answer.forms[i - 1] in _BEFORE_A_NAME
    }
    return bool(said - asked.content) and bool(asked_names) and not said & asked_names


def said_aside(asked: Asked, answer: Reading, span: Span) -> bool:
    """The sentence answers with another, and this stands in an aside: "It is the liver, which lies under the skin"."""
    first, last = answer.sentence(span[0])
    aside = next((i for i in range(span[0] - 1, first, -1) if "," in answer.words[i].gap), first)
    opener, between = answer.forms[aside], answer.forms[aside + 1 : span[0]]
    if aside == first or opener not in _ASIDES or any(_akin(word, asked) for word in between):
        return False
    if opener in ("who", "which") and (
        not between or between[0] in _CALLED or answer.forms[aside - 1] in asked.content  # of whom it was asked
    ):
        return False
    if opener == "and" and (set(between) - ARTICLES or span[1] >= last or answer.forms[span[1]] not in _HAS):
        return False
    copula = next((i for i in range(first + 1, aside) if answer.forms[i] in _COPULAS), None)
    behind = next((i for i in range(span[1], last) if "," in answer.words[i].gap), last)
    main = set(answer.forms[first:aside]) | set(answer.forms[behind:last] if copula is None else ())
    needed = 1 if opener in _CONCEDING else _COVERED * len(asked.content)
    if not asked.content or len(main & asked.content) < needed:
        return False
    if copula is None:
        return all(word.is_capital for word in answer.words[first:aside]) and bool(
            set(answer.forms[behind:]) & _COPULAS
        )
    place = answer.words[copula + 1 : aside]
    return bool(place) and place[0].form not in ("a", "an") and not {word.form for word in place} <= asked.content


def _akin(word: str, asked: Asked) -> bool:
    """A word of the question, perhaps with another ending."""
    return any(
        word == other or (len(word) > _STEM <= len(other) and word[:_STEM] == other[:_STEM]) for other in asked.content
    )


def other_of_its_kind(answer: Reading, said: Span, wanted: Sequence[str]) -> bool:
    """A day of the week or a month before it: the first is what the answer says."""
    kind = next((each for each in (_DAYS, MONTHS) if set(wanted) <= each), None)
    return kind is not None and any(form in kind and form not in wanted for form in answer.forms[: said[0]])


def _next(answer: Reading, at: int) -> int | None:
    return next((i for i in range(at + 1, len(answer.words)) if answer.forms[i] not in ARTICLES), None)


def _back(answer: Reading, at: int) -> int:
    return at - 1 if at > 0 and answer.forms[at] in ARTICLES else at


def _closed(answer: Reading, conjunction: int, after: int) -> bool:
    """An apposition between commas: "carbonic acid gas, or carbon dioxide,"."""
    return "," in answer.words[conjunction].gap and any(
        "," in answer.gap_after(i) for i in range(after, min(after + 3, len(answer.words)))
    )


def _opened(answer: Reading, conjunction: int) -> bool:
    return "," in answer.words[conjunction].gap or "(" in answer.words[conjunction].gap
