"""The sentences that leave while their answer is still being written, by the rule for the whole answer.

`settle` judges the part that has ended. A sentence depends on earlier ones alone (`calibration/on_doubt.py`), so that
what leaves early is the beginning of the text that the whole answer's verdict delivers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from semgrad_guard.engine.generation.sentence_scoring import EndedSentences
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.policy import Terms, settle
from semgrad_guard.guard.sentences import delivers
from semgrad_guard.guard.verdicts import Deliver
from semgrad_guard.records import SentenceVerdict, Verdict


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
            prompt=draft.prompt,
            closing_line="",
        )
        verdict = settled.verdict
        if isinstance(settled, Deliver):
            for sentence in verdict.sentences:
                if delivers(sentence) and sentence.end > self._left:
                    self._put(SentencePiece(verdict.text[sentence.start : sentence.end], sentence))
            self._left = len(verdict.text)
        return not any(sentence.action in ("stop", "escalate") for sentence in verdict.sentences)
