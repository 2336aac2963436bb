"""The reference in the answer, asserted: a grader by words for models that answer in sentences.

Chat models put the answer into a sentence ("The capital of Mongolia is Ulaanbaatar, which ..."), where equal or shared
words miss it. An answer is right if one sentence about the question asserts a reference, wrong if it has none or denies
it, and without a verdict where this grader would have to guess.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from semgrad_guard.engine.texts.words import normalise
from semgrad_guard.evaluation.graders.assertion import affirms, stance
from semgrad_guard.evaluation.graders.base import AnswerToGrade, WordGrader
from semgrad_guard.evaluation.graders.mentions import Span, ends_a_phrase, mentions
from semgrad_guard.evaluation.graders.quantity import gives_quantity, whole_quantity
from semgrad_guard.evaluation.graders.question import SMALL, Question, akin, forms_of
from semgrad_guard.evaluation.graders.reading import ARTICLES, Text, read, words_of

_YES, _NO = ("yes", "true"), ("no", "false")
_COPULAS = words_of("is are was were has had")
_PRONOUNS = words_of("it this he she they there answer these those his her their its")
_ASIDES = words_of("unlike followed together alongside which who and as with since when")
_PREFERRING = words_of("than not but though although followed")
_LIST = re.compile(r"(?:,(?: and| or)? [A-Z][\w' -]*?)+,? (?:and|or) [A-Z]")
_ITEM = re.compile(r"(?:^|\n|:)\s*[-*•] +\W*$")
_COVERED, _HALF, _TWO, _NEAR, _SHORT, _ITEMS = 0.25, 0.5, 2, 3, 5, 3


@dataclass(frozen=True)
class Contains(WordGrader):
    """Right is an answer of which one sentence asserts a reference; the rest of it is not checked.

    Words count under one form: case, diacritics, plurals, articles, numbers in words or digits, units. A reference that
    is denied, only compared with or only repeated from the question is wrong. There is no verdict where it is doubted,
    one of several offered, an aside, or in a sentence about something else. How often it errs: docs/evaluate.md.
    """

    @property
    def name(self) -> str:
        return "contains"

    def agrees(self, answer: AnswerToGrade) -> bool | None:
        """Whether the text, as an answer to the question, asserts one of the references; None: no verdict."""
        return says(answer.question, answer.text, answer.references)


def says(question: str, text: str, references: Sequence[str]) -> bool | None:
    """Whether the text, as an answer to the question, asserts one of the references; None: no verdict."""
    parsed, answer = Question(question), read(text)
    given = [reference for reference in references if reference.strip()]
    given += [parsed.options[letter] for name in given if (letter := name.strip(" .()").upper()) in parsed.options]
    if not text.strip():
        return False
    if normalise(text) in {normalise(reference) for reference in given}:
        return True
    verdicts = [_says(parsed, answer, reference, given) for reference in given]
    return True if True in verdicts else None if None in verdicts else False


def _says(question: Question, answer: Text, reference: str, references: Sequence[str]) -> bool | None:
    bare = reference.strip(" .!'\"()")
    if bare.lower() in _YES + _NO:
        affirmed = affirms(question, answer)
        return None if affirmed is None else affirmed == (bare.lower() in _YES)
    if (wanted := whole_quantity(reference)) is not None:
        return gives_quantity(question, answer, wanted, references)
    spans = mentions(question, answer, reference)
    stances = [stance(answer, *span) for span in spans]
    if not {"asserted", "open"} & {*stances}:
        return False
    own = {form for name in references for form in forms_of(name)}
    asserted = [span for span, taken in zip(spans, stances, strict=True) if taken == "asserted"]
    certain = [span for span in asserted if _is_about(question, answer, span)]
    if not certain or "denied" in stances:
        return None
    span = certain[0]
    if _is_offered(question, answer, span, own):
        return None
    if others := _others_offered(question, references):
        return True if _prefers(answer, span, others) else None
    aside = _is_owner(answer, span) or _is_aside(question, answer, span)
    return None if aside or _is_behind_another(question, answer, span, own) else True


def _is_about(question: Question, answer: Text, span: Span) -> bool:
    """The sentence is about the question: it repeats some of it, refers to it, or has few other words."""
    first, last = answer.sentence(span[0])
    beside = [*answer.forms[first : span[0]], *answer.forms[span[1] : last]]
    near = {*answer.forms[first : first + _NEAR], *answer.forms[max(span[0] - _NEAR, first) : span[0]]}
    refers = near & _PRONOUNS or "it" in answer.forms[span[1] : last]
    repeats = question.share(beside) >= _COVERED or question.held(beside) >= _TWO
    is_phrase = not {*beside} - SMALL or (len(beside) <= _SHORT and not {*beside} & _COPULAS)
    return bool(refers or repeats or is_phrase)


def _others_offered(question: Question, references: Sequence[str]) -> frozenset[str]:
    """The words of the alternatives that the question offers next to the references, if it does."""
    wanted = [{*forms_of(reference)} for reference in references]
    others = [forms for forms in question.alternatives if not any({*forms} <= own or own <= {*forms} for own in wanted)]
    words = frozenset(form for forms in others for form in forms).difference(*wanted) - SMALL
    return words if len(others) < len(question.alternatives) else frozenset()


def _prefers(answer: Text, span: Span, others: Collection[str]) -> bool:
    """Of the question's alternatives the sentence has this one, or this one before "than" or the like."""
    first, last = answer.sentence(span[0])
    rivals = [i for i in range(first, last) if answer.forms[i] in others]
    preferred = rivals and _PREFERRING & {*answer.forms[span[1] : rivals[0]]} and "both" not in answer.forms[first:last]
    return not rivals or bool(preferred)


