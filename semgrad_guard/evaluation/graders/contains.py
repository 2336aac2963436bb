"""The reference in the answer, asserted: a grader by words for models that answer in sentences.

Chat models put the answer into a sentence ("The capital of Mongolia is Ulaanbaatar, which ..."), where equal or shared
words miss it. An answer is right if one sentence about the question asserts a reference, wrong if it has none or denies
it, and without a verdict where this grader would have to guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from semgrad_guard.calibration.binding import GRADER_VERSIONS
from semgrad_guard.engine.texts.words import normalise
from semgrad_guard.evaluation.graders.assertion import affirms, clause_start, stance
from semgrad_guard.evaluation.graders.base import AnswerToGrade, WordGrader
from semgrad_guard.evaluation.graders.quantity import gives_quantity, whole_quantity
from semgrad_guard.evaluation.graders.question import SMALL, Question, Span, akin, ends_a_phrase, forms_of, mentions
from semgrad_guard.evaluation.graders.reading import ARTICLES, Text, read, words_of

_YES, _NO = ("yes", "true"), ("no", "false")
_COPULAS = words_of("is are was were has had")
_PRONOUNS = words_of("it this he she they there answer these those his her their its")
_PREFERRING = words_of("than not but though although followed")
_ASIDES = words_of("unlike followed together alongside which who and as with since when")
_ITEM = re.compile(r"(?:^|\n|:)\s*[-*•] +\W*$")
_COVERED, _NEAR, _SHORT, _ITEMS = 0.25, 3, 5, 3


@dataclass(frozen=True)
class Contains(WordGrader):
    """Right is an answer of which one sentence asserts a reference; the rest of it is not checked.

    Words count under one form: case, diacritics, plurals, articles, numbers in words or digits, units. A reference that
    is denied or only repeated from the question is wrong. There is no verdict where it is doubted, compared, one of
    several offered, an aside, spelled in another way, or in a sentence about something else. How often it errs:
    docs/evaluate.md. Nor is there one on a sentence of an answer that names no reference: it may tell another fact.
    """

    @property
    def name(self) -> str:
        return f"contains@{GRADER_VERSIONS['contains']}"

    def agrees(self, answer: AnswerToGrade) -> bool | None:
        """Whether the text, as an answer to the question, asserts one of the references; None: no verdict."""
        question, text = Question(answer.question), read(answer.text)
        given = [reference for reference in answer.references if reference.strip()]
        letters = [reference.strip(" .()").upper() for reference in given]
        given += [question.options[letter] for letter in letters if letter in question.options]
        if not answer.text.strip():
            return False
        if normalise(answer.text) in {normalise(reference) for reference in given}:
            return True
        verdicts = [_asserts(question, text, reference, given) for reference in given]
        if answer.sentence and not any(mentions(question, text, reference) for reference in given):
            return True if True in verdicts else None
        return True if True in verdicts else None if None in verdicts else False


def _asserts(question: Question, answer: Text, reference: str, references: Sequence[str]) -> bool | None:
    bare = reference.strip(" .!'\"()").lower()
    if bare in _YES + _NO:
        affirmed = affirms(question, answer)
        return None if affirmed is None else affirmed == (bare in _YES)
    if (wanted := whole_quantity(reference)) is not None:
        return gives_quantity(question, answer, wanted, references)
    spans = mentions(question, answer, reference)
    stances = [stance(answer, *span) for span in spans]
    if {*stances} <= {"denied", "apart"}:
        return False
    asserted = [span for span, taken in zip(spans, stances, strict=True) if taken == "asserted"]
    certain = [span for span in asserted if _is_about(question, answer, span)]
    if not certain or "denied" in stances or _is_one_of_several(question, answer, certain[0], references):
        return None
    return None if _comes_after_another(question, answer, certain[0], references) else True


def _is_about(question: Question, answer: Text, span: Span) -> bool:
    """The sentence is about the question: it repeats some of it, refers to it, or has few other words."""
    first, last = answer.sentence(span[0])
    others = [*answer.forms[first : span[0]], *answer.forms[span[1] : last]]
    near = {*answer.forms[first : first + _NEAR], *answer.forms[max(span[0] - _NEAR, first) : span[0]]}
    refers = near & _PRONOUNS or "it" in answer.forms[span[1] : last]
    is_phrase = not {*others} - SMALL or (len(others) <= _SHORT and not {*others} & _COPULAS)
    return bool(refers or is_phrase or question.share(others) >= _COVERED)


def _is_one_of_several(question: Question, answer: Text, span: Span, references: Sequence[str]) -> bool:
    """One of several that the answer or the question offers: "Paris or Lyon", one of three items of a list."""
    (start, end), (first, last) = span, answer.sentence(span[0])
    own = {form for reference in references for form in forms_of(reference)}
    rivals = {form for forms in question.alternatives if not own & {*forms} for form in forms} - SMALL
    found = [i for i in range(first, last) if answer.forms[i] in rivals]
    if found:
        return found[0] < start or not _PREFERRING & {*answer.forms[end : found[0]]}
    sides = (answer.forms[max(start - 3, 0) : start][::-1], answer.forms[end : end + 3])
    around = [[form for form in side if form not in ARTICLES] for side in sides]
    items = [i for i, word in enumerate(answer.words) if _ITEM.search(word.gap)]
    in_item = len(items) >= _ITEMS and start in items
    return in_item or any(words[:1] == ["or"] and not own & {*words[1:2]} for words in around)


def _comes_after_another(question: Question, answer: Text, span: Span, references: Sequence[str]) -> bool:
    """The sentence answers with another before it ("Sydney is, with Canberra next"), or it owns another."""
    if answer.words[span[1] - 1].raw.endswith(("'s", "’s")) and not ends_a_phrase(answer, span[1]):
        return True  # "Jane Austen's brother"
    first = answer.sentence(span[0])[0]
    start = clause_start(answer, first, span[0])
    own = {form for reference in references for form in forms_of(reference)} | question.content | SMALL
    others = any(not any(akin(form, word) for word in own) for form in answer.forms[first:start])
    aside = answer.forms[start] in _ASIDES and question.share(answer.forms[start : span[0]]) == 0
    return (others and aside) or any(
        word.is_capital
        and not any(akin(word.form, form) for form in own)
        and ends_a_phrase(answer, i + 1)
        and stance(answer, i, i + 1) == "asserted"
        for i, word in enumerate(answer.words[first + 1 : span[0] - 1], start=first + 1)
        if answer.words[span[0]].is_capital
    )
