"""Graders: a name for the rule by which an answer is correct; right, wrong, abstained or no verdict for every answer.

They share the rule for a whole answer that abstains (it does not know, or the passages do not tell, and it claims
nothing else): it is neither right nor wrong, like a guard's own abstention. `contains` judges single mentions: whether
an abstention comes before one. Abstentions are known by the English wordings in `refusals.toml`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

from semgrad_guard.calibration.calibration_set import ABSTAINED as ABSTAINED
from semgrad_guard.engine.text_units import normalise
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
    beginnings = [plain for phrase in own if (plain := _plain(phrase.lower()))]
    parts = [clause for part in re.split(r"[.,;:!?。，、！？\n]+", found) if (clause := _plain(part))]

    def begins(clause: str, words: str) -> bool:
        """Whole words: "na" does not begin "Narnia"; scripts without spaces have no small letters."""
        return clause.startswith(words) and not clause[len(words) :][:1].islower()

    if parts and all(any(begins(clause, words) for words in beginnings) for clause in parts):
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


Grade = bool | Literal["abstained"]
"""Right, wrong, or neither: the answer is the model's own refusal."""
Verdicts = list[Grade | None]
"""One for each answer; None where the grader came to no verdict."""


@dataclass(frozen=True)
class AnswerToGrade:
    """An answer's text to be graded, with its question and any number of references; without one, every claim is wrong.

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


@dataclass(frozen=True)
class WithRefusals:
    """A grader with further words by which an answer abstains, in any language: how each of its clauses begins."""

    first: AnswerGrader
    refusals: tuple[str, ...]

    @property
    def name(self) -> str:
        """The grader's, and a digest of the words."""
        digest = hashlib.sha256(json.dumps(self.refusals).encode()).hexdigest()[:8]
        return f"{self.first.name}+refusals({digest})"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""
        own = [abstains(answer.text, self.refusals) for answer in answers]
        others = iter(self.first.grade([answer for answer, is_own in zip(answers, own, strict=True) if not is_own]))
        return [ABSTAINED if is_own else next(others) for is_own in own]


def settling(answers: Sequence[AnswerToGrade], judge: Callable[[list[AnswerToGrade]], Verdicts]) -> Verdicts:
    """A verdict for each answer. Abstentions, and answers where no answer is right, are not judged."""
    known: Verdicts = [settled(answer.text, answer.sources) for answer in answers]
    unsettled = [answer for answer, verdict in zip(answers, known, strict=True) if verdict is None]
    judged = iter(judge(unsettled) if unsettled else ())
    return [next(judged) if verdict is None else verdict for verdict in known]


def any_reference(
    answers: Sequence[AnswerToGrade], judge: Callable[[list[tuple[AnswerToGrade, str]]], Sequence[bool]]
) -> Verdicts:
    """Judge every answer against each of its references at once: a correct answer agrees with any of them."""

    def agreeing(unsettled: list[AnswerToGrade]) -> Verdicts:
        pairs = [(answer, reference) for answer in unsettled for reference in answer.sources]
        agreed = {pair for pair, agrees in zip(pairs, judge(pairs), strict=True) if agrees}
        return [any((answer, reference) in agreed for reference in answer.sources) for answer in unsettled]

    return settling(answers, agreeing)


def settled(text: str, references: Iterable[str]) -> Grade | None:
    """The grade that needs no grader: of no text, of a reference word by word, of an abstention, or where no answer is
    right; None: it needs one.

    Where all references abstain, too, no answer is right.
    """
    if not text.strip():
        return False
    given = [reference for reference in references if reference.strip()]
    if normalise(text) in map(normalise, given) and not all(map(abstains, given)):
        return True
    if abstains(text):
        return ABSTAINED
    return None if given else False