def _is_owner(answer: Text, span: Span) -> bool:
    """The reference is the owner of something else: "Jane Austen's brother"."""
    return answer.words[span[1] - 1].raw.endswith(("'s", "’s")) and not ends_a_phrase(answer, span[1])


def _is_offered(question: Question, answer: Text, span: Span, own: set[str]) -> bool:
    """One of several that are offered: "Paris or Lyon", "Paris, Lyon and Nice", one of three items of a list."""
    if question.wants_several:
        return False
    start, end = span
    for side in (answer.forms[max(start - 3, 0) : start][::-1], answer.forms[end : end + 3]):
        words = [form for form in side if form not in ARTICLES]
        if words[:1] == ["or"] and words[1:] and words[1] not in own:
            return True
    items = [i for i, word in enumerate(answer.words) if _ITEM.search(word.gap)]
    item = max((i for i in items if i <= start), default=start)
    in_item = len(items) >= _ITEMS and item in items and not {*answer.forms[item:start]} & (question.content | _COPULAS)
    listed = answer.words[start].is_capital and _LIST.match(answer.written(end, end + 20))
    return bool(in_item or listed)


def _is_aside(question: Question, answer: Text, span: Span) -> bool:
    """The sentence answers with another, and has this in an aside: "It is the liver, which lies under the skin"."""
    first = answer.sentence(span[0])[0]
    aside = next((i for i in range(span[0] - 1, first, -1) if "," in answer.words[i].gap), first)
    main, between = answer.forms[first:aside], answer.forms[aside + 1 : span[0]]
    if answer.forms[aside] not in _ASIDES or not main or question.share(between) > 0 or {*between[:1]} & _COPULAS:
        return False
    if answer.forms[aside] == "and":  # "..., and nitrogen makes up 20 %": a clause of its own
        verb = {*answer.forms[span[1] : span[1] + 1]} & _COPULAS or not ends_a_phrase(answer, span[1])
        return bool(verb) and not {*between} - ARTICLES and question.share(main) >= _HALF
    return main[-1] not in question.content and bool({*main} - SMALL - question.content or question.share(main) == 1)


def _is_behind_another(question: Question, answer: Text, span: Span, own: set[str]) -> bool:
    """Another name is asserted before it in its sentence: "Sydney is the capital, with Canberra in second place"."""
    first = answer.sentence(span[0])[0]
    for i in range(first, span[0] - 1) if answer.words[span[0]].is_capital and not question.wants_several else ():
        word = answer.words[i]
        theirs = any(akin(word.form, form) for form in {*own} | question.content | SMALL)
        whole = i > first and answer.words[i - 1].is_capital and word.gap == " "
        ends = ends_a_phrase(answer, i + 1) if i > first else answer.forms[i + 1] in _COPULAS
        name = word.is_capital and len(word.raw) > 1 and not theirs and (whole or ends)
        if name and "but" not in answer.forms[i : span[0]] and stance(answer, i, i + 1) == "asserted":
            return True
    return False
