"""`GuardedQueryEngine`: a query engine around another, which delivers only what a policy lets through."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_semgrad_guard.aggregation import Aggregate, aggregate_for
from llama_index_semgrad_guard.calls import CallCollector
from llama_index_semgrad_guard.records import get_verdict
from llama_index_semgrad_guard.routing import Router
from llama_index_semgrad_guard.streams import Whole, adeliver, alive, awhole, deliver, live
from llama_index_semgrad_guard.targets import Target, aask, ask
from semgrad_guard import METADATA_KEY, Policy, Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import ABSTAIN_MESSAGE, abstained, escalated, require_sequel
from semgrad_guard.guard.modes import Mode


@dataclass(frozen=True)
class _Draft:
    """A whole response, what was decided about it, and whether it came as a stream."""

    response: Whole
    verdict: Verdict
    streamed: bool


class GuardedQueryEngine(BaseQueryEngine):
    """Asks the inner engine, scores what its `SemGradLLM` generated, and answers, escalates or abstains.

        engine = GuardedQueryEngine(index.as_query_engine(llm=SemGradLLM()), policy=Policy(threshold=0.004))
        engine.query("What is the capital of France?").metadata["semgrad_guard"]["action"]

    Structured responses are never replaced by text: where one is withheld and nothing structured stands in for it,
    a query raises, whatever the mode.

    Args:
        engine: any query engine whose answers come from a `SemGradLLM`; answers of other LLMs are unscored.
        policy: what to let through; `on_unscored` also decides about queries for which nothing was retrieved.
        escalate_to: asked, with the original query, for what is not let through.
        abstain_message: delivered instead of an answer that is neither let through nor escalated.
        mode: "enforce" (streams are read to their end before anything is delivered: what a user has seen cannot be
            taken back), "raise" (an error for what is not let through), "annotate" (nothing is withheld and streams are
            live, the record in the metadata once they have ended) or "observe" (the same, without the record:
            verdicts go to the event handlers only).
        aggregate: which of a query's calls count: "last" (the default; only that one is scored), "max" (the default
            of the accumulate modes) or "mean".
        keep_draft: keep withheld answers in the metadata.

    Raises:
        InputError: the engine is guarded already, or there is no such mode or aggregate.
        BindingMismatchError: at once, if the target's calibration does not follow this one's; at the first answer, if
            the policy was calibrated for something else.
        LowConfidenceError: at a query; see above.
    """

    def __init__(
        self,
        engine: BaseQueryEngine,
        policy: Policy,
        *,
        escalate_to: Target | None = None,
        abstain_message: str = ABSTAIN_MESSAGE,
        mode: Mode = "enforce",
        aggregate: Aggregate | None = None,
        keep_draft: bool = False,
    ) -> None:
        if isinstance(engine, GuardedQueryEngine):
            raise InputError("the engine is guarded already; use escalate_to to chain guarded engines")
        super().__init__(engine.callback_manager)
        self._engine, self._escalate_to = engine, escalate_to
        self._router = Router(
            policy=policy,
            source="query_engine",
            mode=mode,
            abstain_message=abstain_message,
            keep_draft=keep_draft,
            can_escalate=escalate_to is not None,
            aggregate=aggregate_for(engine, aggregate),
        )
        if isinstance(escalate_to, GuardedQueryEngine):
            require_sequel(policy, escalate_to._router.policy)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"engine": self._engine}

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The inner engine's passages. `synthesize` is not passed on: it would go round the guard."""
        return self._engine.retrieve(query_bundle)

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._router.collecting() as collector:
            response = self._engine.query(query_bundle)
            if isinstance(response, AsyncStreamingResponse):
                raise InputError("the engine answered a sync query with an async stream; use aquery")
            if isinstance(response, StreamingResponse) and not self._router.withholds:
                return live(response, collector, self._router)
            whole = response.get_response() if isinstance(response, StreamingResponse) else response
        draft = self._decided(whole, collector, streamed=whole is not response)
        target = self._target(draft.verdict)
        settled = self._settled(draft) if target is None else self._escalated(draft, ask(target, query_bundle))
        return deliver(settled, draft.streamed)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._router.collecting() as collector:
            response = await self._engine.aquery(query_bundle)
            if isinstance(response, AsyncStreamingResponse) and not self._router.withholds:
                return alive(response, collector, self._router)
            if isinstance(response, StreamingResponse) and not self._router.withholds:
                return live(response, collector, self._router)
            whole = await awhole(response)
        draft = await asyncio.to_thread(self._decided, whole, collector, streamed=whole is not response)
        target = self._target(draft.verdict)
        settled = self._settled(draft) if target is None else self._escalated(draft, await aask(target, query_bundle))
        return adeliver(settled, draft.streamed)

    # Deciding.

    def _decided(self, response: Whole, collector: CallCollector, *, streamed: bool) -> _Draft:
        if METADATA_KEY in (response.metadata or {}):
            raise InputError("the inner engine's response has been decided about already; guard it once")
        structured = isinstance(response, PydanticResponse)
        verdict = self._router.decided(str(response), collector.calls, structured=structured)
        return _Draft(response, verdict, streamed)

    def _target(self, verdict: Verdict) -> Target | None:
        """Who must answer instead."""
        return self._escalate_to if verdict.action == "escalate" and verdict.enforced else None

    def _settled(self, draft: _Draft) -> Whole:
        """The response for a draft that is not escalated."""
        if draft.verdict.action == "answer" or not draft.verdict.enforced:
            return self._recorded(draft.response, draft.verdict)
        if isinstance(draft.response, PydanticResponse):
            raise self._router.refused(draft.verdict, "Text cannot stand in for a structured answer.")
        verdict = abstained(draft.verdict, self._router.abstain_message)
        return self._recorded(replace(draft.response, response=verdict.text), verdict)

    def _escalated(self, draft: _Draft, answer: Any) -> Whole:
        """The response for an escalated draft, with the target's passages where it has its own."""
        if isinstance(draft.response, PydanticResponse) and not isinstance(answer, PydanticResponse):
            kind = type(answer).__name__
            raise self._router.refused(draft.verdict, f"The target must answer with a structure, not with a {kind}.")
        if isinstance(answer, (Response, PydanticResponse)):
            verdict = escalated(draft.verdict, get_verdict(answer) or str(answer))
            return self._recorded(answer, verdict)
        if not isinstance(answer, (str, Verdict)):
            raise InputError(f"the escalation target returned a {type(answer).__name__}; a string or a response is due")
        verdict = escalated(draft.verdict, answer)
        return self._recorded(Response(verdict.text, draft.response.source_nodes, draft.response.metadata), verdict)

    def _recorded(self, response: Whole, verdict: Verdict) -> Whole:
        return replace(response, metadata=self._router.attached(response.metadata, verdict))
