"""The callbacks that users attach: `UncertaintyRouterCallback`, and a LangSmith tracer that writes verdicts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers import LangChainTracer
from langchain_core.tracers.schemas import Run

from langchain_semgrad_guard.answers import NO_SCORE, Rules, is_escalating
from langchain_semgrad_guard.messages import stage_verdict, verdict_of
from langchain_semgrad_guard.runs import WITNESS, RunHandler, around
from langchain_semgrad_guard.targets import target_of
from semgrad_guard import METADATA_KEY, DriftMonitor, Policy, Verdict
from semgrad_guard.errors import UnenforcedPolicyError
from semgrad_guard.guard import (
    AbstainMessage,
    DecisionSink,
    Draft,
    KeepDraft,
    Mode,
    OnError,
    Pending,
    Terms,
    Timeout,
    current_recorder,
    one,
    undecided,
    unscored,
)
from semgrad_guard.records import trace_fields

logger = logging.getLogger(METADATA_KEY)

_REMEDY = (
    "Use ChatSemGrad(...), or put a guard around this model: GuardedChatModel(model, policy, scorer=...). Attach a "
    "router to the model that it is for rather than to a chain that holds others: "
    'chat.with_config(callbacks=[router]), ChatSemGrad(callbacks=[router]), or config={"callbacks": [router]}. '
    'A router with mode="observe" goes with any model.'
)


class EnforcingDescription(dict[str, Any]):
    """The description, at the start of a run, of a model that carries out a router's decisions.

    LangChain passes this very object to every handler, on every path: no tag, metadata or parameter could claim this
    type by accident.
    """


Compared = tuple[str, str, tuple[Any, ...]]
"""A message as it is compared: its role, its text and its calls."""


@dataclass
class _Trace:
    """One outermost run: the messages of its calls, the answers, and whether any of the calls was guarded."""

    calls: dict[UUID, list[Compared]] = field(default_factory=dict[UUID, "list[Compared]"])
    answers: set[tuple[str, tuple[Any, ...]]] = field(default_factory=set[tuple[str, tuple[Any, ...]]])
    is_guarded: bool = False


class Traces:
    """The outermost runs that a router hears from their beginning (it is in their config). Safe for several threads."""

    def __init__(self) -> None:
        self.names: dict[UUID, str] = {}
        """The names of models' runs that are under way."""
        self._outermost: dict[UUID, _Trace] = {}
        self._of_models: dict[UUID, _Trace] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Traces], tuple[()]]:
        return Traces, ()  # a copy in another process hears other runs

    def begins(self, run: UUID) -> None:
        """An outermost run begins."""
        with self._lock:
            self._outermost[run] = _Trace()

    def ends(self, run: UUID) -> bool | None:
        """A run ends. Of an outermost one: whether a guarded call was among its calls; None if it made none."""
        with self._lock:
            self.names.pop(run, None)
            self._of_models.pop(run, None)
            trace = self._outermost.pop(run, None)
        return trace.is_guarded if trace is not None and trace.calls else None

    def model_starts(
        self,
        run: UUID,
        parent: UUID | None,
        messages: Sequence[BaseMessage],
        *,
        name: str | None,
        guarded: bool,
        alone: bool,
    ) -> None:
        """A model is called; `alone`: the router guards every call of the outermost run, so that all must be answers.

        An agent's next step shows the model its own earlier messages, and a retry repeats a call. Any other second call
        means that one of the two writes no answer.

        Raises:
            UnenforcedPolicyError: it is such a call.
        """
        with self._lock:
            if name is not None:
                self.names[run] = name
            root = WITNESS.outermost(parent)
            trace = None if root is None else self._outermost.get(root)
            if trace is None:
                return
            call, before = [_compared(message) for message in messages], list(trace.calls.values())
            follows = any(role == "ai" and (text, calls) in trace.answers for role, text, calls in call)
            self._of_models[run], trace.calls[run] = trace, call
            trace.is_guarded = trace.is_guarded or guarded
        if alone and before and call not in before and not follows:
            raise UnenforcedPolicyError(
                "this run makes several calls that have nothing to do with each other, and the router in its config "
                "would guard all of them: where one condenses a question, summarizes a history or writes a query, an "
                "abstention would be taken for that. Name the call that writes the answer: "
                'chat.with_config(tags=["answer"]) in the chain, and UncertaintyRouterCallback(..., answering="answer")'
            )

    def model_ends(self, run: UUID, response: LLMResult) -> None:
        """A model has answered."""
        with self._lock:
            trace = self._of_models.get(run)
            if trace is not None:
                made = [generation for generations in response.generations for generation in generations]
                messages = [generation.message for generation in made if isinstance(generation, ChatGeneration)]
                trace.answers.update(_compared(message)[1:] for message in messages)
        self.ends(run)


