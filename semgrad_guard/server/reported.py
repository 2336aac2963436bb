"""`ReportedQueue`: another server's model as a `ModelQueue`, its answers scored by the log-probabilities they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semgrad_guard.engine.scoring.segments import By, Segment
from semgrad_guard.engine.worker import Batching
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Draft
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.writing import AnswerRequest, ForeignText

_NO_MODEL = "this server has no model of its own: it scores the answers of its upstream alone; see --scorer"


@dataclass(frozen=True, eq=False)
class ReportedQueue:
    """A `ModelQueue` without a model: nothing waits here, and no other text can be scored."""

    scorer: ReportedScorer
    served: bool = True
    batching: Batching | None = None
    depth: int = 0
    is_full: bool = False
    is_alive: bool = True

    @property
    def name(self) -> str:
        """The upstream's name for the model."""
        return self.scorer.model

    @property
    def estimator_name(self) -> str:
        """As `ModelQueue.estimator_name`."""
        return self.scorer.estimator

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """As `ModelQueue.answer`: there is no model to answer."""
        raise InputError(_NO_MODEL)

    async def judged(self, text: ForeignText) -> Draft[None]:
        """As `ModelQueue.judged`: without a score."""
        return Draft(self.scorer.unscored(text.text, text.reason or _NO_MODEL), None)

    async def segments(self, text: ForeignText, by: By) -> list[tuple[Segment, float | None]]:
        """As `ModelQueue.segments`: there are none."""
        raise InputError(_NO_MODEL)

    def close(self) -> None:
        """Nothing is to be stopped."""


def logprobs_for(body: Mapping[str, Any], found: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The log-probabilities that a client's request is about, of those that the score took."""
    if not body.get("logprobs") or found is None or any(entry.get("logprob") is None for entry in found):
        return None
    top = body.get("top_logprobs") or 0
    return [{**entry, "top_logprobs": list(entry.get("top_logprobs") or ())[:top]} for entry in found]
