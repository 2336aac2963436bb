"""Do two answers mean the same? By their words, or by a natural language inference model that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from semgrad_guard.engine.words import normalise, token_f1
from semgrad_guard.errors import InputError
from semgrad_guard.estimators.text_pairs import Entailment, EntailmentScores, Pair


class Equivalence(Protocol):
    """Compares answers to one question; symmetric in the two texts of a pair."""

    @property
    def name(self) -> str:
        """Its name in settings and calibrations."""
        ...

    def __call__(self, pairs: Sequence[Pair], question: str) -> list[bool]:
        """Whether the answers of each pair mean the same."""
        ...

    def relations(self, pairs: Sequence[Pair], question: str) -> list[EntailmentScores]:
        """How the answers of each pair relate, the mean of both directions."""
        ...


@dataclass(frozen=True)
class F1Equivalence:
    """Shares enough words: F1 above `threshold`, in [0, 1). "New York" and "New Delhi" share half of theirs."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise InputError(f"an F1 threshold lies in [0, 1), for example 0.5; it is {self.threshold!r}")

    @property
    def name(self) -> str:
        return f"token-f1>{self.threshold:g}"

    def __call__(self, pairs: Sequence[Pair], question: str) -> list[bool]:
        return [_f1(*pair) > self.threshold for pair in pairs]

    def relations(self, pairs: Sequence[Pair], question: str) -> list[EntailmentScores]:
        """F1 as the probability of entailment, the rest as that of contradiction."""
        return [EntailmentScores(share, 0.0, 1.0 - share) for share in (_f1(*pair) for pair in pairs)]


SHARED_WORDS = F1Equivalence()
"""The default where no NLI model is given."""


@dataclass(frozen=True)
class NLIEquivalence:
    """Each answer entails the other, both read after the question.

    Source: Farquhar et al., "Detecting
    hallucinations in large language models using semantic entropy", Nature 2024, and its published code.
    """

    model: Entailment

    @property
    def name(self) -> str:
        return f"nli:{self.model.name}"

    def __call__(self, pairs: Sequence[Pair], question: str) -> list[bool]:
        return [there.entails and back.entails for there, back in self._both_ways(pairs, question)]

    def relations(self, pairs: Sequence[Pair], question: str) -> list[EntailmentScores]:
        """The mean of the model's probabilities in both directions."""
        return [_mean(*scores) for scores in self._both_ways(pairs, question)]

    def _both_ways(self, pairs: Sequence[Pair], question: str) -> list[tuple[EntailmentScores, EntailmentScores]]:
        in_context = [(f"{question} {first}", f"{question} {second}") for first, second in pairs]
        scores = self.model.probabilities([*in_context, *((second, first) for first, second in in_context)])
        return list(zip(scores[: len(in_context)], scores[len(in_context) :], strict=True))


def clusters(texts: Sequence[str], question: str, equivalence: Equivalence) -> list[int]:
    """The number of each text's cluster: that of the first cluster whose first text it is equivalent to.

    Equal texts are never compared. Clusters are numbered from 0 in the order in which they appear.
    """
    distinct = list(dict.fromkeys(texts))
    pairs = [(first, second) for i, first in enumerate(distinct) for second in distinct[i + 1 :]]
    same = dict(zip(pairs, equivalence(pairs, question), strict=True))
    heads: list[str] = []
    number: dict[str, int] = {}
    for text in distinct:
        home = next((i for i, head in enumerate(heads) if same[head, text]), len(heads))
        if home == len(heads):
            heads.append(text)
        number[text] = home
    return [number[text] for text in texts]


def _f1(first: str, second: str) -> float:
    return 1.0 if normalise(first) == normalise(second) else token_f1(first, second)


def _mean(there: EntailmentScores, back: EntailmentScores) -> EntailmentScores:
    return EntailmentScores(
        (there.entailment + back.entailment) / 2,
        (there.neutral + back.neutral) / 2,
        (there.contradiction + back.contradiction) / 2,
    )