def _compared(message: BaseMessage) -> Compared:
    calls = tuple(call["id"] for call in message.tool_calls) if isinstance(message, AIMessage) else ()
    return message.type.removesuffix("MessageChunk").lower(), str(message.text), calls


class UncertaintyRouterCallback(RunHandler):
    """Applies a policy to every answer of the chat model it is attached to; the model enforces what it decides.

    An answer at or below the threshold is delivered. For any other the `mode` decides:

    - `enforce`: the model's run ends with the answer of `escalate_to` in its place, or with `abstain_message` where
      there is no target. A stream is buffered: it arrives in one chunk.
    - `raise`: the run ends with a `LowConfidenceError`, which holds the verdict; no target is called.
    - `annotate`: the answer is delivered, live where it is streamed, and the decision is in its metadata (a stream's
      last chunk) with `enforced: false`. No target is called.
    - `observe`: the answer and its metadata stay as they are. The decision goes to the logger `semgrad_guard` and,
      inside a chain or a graph, out as a custom event `semgrad_guard`.

    A callback cannot replace an answer on its own. It therefore refuses, at the start of a run, models that would
    ignore it; an observer refuses none.

    Args:
        policy: which answers to let through. A calibrated policy is checked against each answer's own record.
        escalate_to: a larger chat model, which gets the call's own options and tools; an agent's graph, which gets the
            messages as its state; or any Runnable that takes the messages and returns a message or a string. A scored
            target's verdict is kept inside this one's; the answer of any other target is unscored, outside every
            promise.
        mode: what to do with a decision.
        abstain_message: delivered in place of an answer that is neither let through nor escalated; a text, or a
            function of the verdict.
        keep_draft: keep the text of withheld answers in the metadata (`draft`) and in traces.
        on_error: for an answer whose target fails or is late, or that is late itself: "raise" or "abstain".
        timeout: seconds for generating, scoring and escalating together.
        monitor: watches the scores for drift.
        log: a `DecisionLog`, which every decision is written to.
        answering: a tag or a run name of the call that writes the answer: other calls of a chain (those that condense a
            question, summarize a history or write a query) are left alone, as an abstention would be taken for their
            text. Without it a router in a chain's config refuses the second call of a run that does not
            continue the first.

    Raises:
        InputError: no policy, an unknown mode, or a target that is not a Runnable or takes no messages.
        BindingMismatchError: the target is a guarded model whose calibration does not follow this one's.
    """

    run_inline = True
    raise_error = True

    def __init__(
        self,
        policy: Policy,
        escalate_to: Runnable[Any, Any] | None = None,
        *,
        mode: Mode = Terms.mode,
        abstain_message: AbstainMessage = Terms.abstain_message,
        keep_draft: KeepDraft = Terms.keep_draft,
        on_error: OnError = Terms.on_error,
        timeout: Timeout = None,
        monitor: DriftMonitor | None = None,
        log: DecisionSink | None = None,
        answering: str | None = None,
    ) -> None:
        self.answering = answering
        self._traces = Traces()
        self._escalate_to = escalate_to
        self.rules = rules_of(
            self,
            policy,
            escalate_to,
            mode=mode,
            abstain_message=abstain_message,
            keep_draft=keep_draft,
            on_error=on_error,
            timeout=timeout,
            monitor=monitor,
            log=log,
        )

    @property
    def policy(self) -> Policy:
        """The policy: which answers are let through."""
        return self.rules.terms.policy

    @property
    def mode(self) -> Mode:
        """The effect of a decision."""
        return self.rules.terms.mode

    @property
    def escalate_to(self) -> Runnable[Any, Any] | None:
        """The target for answers that are not let through."""
        return self._escalate_to

    @escalate_to.setter
    def escalate_to(self, escalate_to: Runnable[Any, Any] | None) -> None:
        target = target_of(escalate_to, self.policy)
        self._escalate_to = escalate_to
        self.rules = replace(
            self.rules, terms=replace(self.rules.terms, can_escalate=target is not None), target=target
        )

    def guards(self, labels: Collection[str]) -> bool:
        """Whether this router is for runs with these tags and names."""
        return self.answering is None or self.answering in labels

    def name_of(self, run_id: UUID) -> str | None:
        """The name of a model's run that is under way."""
        return self._traces.names.get(run_id)

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Refuse a chat model that would ignore this router's decisions, and a second kind of call in a chain."""
        if self.rules.terms.observes:
            return
        guards = self.guards([*(tags or []), *([name] if name else [])])
        if guards and not isinstance(serialized, EnforcingDescription):
            model = ((cast("dict[str, Any] | None", serialized) or {}).get("id") or ["this model"])[-1]
            raise UnenforcedPolicyError(f"{model} would ignore this router's decisions. {_REMEDY}")
        if not guards and parent_run_id is None:
            raise UnenforcedPolicyError(
                f"this call has neither the tag nor the name {self.answering!r}, which the router is for: give it to "
                "the call that writes the answer, or make the router without `answering`"
            )
        alone = guards and self.answering is None and current_recorder() is None
        self._traces.model_starts(run_id, parent_run_id, messages[0], name=name, guarded=guards, alone=alone)

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], **kwargs: Any) -> None:
        """Refuse text-in, text-out models."""
        self.on_chat_model_start(serialized, [[]], **kwargs)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Report the decision of an observer: about the recorded score, also where another answer was delivered."""
        if self.rules.terms.observes:
            made = response.generations[0][0]
            message = made.message if isinstance(made, ChatGeneration) else AIMessage(made.text)
            recorded, text = stage_verdict(message), str(message.text)
            verdict = unscored(text, reason=NO_SCORE) if recorded is None else undecided(recorded)
            answer = message if isinstance(message, AIMessage) else AIMessage(text)
            observe(self.rules, Draft(verdict, answer, can_escalate=not is_escalating(self)))
        self._traces.model_ends(run_id, response)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Refuse a run of a chain in which no call was the one that this router is for."""
        if self._traces.ends(run_id) is False and current_recorder() is None:
            error = UnenforcedPolicyError(
                f"no call of the chain had the tag or the name {self.answering!r}, so that the router has guarded "
                'nothing: name the call that writes the answer, chat.with_config(tags=["..."])'
            )
            WITNESS.on_chain_error(error, run_id=run_id)  # LangChain calls no handler after one that raises
            raise error

    def _begins(self, run: UUID, parent: UUID | None, inputs: Any) -> None:
        if not self.rules.terms.observes and parent is None:
            self._traces.begins(run)

    def _ends(self, run: UUID) -> None:
        self._traces.ends(run)


