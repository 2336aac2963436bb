"""`OpenSentences`: the sentences that have ended in an answer that is still being written, and when to score them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from semgrad_guard.engine.generation.visible import Piece
from semgrad_guard.engine.sentences import Span, decided

_LINGER = 4
"""Steps that an answer, or its sentences, wait for others to be scored with."""


class OpenSentences:
    """The sentences of an answer that have ended while it is being written; the first `known` have been scored.

    `waited` counts the steps since the others have ended.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.known, self.waited, self._text = 0, 0, ""

    def add(self, piece: Piece) -> None:
        """One more piece of the answer, or of its thought."""
        if isinstance(piece, str):
            self._text += piece
            begin = self.spans[-1][1] if self.spans else 0
            self.spans += pairwise([begin, *decided(self._text, begin)])

    @property
    def is_due(self) -> bool:
        """Whether some have not been scored."""
        return len(self.spans) > self.known

    def hand_over(self, known: int) -> None:
        """So many have been scored, no more than before where the tokens did not spell the others yet."""
        self.known, self.waited = known, 0


def is_time(waited: Sequence[int], beside: int) -> bool:
    """Whether to score what has waited so many steps, next to so many answers that are being written.

    Together with others that soon will wait, as long as that is a matter of steps.
    """
    return bool(waited) and (len(waited) >= max(1, beside // 4) or max(waited) > _LINGER)


def is_time_to_score(due: Sequence[OpenSentences], beside: int) -> bool:
    """As `is_time`, for sentences that have ended: the first of an answer is wanted soon, later ones can wait longer.

    A backward pass for many reads the weights once.
    """
    later = [one.waited for one in due if one.known]
    first = [one.waited for one in due if not one.known]
    return is_time(first, beside) or (bool(due) and (len(due) >= beside or max(later, default=0) > 2 * _LINGER))
