"""`ModelQueue`: what the service asks of whoever owns a model, in this process or in another one."""

from __future__ import annotations

from typing import Protocol

from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.engine.scoring.segments import By, Segment
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Draft
from semgrad_guard.records import Message
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.batching import Batching
from semgrad_guard.server.writing import AnswerRequest


class ModelQueue(Protocol):
    """Requests to one model. Whatever it cannot do raises a `SemGradGuardError`.

    `served` says that the model only scores what others have written.
    """

    estimator: Estimator
    served: bool

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def batching(self) -> Batching | None:
        """How requests share the model; None as long as that is not known."""
        ...

    @property
    def depth(self) -> int:
        """How many requests wait, those that are being worked on aside."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether anything will ever be answered."""
        ...

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """The scored drafts of a request."""
        ...

    async def scored(
        self,
        conversation: tuple[Message, ...],
        text: str,
        *,
        form: AnswerForm | None = None,
        cut: bool = False,
        reasoned: bool = False,
    ) -> Draft[None]:
        """A text from elsewhere as the answer to a conversation, with its score."""
        ...

    async def segments(
        self, conversation: tuple[Message, ...], text: str, *, by: By
    ) -> list[tuple[Segment, float | None]]:
        """A text's sentences or clauses, each with an uncertainty of its own; None where it has none."""
        ...

    async def unscored(self, text: str, reason: str, form: AnswerForm | None = None) -> Draft[None]:
        """A text from elsewhere that cannot be scored, with the reason; its record is that of a scored one's form."""
        ...

    def close(self) -> None:
        """Let go of what waits."""
        ...