def deciding(handlers: Iterable[object]) -> list[UncertaintyRouterCallback]:
    """The routers among these handlers whose decisions are carried out."""
    routers = [handler for handler in handlers if isinstance(handler, UncertaintyRouterCallback)]
    return [router for router in routers if not router.rules.terms.observes]


def rules_of(owner: object, policy: Policy, escalate_to: Any, **terms: Any) -> Rules:
    """The rules that a router's or a guard's arguments make.

    Raises:
        InputError, BindingMismatchError: see `UncertaintyRouterCallback`.
    """
    target = target_of(escalate_to, policy)
    return Rules(owner, Terms(policy=policy, can_escalate=target is not None, **terms), target)


def observe(rules: Rules, draft: Draft[AIMessage]) -> None:
    """Log a decision, and dispatch it as a custom event where it belongs to a run.

    Answers let through are logged as INFO, others as WARNING; the record's attribute `semgrad_guard` holds the
    verdict's metadata. An observer must not end what it observes: its own errors are logged, with their traces.
    """
    try:
        verdict = one(Pending([draft], rules.terms).outcomes()).verdict
        level = logging.INFO if verdict.action == "answer" else logging.WARNING
        record = verdict.metadata()
        logger.log(level, "%s would be the decision: %s", verdict.action, _why(verdict), extra={METADATA_KEY: record})
        # A model that is not ours has no context in a batch: a decision about it is reported to the log only.
        manager = around(ensure_config())
        if manager.parent_run_id is not None:
            manager.on_custom_event(METADATA_KEY, record, run_id=manager.parent_run_id)
    except Exception:
        logger.exception("there is no decision about this answer")


def _why(verdict: Verdict) -> str:
    if verdict.reason is not None or verdict.uncertainty is None:
        return verdict.reason or "the answer has no score"
    return f"uncertainty {verdict.uncertainty:.4g} is within the threshold {verdict.threshold:.4g}"


class UncertaintyLangChainTracer(LangChainTracer):
    """LangChain's LangSmith tracer, which also writes verdicts into the metadata of the runs they are about.

        chat.invoke(question, config={"callbacks": [UncertaintyLangChainTracer()]})

    It takes the place of the tracer that LANGSMITH_TRACING adds: LangChain adds none where there is one. Runs can then
    be filtered by `semgrad_guard.action`, `semgrad_guard.uncertainty` and so on. It is a tracer of its own, because
    runs are sent as soon as they end.
    """

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> Run:
        """Add the verdict, if the answer carries one, before the run is sent."""
        verdict, run = verdict_of(response), self.run_map.get(str(run_id))
        if verdict is not None and run is not None:
            run.add_metadata(trace_fields(verdict.metadata()))
        return super().on_llm_end(response, run_id=run_id, **kwargs)
