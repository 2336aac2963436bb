"""The sentences that leave while their answer is still being written, by the rule for the whole answer.

`settle` judges the part that has ended. A sentence depends on earlier ones alone (`calibration/sentences.py`), so that
what leaves early is the beginning of the text that the whole answer's verdict delivers.

A sentence of another server's answer leaves once it has ended and the log-probabilities of its tokens are there. Where
they come later than the text, or do not spell it, nothing leaves any more before the end, which decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from semgrad_guard.engine.answers.sentences import EndedSentences
from semgrad_guard.engine.sentences import Span, decided
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.policy import Terms, settle
from semgrad_guard.guard.reported import ReportedScorer, bytes_of
from semgrad_guard.guard.verdicts import Deliver, current_recorder
from semgrad_guard.records import PromptForm, SentenceVerdict, Verdict

R = TypeVar("R")


@dataclass(frozen=True)
class SentencePiece:
    """A sentence that is let through while its answer is being written: its text, and the verdict on it."""

    text: str
    sentence: SentenceVerdict


class LetThrough:
    """Hands on the sentences of one answer that these terms let through, as they end.

    `known` is the undecided verdict on those that have ended.
    """

    def __init__(self, terms: Terms, put: Callable[[Any], None]) -> None:
        self._terms, self._put = terms, put
        self.known: Verdict | None = None
        self._left = 0  # characters that have left

    def add(self, draft: Draft[Any]) -> bool:
        """Decide about those that have ended, scored; whether the model continues to write."""
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
                if sentence.action == "deliver" and sentence.end > self._left:
                    text, self._left = verdict.text[self._left : sentence.end], sentence.end
                    self._put(SentencePiece(text, sentence))
        return not any(sentence.action == "stop" for sentence in verdict.sentences)


class EarlySentences(LetThrough):
    """As `LetThrough`, for a model in this process: `draft` scores the sentences."""

    def __init__(
        self,
        terms: Terms,
        put: Callable[[Any], None],
        draft: Callable[[EndedSentences, Verdict | None], Draft[Any]],
    ) -> None:
        super().__init__(terms, put)
        self._draft = draft

    def __call__(self, ended: EndedSentences) -> bool:
        """As `add`."""
        return self.add(self._draft(ended, self.known))


class ReportedSentences:
    """Finds the sentences of one answer that these terms let through, as their log-probabilities arrive.

    `options` are those of the call, and `prompt` is the form of its prompt. `text` is the answer so far; once it
    `is_over`, the rest is not delivered, and the text ends behind the sentence that is not let through.
    """

    def __init__(
        self,
        scorer: ReportedScorer,
        terms: Terms,
        *,
        options: Mapping[str, Any],
        prompt: PromptForm | None,
    ) -> None:
        self._scorer, self._options, self._prompt = scorer, options, prompt
        self._new = list[SentencePiece]()
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
    ) -> ReportedSentences | None:
        """None where only the end of the answer decides."""
        if scorer is None or scorer.by_sentence is None or terms is None or current_recorder() is not None:
            return None
        if not terms.delivers_early:
            return None
        return cls(scorer, terms, options=options, prompt=prompt)

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
            self.is_over = not self._early.add(self._draft(spans))
        if self.is_over:
            self.text = self.text[: self._ends[-1]]
        return list(self._new)

    def _draft(self, ended: Sequence[Span]) -> Draft[None]:
        verdict = self._scorer.verdict(
            self.text, self._entries, options=self._options, prompt=self._prompt, ended=ended
        )
        return Draft(verdict, None, self._prompt)
