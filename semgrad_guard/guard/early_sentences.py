"""The sentences that leave while their answer is still being written, by the rule for the whole answer.

`settle` judges the part that has ended. A sentence depends on earlier ones alone (`calibration/on_doubt.py`), so that
what leaves early is the beginning of the text that the whole answer's verdict delivers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.sentence_scoring import EndedSentences
from semgrad_guard.engine.worker import Request
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.policy import Terms, settle
from semgrad_guard.guard.sentences import delivers
from semgrad_guard.guard.verdicts import Deliver, Escalate
from semgrad_guard.records import SentenceVerdict, Verdict

R = TypeVar("R")


@dataclass(frozen=True)
class DraftPiece:
    """The newest text of a draft whose sentences have ended, withheld ones included, and the answer so far."""

    text: str
    answer: Evidence


@dataclass(frozen=True)
class SentencePiece:
    """A sentence that is let through while its answer is being written: its text, and the verdict on it."""

    text: str
    sentence: SentenceVerdict


class EarlySentences:
    """Hands on the sentences of one answer that these terms let through, as they end.

    `draft` scores them; `known` is the undecided verdict on those that have ended.
    """

    def __init__(
        self,
        terms: Terms,
        put: Callable[[Any], None],
        draft: Callable[[EndedSentences, Verdict | None], Draft[Any]],
    ) -> None:
        self._terms, self._put, self._draft = terms, put, draft
        self.known: Verdict | None = None
        self._left = 0  # characters that have left

    def __call__(self, ended: EndedSentences) -> bool:
        """Whether the model continues to write."""
        draft = self._draft(ended, self.known)
        self.known = draft.verdict
        settled = settle(
            draft.verdict,
            self._terms.policy,
            self._terms.mode,
            can_escalate=self._terms.can_escalate,
            continues=self._terms.continues,
            prompt=draft.prompt,
            closing_line="",
        )
        verdict = settled.verdict
        if isinstance(settled, Deliver) or (isinstance(settled, Escalate) and settled.ranges):
            for sentence in verdict.sentences:
                if delivers(sentence) and sentence.end > self._left:
                    self._put(SentencePiece(verdict.text[sentence.start : sentence.end], sentence))
            self._left = len(verdict.text)
        return not any(sentence.action in ("stop", "escalate") for sentence in verdict.sentences)


def with_draft(request: Request[R], put: Callable[[Any], None]) -> Request[R]:
    """The request, whose draft is handed on as well, behind the sentences of it that are let through.

    For a front whose guard is around code that passes the draft on.
    """
    listener, seen = request.on_sentences, ""
    if listener is None:
        return request

    def on_sentences(ended: EndedSentences) -> bool:
        nonlocal seen
        goes_on = listener(ended)
        text = ended.answer.text[: ended.spans[-1][1]].rstrip()  # the answer may end here, without the white space
        put(DraftPiece(text[len(seen) :], ended.answer))
        seen = text
        return goes_on

    return replace(request, on_sentences=on_sentences)
