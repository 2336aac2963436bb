"""`GuardedQueryEngine`: a query engine around another, which delivers only what a policy lets through.

Why: docs/adr/0054-guard-around-the-engine.md
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_semgrad_guard.authorship import Aggregate, Answering
from llama_index_semgrad_guard.calls import Turn
from llama_index_semgrad_guard.failures import asealed, sealed
from llama_index_semgrad_guard.passages import about_passages, passages
from llama_index_semgrad_guard.routing import Guarded, Routing, require_guardable, require_target
from llama_index_semgrad_guard.streams import (
    Said,
    Whole,
    adeliver,
    alive,
    awhole,
    deliver,
    is_live,
    live,
    require_response,
    whole,
)
from llama_index_semgrad_guard.targets import Target, aask, ask
from semgrad_guard import METADATA_KEY, Policy
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    ABSTAIN_MESSAGE,
    AbstainMessage,
    DecisionSink,
    Draft,
    Mode,
    OnError,
    Outcome,
    ain_time,
    arun,
    cancelling,
    in_time,
    off_loop,
    one,
    run,
    stopping,
)


class GuardedQueryEngine(Guarded, BaseQueryEngine):
    """Asks the inner engine, scores what its `SemGradLLM` generated, and answers, escalates or abstains.

        engine = GuardedQueryEngine(index.as_query_engine(llm=SemGradLLM()), policy=Policy(threshold=0.004))
        engine.query("What is the capital of France?").metadata["semgrad_guard"]["action"]

    The score is that of the call whose text the response is, however deep it was made; where several calls wrote it
    (accumulating synthesizers), the worst of theirs. Where that cannot be told (an engine of your own that joins or
    parses texts), the response is unscored. A withheld response keeps only the passages that retrievers found, and of
    its metadata only what is about them. Structured responses are never replaced by text: where one is withheld and
    nothing structured stands in for it, a query raises, whatever the mode.

    Args:
        engine: any query engine whose answers come from a `SemGradLLM`; answers of other LLMs are unscored.
        policy: what to let through; `on_unscored` also decides about queries for which nothing was retrieved.
        escalate_to: asked, with the original query, for what is not let through: a query engine, an LLM or a function.
        abstain_message: delivered instead of an answer that is neither let through nor escalated; a text, or a
            function of the verdict.
        mode: "enforce" (streams are read to their end before anything is delivered: what a user has seen cannot be
            taken back), "raise" (an error for what is not let through), "annotate" (nothing is withheld and streams are
            live, the record in the metadata once they have ended) or "observe" (the same, without the record:
            verdicts go to the event handlers only).
        aggregate: "max" or "mean" of the scores of all the model's calls; default: those that wrote the answer count.
        answering: which calls answer, where it cannot be told: the name of a component or method within which the model
            is asked ("MyEngine", "Refine.get_response"), or a function of a `ModelCall`. You vouch for it.
        keep_draft: keep withheld answers in the metadata.
        on_error: what becomes of an answer whose engine or target fails or is late: "raise" or "abstain".
        timeout: seconds for retrieving, generating, scoring and escalating together.
        monitor: watches the scores for drift, and the share of unscored answers.
        log: a `DecisionLog`, which every decision is written to.

    Raises:
        InputError: the engine is guarded already or streams structures, `escalate_to` cannot be asked, or a setting is
            none.
        BindingMismatchError: at once, if the target's calibration does not follow this one's; at the first answer, if
            the policy was calibrated for something else.
        LowConfidenceError: at a query; see above.
        AnswerFailedError: at a query whose engine fails after its model was asked, where `on_error` is "raise".
        DeadlineExceededError: at a query that takes longer than `timeout`, where `on_error` is "raise".
    """

    def __init__(
        self,
        engine: BaseQueryEngine,
        policy: Policy,
        *,
        escalate_to: Target | None = None,
        abstain_message: AbstainMessage = ABSTAIN_MESSAGE,
        mode: Mode = "enforce",
        aggregate: Aggregate | None = None,
        answering: Answering | None = None,
        keep_draft: bool = False,
        on_error: OnError = "raise",
        timeout: float | None = None,
        monitor: DriftMonitor | None = None,
        log: DecisionSink | None = None,
    ) -> None:
        if not isinstance(engine, BaseQueryEngine):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            raise InputError(f"a {type(engine).__name__} is no query engine; GuardedChatEngine guards chat engines")
        require_target(
            escalate_to,
            policy,
            kinds=(BaseQueryEngine, LLM),
            remedy="a query engine, an LLM or a function of the query is due",
        )
        super().__init__(engine.callback_manager)
        self._engine, self.escalate_to = engine, escalate_to
        self.routing = Routing.of(
            policy,
            source="query_engine",
            mode=mode,
            can_escalate=escalate_to is not None,
            abstain_message=abstain_message,
            keep_draft=keep_draft,
            on_error=on_error,
            timeout=timeout,
            monitor=monitor,
            log=log,
            aggregate=aggregate,
            answering=answering,
        )
        require_guardable(engine, self.routing.terms)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"engine": self._engine}

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The inner engine's passages; where answers may be withheld, without those that a model has had a part in.

        `synthesize` is not passed on: it would go round the guard.
        """
        turn, terms = Turn(query_bundle.query_str), self.routing.terms
        with turn.open():
            nodes = sealed(lambda: self._engine.retrieve(query_bundle), turn, terms)
        return passages(nodes, turn) if terms.withholds and turn.has_begun else nodes

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        asked, terms = _Asked(self, query_bundle), self.routing.terms
        if not terms.withholds:
            stop = terms.stop()
            with stopping(stop):
                response = asked.inner()
            if is_live(response):
                return asked.live(response, stop)
            return asked.delivered(one(run(terms, lambda: [asked.draft(response)], asked.target, stop=stop)))
        outcome = one(run(terms, lambda: [sealed(asked.drafted, asked.turn, terms)], asked.target))
        return deliver(asked.delivered(outcome), asked.streamed)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        asked, terms = _Asked(self, query_bundle), self.routing.terms
        if not terms.withholds:
            stop = terms.stop()
            with stopping(stop), cancelling(stop):
                response = await asked.ainner()
            if is_live(response):
                return asked.live(response, stop)
        else:
            stop, response = None, None

        async def drafts() -> list[Draft[Whole]]:
            return [await asealed(asked.adrafted(response), asked.turn, terms)]

        outcome = one(await arun(terms, drafts, asked.atarget, stop=stop))
        return adeliver(asked.delivered(outcome), asked.streamed)


