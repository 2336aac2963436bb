"""Graders: a name for the rule by which an answer is correct, and a yes, a no or no verdict for every answer.

They share the rule for a whole answer that abstains (it does not know, or the passages do not tell, and it claims
nothing else), by English phrases. Where no answer is right, an abstention is; anywhere else it is wrong. `contains`
judges single mentions: whether an abstention comes before one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from semgrad_guard.errors import InputError

Verdicts = list[bool | None]
"""One for each answer; None where the grader came to no verdict."""


@dataclass(frozen=True)
class AnswerToGrade:
    """An answer's text to be graded, with its question and any number of references: without one, an abstention is
    right and nothing else.

    Of a `sentence` of an answer, references are true statements or values, and so is the `passage`: it is right if one
    of them states it. `contains` and other graders by words read the references alone.
    """

    question: str
    text: str
    references: tuple[str, ...]
    sentence: bool = False
    passage: str | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """The references, and the passage."""
        return self.references if self.passage is None else (*self.references, self.passage)


class Grader(Protocol):
    """Decides whether a text is correct, given any number of reference answers; `contains` reads the question, too."""

    @property
    def name(self) -> str:
        """A calibration is bound to it; it names the settings too."""
        ...

    def __call__(self, text: str, answers: Iterable[str], *, question: str = "") -> bool: ...


class AnswerGrader(Protocol):
    """Grades many answers at once, with their questions, as an evaluation does."""

    @property
    def name(self) -> str:
        """Names the grader, its model and its settings."""
        ...

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order; `settling` gives those that every grader gives alike."""
        ...


class WordGrader:
    """A grader by words alone: each answer for itself."""

    def agrees(self, answer: AnswerToGrade) -> bool | None:
        """Whether a text that is not an abstention agrees with one of the references; None: no verdict."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Names the grader and its settings."""
        raise NotImplementedError

    def __call__(self, text: str, answers: Iterable[str], *, question: str = "") -> bool:
        return self.grade([AnswerToGrade(question, text, tuple(answers))])[0] is True

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""
        return settling(answers, lambda unsettled: [self.agrees(answer) for answer in unsettled])


@dataclass(frozen=True)
class SecondOpinion:
    """A grader, and another one for the answers on which the first comes to no verdict."""

    first: AnswerGrader
    second: AnswerGrader

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.first.name}+{self.second.name}"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""
        return self.merge(self.first.grade(answers), lambda open_: self.second.grade([answers[i] for i in open_]))

    @staticmethod
    def merge(verdicts: Verdicts, judge: Callable[[list[int]], Verdicts]) -> Verdicts:
        """The verdicts, with those of `judge` for the places where there are none."""
        without = [i for i, verdict in enumerate(verdicts) if verdict is None]
        decided = dict(zip(without, judge(without) if without else (), strict=True))
        return [decided.get(i, verdict) for i, verdict in enumerate(verdicts)]


def settling(answers: Sequence[AnswerToGrade], judge: Callable[[list[AnswerToGrade]], Verdicts]) -> Verdicts:
    """A verdict for each answer. Abstentions, and answers where only an abstention is right, are not judged."""
    known = [settled(answer.text, answer.sources) for answer in answers]
    unsettled = [answer for answer, verdict in zip(answers, known, strict=True) if verdict is None]
    judged = iter(judge(unsettled) if unsettled else ())
    return [next(judged) if verdict is None else verdict for verdict in known]


def require_threshold(value: float, name: str, example: float) -> None:
    """Raise unless `value` lies in (0, 1]."""
    if not 0 < value <= 1:
        raise InputError(f"a {name} threshold lies in (0, 1], for example {example:g}; it is {value!r}")


