"""What every grader is: a name that says what counted as correct, and a yes, a no or no verdict for every answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

Verdicts = list[bool | None]
"""One for each answer; None where the grader came to no verdict."""


@dataclass(frozen=True)
class AnswerToGrade:
    """An answer's text to be graded, with its question and any number of references."""

    question: str
    text: str
    references: tuple[str, ...]


class Grader(Protocol):
    """Says whether a text is correct, given any number of reference answers."""

    @property
    def name(self) -> str:
        """What a calibration is bound to; it names the settings too."""
        ...

    def __call__(self, text: str, answers: Iterable[str]) -> bool: ...


class AnswerGrader(Protocol):
    """Grades many answers at once, with their questions: what an evaluation run uses."""

    @property
    def name(self) -> str:
        """Names the grader, its model and its settings."""
        ...

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""
        ...


class WordGrader:
    """A grader by words alone: each answer for itself."""

    @property
    def name(self) -> str:
        """Names the grader and its settings."""
        raise NotImplementedError

    def __call__(self, text: str, answers: Iterable[str]) -> bool:
        raise NotImplementedError

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""
        return [self(answer.text, answer.references) for answer in answers]


def any_reference(
    answers: Sequence[AnswerToGrade], judge: Callable[[list[tuple[AnswerToGrade, str]]], Sequence[bool]]
) -> Verdicts:
    """Judge every answer against each of its references at once: correct is what agrees with any of them."""
    pairs = [(answer, reference) for answer in answers for reference in answer.references]
    agreeing = {pair for pair, agrees in zip(pairs, judge(pairs), strict=True) if agrees}
    return [any((answer, reference) in agreeing for reference in answer.references) for answer in answers]
