"""The sentences of another server's answer that leave while it is being written, by the log-probabilities it reports.

A sentence leaves once it has ended and the log-probabilities of its tokens are there. Where they come later than the
text, or do not spell it, nothing leaves any more before the end, which decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from semgrad_guard.engine.sentences import Span, decided
from semgrad_guard.guard.early_sentences import LetThrough, Ranges, SentencePiece
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.reported import ReportedScorer, bytes_of
from semgrad_guard.guard.verdicts import current_recorder
from semgrad_guard.records import PromptForm

ReportedCertain = Callable[[Sequence[Any], str, Ranges], int]


class ReportedSentences:
    """Finds the sentences of one answer that these terms let through, as their log-probabilities arrive.

    `options` are those of the call, and `prompt` is the form of its prompt. `text` is the answer so far; once it
    `is_over`, the rest is not delivered, and the text ends behind the sentence that is not let through. `certain` is
    as for `LetThrough`, given the log-probabilities so far.
    """

    def __init__(
        self,
        scorer: ReportedScorer,
        terms: Terms,
        *,
        options: Mapping[str, Any],
        prompt: PromptForm | None,
        certain: ReportedCertain | None = None,
    ) -> None:
        self._scorer, self._options, self._prompt = scorer, options, prompt
        self._certain, self._new = certain, list[SentencePiece]()
        self._early = LetThrough(terms, self._new.append)
        self._ends: list[int] = [0]
        self._entries = list[Any]()
        self._written, self._is_late = b"", False
        self.text, self.is_over = "", False

    @classmethod
    def of(
        cls,
        scorer: ReportedScorer | None,
        terms: Terms | None,
        *,
        options: Mapping[str, Any],
        prompt: PromptForm | None,
        certain: ReportedCertain | None = None,
    ) -> ReportedSentences | None:
        """None where only the end of the answer decides."""
        if scorer is None or scorer.by_sentence is None or terms is None or current_recorder() is not None:
            return None
        if not (terms.withholds and terms.delivers_early):
            return None
        return cls(scorer, terms, options=options, prompt=prompt, certain=certain)

    def add(self, text: str, entries: Any) -> list[SentencePiece]:
        """The sentences that may leave now; `text` is the newest piece, and `entries` came with it."""
        if self.is_over:
            return []
        new = list[Any](entries or ())
        self.text += text
        self._entries += new
        self._written += b"".join(bytes_of(entry) or b"" for entry in new)
        self._is_late = self._is_late or len(self._written.strip()) < len(self.text.strip().encode("utf-8", "replace"))
        if self._is_late or not text:
            return []
        ends = decided(self.text, self._ends[-1])
        self._new.clear()
        if ends:
            self._ends += ends
            spans = list(zip(self._ends, self._ends[1:], strict=False))
            certain = None if self._certain is None else partial(self._certain, self._entries)
            self.is_over = not self._early.add(self._draft(spans), certain)
        if self.is_over:
            self.text = self.text[: self._ends[-1]]
        return list(self._new)

    def _draft(self, ended: Sequence[Span]) -> Draft[None]:
        verdict = self._scorer.verdict(
            self.text, self._entries, options=self._options, prompt=self._prompt, ended=ended
        )
        return Draft(verdict, None, self._prompt)
