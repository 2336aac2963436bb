"""The model calls of one run of a chain, as a router in its config hears them: which of them are answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from semgrad_guard.errors import UnenforcedPolicyError

Said = tuple[str, str, tuple[Any, ...]]


@dataclass
class _Trace:
    """One run of a chain: what its models were asked, what they have said, and whether any of them was guarded."""

    asked: dict[UUID, list[Said]] = field(default_factory=dict[UUID, "list[Said]"])
    said: set[tuple[str, tuple[Any, ...]]] = field(default_factory=set[tuple[str, tuple[Any, ...]]])
    is_guarded: bool = False


class Traces:
    """The runs of chains that go on. Safe for several threads.

    A run that was not heard from its beginning (of a router that is attached to a model) is not known here.
    """

    def __init__(self) -> None:
        self.names: dict[UUID, str] = {}
        self._roots: dict[UUID, UUID] = {}
        self._traces: dict[UUID, _Trace] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Traces], tuple[()]]:
        return Traces, ()  # a copy in another process hears other runs

    def begins(self, run_id: UUID, parent: UUID | None) -> None:
        """A chain, a tool or a retriever begins."""
        with self._lock:
            root = run_id if parent is None else self._roots.get(parent)
            if root is not None:
                self._roots[run_id] = root
                self._traces.setdefault(root, _Trace())

    def ends(self, run_id: UUID) -> bool | None:
        """It ends. Of an outermost run: whether a guarded call was among those of models; None if it made none."""
        with self._lock:
            root = self._roots.pop(run_id, None)
            if root != run_id:
                return None
            trace = self._traces.pop(run_id)
            return trace.is_guarded if trace.asked else None

    def model_starts(
        self, run_id: UUID, parent: UUID | None, messages: Sequence[BaseMessage], *, name: str | None, guarded: bool
    ) -> None:
        """A model is asked."""
        with self._lock:
            if name is not None:
                self.names[run_id] = name
            trace = self._trace_of(parent)
            if trace is not None:
                self._roots[run_id] = self._roots[parent] if parent is not None else run_id
                trace.asked[run_id] = [_said(message) for message in messages]
                trace.is_guarded = trace.is_guarded or guarded

    def model_ends(self, run_id: UUID, response: LLMResult | None) -> None:
        """A model has answered, or failed."""
        with self._lock:
            self.names.pop(run_id, None)
            root = self._roots.pop(run_id, None)
            trace = None if root is None else self._traces.get(root)
            if trace is None or response is None:
                return
            for generations in response.generations:
                for generation in generations:
                    if isinstance(generation, ChatGeneration):
                        trace.said.add(_said(generation.message)[1:])

    def require_one_answer(self, run_id: UUID) -> None:
        """Refuse a call that has nothing to do with those before it in its run.

        An agent's next step shows the model its own earlier messages, and a retry asks the same again. Any other second
        call means that one of the two writes no answer.

        Raises:
            UnenforcedPolicyError: it is such a call.
        """
        with self._lock:
            trace = self._traces.get(self._roots.get(run_id, run_id))
            if trace is None:
                return
            messages = trace.asked[run_id]
            before = [asked for other, asked in trace.asked.items() if other != run_id]
            goes_on = any(role == "ai" and (text, calls) in trace.said for role, text, calls in messages)
        if before and messages not in before and not goes_on:
            raise UnenforcedPolicyError(
                "this run makes several calls that have nothing to do with each other, and the router in its config "
                "would guard all of them: where one condenses a question, summarizes a history or writes a query, an "
                "abstention would be taken for that. Name the call that writes the answer: "
                'chat.with_config(tags=["answer"]) in the chain, and UncertaintyRouterCallback(..., answering="answer")'
            )

    def _trace_of(self, parent: UUID | None) -> _Trace | None:
        root = None if parent is None else self._roots.get(parent)
        return None if root is None else self._traces.get(root)


def _said(message: BaseMessage) -> Said:
    """A message as it is compared: its role, its text and its calls."""
    calls = tuple(call["id"] for call in message.tool_calls) if isinstance(message, AIMessage) else ()
    return message.type.removesuffix("MessageChunk").lower(), str(message.text), calls