class _Asked:
    """One query under way."""

    def __init__(self, guard: GuardedQueryEngine, query: QueryBundle) -> None:
        self._guard, self._query, self._routing = guard, query, guard.routing
        self._engine: BaseQueryEngine = guard._engine  # pyright: ignore[reportPrivateUsage] - this class is its other half
        self.turn = Turn(query.query_str)
        self._response: Whole | None = None
        self.streamed = False

    # The inner engine's part.

    def inner(self) -> RESPONSE_TYPE:
        """Ask the inner engine."""
        with self.turn.open():
            return require_response(in_time(lambda: self._engine.query(self._query)))

    async def ainner(self) -> RESPONSE_TYPE:
        """As `inner`, without blocking the event loop."""
        with self.turn.open():
            return require_response(await ain_time(self._engine.aquery(self._query)))

    def draft(self, response: RESPONSE_TYPE) -> Draft[Whole]:
        """The inner engine's whole response with its score."""
        with self.turn.open():
            self._response, delivery = in_time(lambda: whole(response))
        self.streamed = self._undecided(response) is not self._response
        return self._routing.draft(self.turn, delivery)

    async def adraft(self, response: RESPONSE_TYPE) -> Draft[Whole]:
        """As `draft`, without blocking the event loop."""
        with self.turn.open():
            self._response, delivery = await ain_time(awhole(response))
        self.streamed = self._undecided(response) is not self._response
        return await off_loop(lambda: self._routing.draft(self.turn, delivery))

    def drafted(self) -> Draft[Whole]:
        """Ask the inner engine, and score what it says."""
        return self.draft(self.inner())

    async def adrafted(self, response: RESPONSE_TYPE | None) -> Draft[Whole]:
        """As `drafted`; a response that has come already is not asked for again."""
        return await self.adraft(await self.ainner() if response is None else response)

    def live(self, response: RESPONSE_TYPE, stop: Any) -> RESPONSE_TYPE:
        """The inner engine's stream as it is; once it has ended, its metadata holds the record."""
        metadata = dict(response.metadata or {})
        if isinstance(response, AsyncStreamingResponse):
            steps = alive(cast("Any", response.response_gen), self.turn, self._routing, metadata, stop=stop)
            return AsyncStreamingResponse(steps, response.source_nodes, metadata)
        pieces = live(cast("Any", response).response_gen, self.turn, self._routing, metadata, stop=stop)
        return StreamingResponse(pieces, response.source_nodes, metadata)

    def _undecided(self, response: RESPONSE_TYPE) -> RESPONSE_TYPE:
        if METADATA_KEY in (response.metadata or {}):
            raise InputError("the inner engine's response has been decided about already; guard it once")
        return response

    # The target's part.

    def target(self, waiting: object) -> list[Any]:
        """Ask the target."""
        return [ask(cast("Target", self._guard.escalate_to), self._query, structured=self._structured)]

    async def atarget(self, waiting: object) -> list[Any]:
        """As `target`, without blocking the event loop."""
        return [await aask(cast("Target", self._guard.escalate_to), self._query, structured=self._structured)]

    @property
    def _structured(self) -> bool:
        return isinstance(self._response, PydanticResponse)

    # What goes out.

    def delivered(self, outcome: Outcome[Whole]) -> Whole:
        """The response for an outcome. Beside a text in the draft's place stand its passages, and no more of it."""
        verdict, response = outcome.verdict, outcome.answer
        if response is not self._response:
            self.turn.withhold()
        if response is None:
            nodes = passages(self._response.source_nodes, self.turn) if self._response else []
            metadata = about_passages(self._response.metadata, nodes) if self._response else {}
            response = Response(verdict.text, nodes, metadata)
        metadata = self._routing.attached(response.metadata, verdict, self.turn)
        if isinstance(response, Response) and not response.response:
            return Said("", response.source_nodes, metadata)
        return replace(response, metadata=metadata)