def any_reference(
    answers: Sequence[AnswerToGrade], judge: Callable[[list[tuple[AnswerToGrade, str]]], Sequence[bool]]
) -> Verdicts:
    """Judge every answer against each of its references at once: a correct answer agrees with any of them."""

    def agreeing(unsettled: list[AnswerToGrade]) -> Verdicts:
        pairs = [(answer, reference) for answer in unsettled for reference in answer.sources]
        agreed = {pair for pair, agrees in zip(pairs, judge(pairs), strict=True) if agrees}
        return [any((answer, reference) in agreed for reference in answer.sources) for answer in unsettled]

    return settling(answers, agreeing)


_SOURCE = (
    r"(?:documents?|documentation|passages?|contexts?|texts?|sources?|articles?|materials?|excerpts?|paragraphs?|"
    r"snippets?|information|content|story|question|page|files?|results|knowledge base|pieces?|sections?)"
)
_THE_SOURCE = (
    r"(?:(?:the|this|these|that|those|your|my|any|none|neither|all|of|given|what) ){0,3}"
    rf"(?:[\w-]+ ){{0,3}}?{_SOURCE}(?: of (?:the )?{_SOURCE})?"
    r"(?: (?:that )?(?:i have|i was given|you (?:have )?(?:provided|gave|given)|provided|given|above|available|here))?"
)
_SAYS = (
    r"(?:say|mention|contain|state|specify|provide|include|give|tell|answer|indicate|address|reveal|describe|discuss|"
    r"cover|have|offer|list|name|explain|disclose|refer|make|talk|hold|show|identify|note|report|seem|appear|allow)s?"
)
_KNOW = (
    r"(?:know|say|tell|answer|determine|confirm|verify|recall|remember|identify|locate|respond|comment|help|assist|"
    r"guess|infer|think i (?:know|can)|believe i (?:know|can)|be (?:sure|certain))"
)
_KNOWLEDGE = (
    r"(?:information|answers?|details?|data|knowledge|records?|idea|clue|context|mention|way|evidence|reference|"
    r"anything|enough|sufficient|reply|response|indication|basis|access|facts?)"
)
_WANTED = (
    rf"(?:have|find|see|provide|give|offer|get|find out|access)(?:(?: [\w'-]+){{0,5}}? {_KNOWLEDGE}|"
    rf" (?:that|this|it|one)$|(?: [\w'-]+){{0,6}}? (?:in|within) {_THE_SOURCE}|$)"
)
_TOLD = r"(?:mentioned|stated|specified|disclosed|answerable|indicated|known(?! (?:for|as)\b))"
_SHOWN = (
    r"(?:given|provided|available|included|found|described|contained|addressed|covered|listed|discussed|there|recorded)"
)
_ANY = r"(?:[\w'-]+ ){0,12}?"
_BE = r"(?:is|are|was|were|remains?)"
_NOT = r"(?:do|does|did|can|could|will|would|have|may) not (?:\w+ )?"
_DERIVED = r"(?:determined|answered|known|inferred|deduced|derived|confirmed|verified|ascertained)"
_IN_SHORT = (
    r"(?:unknown|unanswerable|unclear|unsure|uncertain|unspecified|dunno|no idea|no clue|no answer|noanswer|beats me|"
    r"nobody knows|no one knows|who knows|na|n/a|idk|pass|no comment|not applicable)$"
)
_REFUSALS = (
    rf"(?:i|we) (?:\w+ )?{_NOT}(?:{_KNOW}\b|been able\b|{_WANTED}|$)",
    r"(?:i|we) (?:am|was|are|were) (?:\w+ )?not (?:\w+ )?(?:sure|certain|able|aware|familiar|in a position)\b",
    r"(?:i|we) (?:am|was|are|were) (?:\w+ )?(?:unsure|uncertain|unable|unaware|unfamiliar)\b",
    r"(?:i|we) (?:\w+ )?(?:have|had|found|find|see) (?:absolutely )?(?:no|not|insufficient)(?: [\w-]+){0,3}? "
    rf"{_KNOWLEDGE}\b",
    r"(?:i|we) (?:decline|refuse|prefer not|would rather not|would prefer not|must abstain|abstain|lack)\b",
    rf"(?:i|we) do not (?:think|believe)(?: that)? {_THE_SOURCE} {_SAYS}\b",
    rf"(?:{_THE_SOURCE}|it|they|the author|the writer) {_NOT}{_SAYS}\b",
    r"my (?:\w+ )?(?:knowledge|training|data)\b.* not\b",
    rf"(?:no|none of the|neither of the) (?:[\w-]+ ){{0,3}}?{_SOURCE} (?:\w+ )?{_SAYS}\b",
    rf"{_THE_SOURCE} (?:\w+ )?(?:has|have|contains?|provides?|gives?|makes?|offers?|includes?) (?:no|nothing|not)\b",
    rf"{_THE_SOURCE} (?:lacks?|omits?|{_BE} (?:silent|insufficient|irrelevant|not (?:sufficient|enough|relevant)))\b",
    rf"there (?:{_BE}|seems to be|appears to be) (?:no|not|insufficient)(?: [\w-]+){{0,3}}? {_KNOWLEDGE}\b",
    rf"(?:there {_BE} )?nothing (?:in|about|is (?:said|mentioned|stated|known))\b",
    rf"(?:no|not enough|insufficient|not sufficient|not any) (?:[\w-]+ ){{0,2}}?{_KNOWLEDGE}\b(?! {_BE} needed)",
    rf"{_ANY}{_BE} (?:\w+ )?not (?:\w+ )?{_TOLD}\b",
    rf"{_ANY}{_BE} (?:\w+ )?not (?:\w+ )?(?:{_SHOWN} (?:\w+ )?)?(?:in|within|by|from) {_THE_SOURCE}",
    rf"{_ANY}(?:information|answers?|details?|data) {_BE} (?:\w+ )?not (?:\w+ )?{_SHOWN}\b",
    rf"(?:it|this|that|the answer|the question) {_BE} (?:\w+ )?(?:not (?:\w+ )?clear|unclear|something i)\b",
    rf"(?:it|this|that) {_BE} (?:\w+ )?(?:not possible|impossible)(?: for me)?(?: to {_KNOW}\b|$)",
    rf"{_ANY}(?:it|this|that|information|context) {_BE} (?:not enough|not sufficient|insufficient)\b",
    rf"{_ANY}{_BE} (?:\w+ )?(?:unknown|unclear|unspecified|unanswerable|undisclosed)"
    r"(?: (?:to me|from|in|based on|whether|who|what|when|where|how|which|at)\b.*)?$",
    rf"{_ANY}can not be (?:\w+ )?{_DERIVED}\b",
    rf"{_NOT}(?:{_KNOW}|find)\b",
    rf"not (?:\w+ )?(?:{_TOLD}|{_SHOWN}|sure|certain|clear|possible|able to)\b",
    rf"(?:unable|impossible|hard|difficult|not possible) to {_KNOW}\b",
    _IN_SHORT,
    r"(?:this|that|it|(?:your|the|this|that) question) (?:is|lies|falls|goes) (?:\w+ )?(?:outside|beyond)(?: of)? "
    r"(?:the scope|my|our|what)\b",
)
_REFUSES = re.compile("|".join(_REFUSALS))
"""How a clause begins that abstains."""
_ACCORDING = (
    r"(?:(?:based (?:solely |only )?(?:on|upon)|according to|from|given|in|within|using|with|after \w+ing|having \w+) "
    rf"{_THE_SOURCE}|as an? (?:[\w-]+ ){{0,3}}?(?:ai|assistant|model)(?: \w+)?)"
)
_OPENING = re.compile(
    r"(?:unfortunately|regrettably|honestly|well|hmm+|oh|ok(?:ay)?|so|and|as|because|since|to be honest|sorry|"
    rf"i am (?:sorry|afraid)(?: to say)?(?: that)?|{_ACCORDING}|"
    r"(?:it (?:seems|appears|looks like)|i (?:think|believe|must say|must admit|regret))(?: that)?) "
)
"""The words before the matter of a clause that abstains."""
_MAY = r"(?:can|could|may|might|should|will have to|would have to|will need to|would need to)"
_LOOK = r"(?:check|contact|consult|visit|try|ask|look|find|search|refer|provide|want|need)"
_SPEAKS_OF = rf"(?:talks?|describes?|discuss(?:es)?|covers?|mentions?|deals?|focus(?:es)?|{_BE} about)"
_ASIDE = re.compile(
    r"(?:(?:i|we) (?:am|are) (?:very |so |really )?(?:sorry|afraid)|sorry|my apologies|apologies|i apologi[sz]e|answer|"
    r"unfortunately|regrettably|well|hmm+|please|could you|can you|would you|do you|if (?:you|i)|let me know|feel free|"
    rf"you {_MAY} (?:\w+ )?{_LOOK}|(?:i|we) (?:would|will|can|am happy|recommend|suggest|need|only)|"
    rf"more (?:information|context|details)|additional|further|without|perhaps you|thanks?|thank you|{_ACCORDING}$|"
    rf"(?:while |although |though |even though )?(?:they|it|{_THE_SOURCE}) "
    rf"(?:only|just|merely|mainly|instead|rather|{_SPEAKS_OF}))\b"
)
"""A clause next to an abstention: an apology, an offer, where to look, the matter of the passages instead."""
_APART = re.compile(
    r"(?<=[.!?])\s+|\n+|[;:]\s*|\s+[-–—]\s+|,?\s+(?:but|however|yet)\b,?\s*|"
    r",\s+(?=(?:it|he|she|they|the|this|that|there|i|we|none|no|so)\b)"
)
_FULL = (
    (re.compile(r"[’‘`]"), "'"),
    (re.compile(r"\b(?:cannot|can't|cant)\b"), "can not"),
    (re.compile(r"\b(?:won't|wont)\b"), "will not"),
    (re.compile(r"\b(do|does|did|is|are|was|were|could|would|have|has|had|should)n't\b"), r"\1 not"),
    (re.compile(r"\b(do|does|did|is|was|are|could|would|have|has)nt\b"), r"\1 not"),
    (re.compile(r"\b(i|we|they|you)'?m\b"), r"\1 am"),
    (re.compile(r"\b(there|it|that|what)'s\b"), r"\1 is"),
    (re.compile(r"\b(i|we|you|they)'ve\b"), r"\1 have"),
    (re.compile(r"\b(i|we|you|they)'d\b"), r"\1 would"),
    (re.compile(r"\b(we|you|they)'re\b"), r"\1 are"),
)
"""Short forms, written out."""


def abstains(text: str) -> bool:
    """Whether a text gives no answer, and claims none: "I don't know, perhaps Paris" claims one."""
    found = text.lower()
    for short, full in _FULL:
        found = short.sub(full, found)
    clauses = [clause for part in _APART.split(found) if (clause := _plain(part))]
    refusing = [bool(_REFUSES.match(_opened(clause))) for clause in clauses]
    return any(refusing) and all(
        refuses or _ASIDE.match(clause) for refuses, clause in zip(refusing, clauses, strict=True)
    )


def settled(text: str, references: Iterable[str]) -> bool | None:
    """The grade that needs no grader: of no text, where no answer is right, and of an abstention; None: it needs one.

    No answer is right where there is no reference, or where one of them is an abstention itself.
    """
    given = [reference for reference in references if reference.strip()]
    if not text.strip():
        return False
    if abstains(text):
        return not given or any(map(abstains, given))
    return None if given else False


def _plain(clause: str) -> str:
    return " ".join(re.sub(r"[^\w\s'/-]", " ", clause).split()).strip("-' ")


def _opened(clause: str) -> str:
    """A clause without the words before its matter."""
    while (found := _OPENING.match(clause)) and found.end() < len(clause):
        clause = clause[found.end() :]
    return clause
