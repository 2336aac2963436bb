"""The sentences that leave a guarded engine while its model is still writing.

The terms reach the model within the engine's turn. The model hands the whole draft to the engine, and the sentences
that are let through to the turn. These leave as soon as the engine has passed the draft on so far, as the answer of
this one call (`GuardedPieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from semgrad_guard.guard import ReportedScorer, SentencePiece, Terms

C = TypeVar("C")
"""A call of the model's, as it was when these sentences had ended."""


class Leaving(Generic[C]):
    """The sentences of a turn that these terms let through, with the call that wrote them.

    `scorer` is that of a model whose server reports log-probabilities, by its name.
    """

    def __init__(self, terms: Terms, scorer: Callable[[str], ReportedScorer]) -> None:
        self.terms, self.scorer = terms, scorer
        self._let_through = list[tuple[C, tuple[SentencePiece, ...], C | None]]()
        self._left = 0

    def add(self, call: C, sentences: Sequence[SentencePiece], ended: C | None = None) -> None:
        """Note the sentences of a call so far; `ended` is the call where a doubtful sentence ends it here."""
        self._let_through.append((call, tuple(sentences), ended))

    def next(self, is_the_answer: Callable[[C], bool]) -> tuple[Sequence[SentencePiece], C | None]:
        """The new sentences of the call that is the answer so far, and this call where a doubtful sentence ends it."""
        for call, sentences, ended in reversed(self._let_through):
            if is_the_answer(call):
                new, self._left = sentences[self._left :], max(self._left, len(sentences))
                return new, ended
        return (), None
