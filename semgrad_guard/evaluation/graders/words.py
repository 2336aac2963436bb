"""Exact match, token F1 and ROUGE-L, on words normalised as in SQuAD (see `engine.words`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semgrad_guard.engine.texts.words import normalise, token_f1
from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.graders.base import AnswerToGrade, WordGrader


@dataclass(frozen=True)
class ExactMatch(WordGrader):
    """Equal to one of the references after normalisation."""

    @property
    def name(self) -> str:
        return "exact-match"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text is a reference, but for case, articles and punctuation."""
        found = normalise(answer.text)
        return bool(found) and any(found == normalise(reference) for reference in answer.references)


@dataclass(frozen=True)
class TokenF1(WordGrader):
    """Shares enough words with one of the references: F1 at or above `threshold`, in (0, 1]."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        require_threshold(self.threshold, "token-F1", 0.5)

    @property
    def name(self) -> str:
        return f"token-f1>={self.threshold:g}"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text shares enough words with a reference."""
        return any(token_f1(answer.text, reference) >= self.threshold for reference in answer.references)


@dataclass(frozen=True)
class RougeL(WordGrader):
    """Shares enough words in the same order with one of the references: ROUGE-L at or above `threshold`, in (0, 1].

    The threshold .3 is the literature's for short answers (Kuhn et al., "Semantic uncertainty", ICLR 2023). It lets
    much through: one right word of five is .33.
    """

    threshold: float = 0.3

    def __post_init__(self) -> None:
        require_threshold(self.threshold, "ROUGE-L", 0.3)

    @property
    def name(self) -> str:
        return f"rouge-l>={self.threshold:g}"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text shares enough words in a reference's order."""
        return any(rouge_l(answer.text, reference) >= self.threshold for reference in answer.references)


def rouge_l(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence of words, in [0, 1].

    Source: Lin, "ROUGE: a package for automatic evaluation of summaries", 2004, with beta = 1. The words are those of
    `normalise`, so that scripts other than Latin count too; the original package drops them.
    """
    found, expected = normalise(text).split(), normalise(answer).split()
    common = longest_common_subsequence(found, expected)
    return 2 * common / (len(found) + len(expected)) if common else 0.0


def longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest sequence of words that both hold in this order, gaps allowed."""
    row = [0] * (len(other) + 1)
    for word in one:
        above = row
        row = [0]
        for column, candidate in enumerate(other):
            row.append(above[column] + 1 if word == candidate else max(above[column + 1], row[column]))
    return row[-1]


def require_threshold(value: float, name: str, example: float) -> None:
    """Raise unless `value` lies in (0, 1]."""
    if not 0 < value <= 1:
        raise InputError(f"a {name} threshold lies in (0, 1], for example {example:g}; it is {value!r}")
