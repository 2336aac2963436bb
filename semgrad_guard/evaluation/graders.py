"""Is an answer correct? Exact match and token F1, normalised as in SQuAD; a calibration is bound to a grader's `name`.

Source: Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text", EMNLP 2016.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from semgrad_guard.errors import InputError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Grader(Protocol):
    """Says whether a text is correct, given any number of reference answers."""

    @property
    def name(self) -> str:
        """What a calibration is bound to; it names the settings too."""
        ...

    def __call__(self, text: str, answers: Iterable[str]) -> bool: ...


@dataclass(frozen=True)
class ExactMatch:
    """Equal to one of the references after normalisation."""

    @property
    def name(self) -> str:
        return "exact-match"

    def __call__(self, text: str, answers: Iterable[str]) -> bool:
        found = normalise(text)
        return bool(found) and any(found == normalise(answer) for answer in answers)


@dataclass(frozen=True)
class TokenF1:
    """Shares enough words with one of the references: F1 at or above `threshold`, in (0, 1]."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise InputError(f"a token-F1 threshold lies in (0, 1], for example 0.5; it is {self.threshold!r}")

    @property
    def name(self) -> str:
        return f"token-f1>={self.threshold:g}"

    def __call__(self, text: str, answers: Iterable[str]) -> bool:
        return any(token_f1(text, answer) >= self.threshold for answer in answers)


GRADERS = {"exact-match": ExactMatch(), "token-f1": TokenF1()}
"""What the command line offers."""


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space.

    Where nothing would be left (the answer "A", or "+"), only case and outer white space go.
    """
    bare = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(bare.split()) or text.strip().lower()


def token_f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, in [0, 1]."""
    found, expected = normalise(text).split(), normalise(answer).split()
    shared = sum((Counter(found) & Counter(expected)).values())
    return 2 * shared / (len(found) + len(expected)) if shared else 0.0
