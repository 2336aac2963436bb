"""The graders that need no model: exact match, token F1, ROUGE-L and `contains`, by name; and which is the default."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from semgrad_guard.engine.texts.words import normalise, token_f1
from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.graders.base import AnswerToGrade, WordGrader
from semgrad_guard.evaluation.graders.contains import Contains


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


WordGraderName = Literal["contains", "exact-match", "token-f1", "rouge-l"]

GRADERS: dict[str, WordGrader] = {
    "contains": Contains(),
    "exact-match": ExactMatch(),
    "token-f1": TokenF1(),
    "rouge-l": RougeL(),
}
"""Those that need no model, by the names the command line offers."""
BY_WORDS = frozenset(grader.name for grader in GRADERS.values())
"""Their names in records. Where one of them comes to no verdict, that is final, and means wrong."""

_NOT_ALL_OF_IT = "one sentence asserts a reference; what else the answer says is not checked"
_IN_COMMON = "the answer has enough words in common with a reference; what else it says is not checked"
_RIGHT_MEANS = {
    "contains": _NOT_ALL_OF_IT,
    "nli": _NOT_ALL_OF_IT,
    "token-f1": _IN_COMMON,
    "rouge-l": _IN_COMMON,
}


def right_means(grader: str) -> str | None:
    """The limits of "right", for a grader that does not look at the whole answer; `grader` is its full name."""
    return _RIGHT_MEANS.get(re.split(r"[(@>+]", grader)[0])


def no_verdict(count: int, among: int, grader: str, *, unit: str = "answers") -> str:
    """The notice about answers on which a grader came to no verdict."""
    notice = f"{count} of {among} {unit} have no verdict by {grader}; they count as wrong."
    if grader != GRADERS["contains"].name:
        return notice
    return f"{notice} The grader contains+judge=PROVIDER:MODEL or contains+nli=MODEL lets a model decide on them."


def default_grader(prompt_template: str) -> WordGraderName:
    """The grader where none is named: a model with a chat template answers in sentences, one without continues a text.

    `prompt_template` is the full name of the prompts' form (`guard.template_name`), which ends in "@plain" where there
    is none.
    """
    return "exact-match" if prompt_template.endswith("@plain") else "contains"
