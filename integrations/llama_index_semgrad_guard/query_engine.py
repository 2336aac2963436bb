"""`GuardedQueryEngine`: a query engine around another, which delivers only the answers that a policy lets through.

Why: docs/adr/0054-guard-around-the-engine.md
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Unpack, cast, get_args

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

from llama_index_semgrad_guard.authorship import Delivery, about_passages, retrieved, with_passages
from llama_index_semgrad_guard.records import EXPECTED, completed, require_text
from llama_index_semgrad_guard.routing import (
    Guarded,
    GuardOptions,
    Routing,
    judges_by_sentence,
    reply_of,
    require_guardable,
    require_target,
    sealed,
)
from llama_index_semgrad_guard.streams import GuardedPieces, live
from llama_index_semgrad_guard.turn import Turn
from semgrad_guard import METADATA_KEY, Policy, Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    UNWRITTEN,
    Draft,
    Outcome,
    Refusal,
    Reply,
    SentencePiece,
    Steps,
    Stop,
    StreamSteps,
    Waiting,
    Work,
    adrive,
    answers,
    arun_stream,
    cancelling,
    drive,
    not_written,
    one,
    run_stream,
    stopping,
    streamed,
)

Whole = Response | PydanticResponse
Answer = str | Verdict | Response | PydanticResponse
Target = BaseQueryEngine | LLM | Callable[[str], Answer | Awaitable[Answer]]
"""Somewhere to escalate to: a query engine (guarded or not), an LLM, or a function of the query string."""


@dataclass
class TextResponse(Response):
    """A response whose text may be empty: the `str` of LlamaIndex's own would be "None"."""

    def __str__(self) -> str:
        return self.response or ""


@dataclass
class TextStream(StreamingResponse):
    """The same, as a stream."""

    def __str__(self) -> str:
        super().__str__()
        return self.response_txt or ""


@dataclass
class AsyncTextStream(AsyncStreamingResponse):
    """The same, as an async stream."""

    async def _async_str(self) -> str:
        await super()._async_str()
        return self.response_txt or ""


class GuardedQueryEngine(Guarded, BaseQueryEngine):
    """Runs the inner engine, scores its `SemGradLLM`'s answer, and answers, escalates or abstains.

        engine = GuardedQueryEngine(index.as_query_engine(llm=SemGradLLM()), policy=Policy(threshold=0.004))
        engine.query("What is the capital of France?").metadata["semgrad_guard"]["action"]

    The score is that of the call whose text the response is, however deep it was made; where several calls wrote it
    (accumulating synthesizers), the worst of theirs. Where the author is unknown (an engine of your own that joins or
    parses texts), the response is unscored. A withheld response keeps only the passages that retrievers found, and only
    their metadata. Structured responses are never replaced by text: where one is withheld, and no target answers with
    a structure, a query raises, whatever the mode.

    Args:
        engine: any query engine whose answers come from a `SemGradLLM`, or from an LLM whose server reports
            log-probabilities (`OpenAILike(..., logprobs=True, top_logprobs=5)`); answers of others are unscored.
        policy: which scores to let through; `on_unscored` also decides about queries for which nothing was retrieved.
        escalate_to: gets the original query of an answer that is not let through: a query engine, an LLM or a function.
        mode: "enforce" (streams are read to their end before anything is delivered, by sentence as far as a
            sentence's: a text that a user has seen cannot be taken back), "raise" (an error where an answer is not let
            through), "annotate" (nothing is withheld and streams are live, the record in the metadata once they have
            ended) or "observe" (the same, without the record: verdicts go to the event handlers only).
        **options: `abstain_message`, `aggregate`, `answering`, `by`, `on_doubt`, `keep_draft`, `on_error`, `timeout`,
            `monitor`, `log`: see `GuardOptions`.

    Raises:
        InputError: the engine is guarded already or streams structures, `escalate_to` cannot answer, or a setting is
            unknown or out of its range.
        BindingMismatchError: at once, if the target's calibration does not follow this one's; at the first answer, if
            the policy was calibrated for something else.
        LowConfidenceError: at a query, in mode "raise", or where a structure is withheld.
        AnswerFailedError: at a query whose engine fails after its model ran, where `on_error` is "raise".
        DeadlineExceededError: at a query that takes longer than `timeout`, where `on_error` is "raise".
    """

    def __init__(
        self,
        engine: BaseQueryEngine,
        policy: Policy,
        *,
        escalate_to: Target | None = None,
        **options: Unpack[GuardOptions],
    ) -> None:
        if not isinstance(engine, BaseQueryEngine):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            raise InputError(f"a {type(engine).__name__} is no query engine; GuardedChatEngine guards chat engines")
        remedy = "expected a query engine, an LLM or a function of the query"
        require_target(escalate_to, policy, kinds=(BaseQueryEngine, LLM), remedy=remedy)
        super().__init__(engine.callback_manager)
        self._engine, self.escalate_to = engine, escalate_to
        self.routing = Routing.of(policy, source="query_engine", can_escalate=escalate_to is not None, **options)
        require_guardable(engine, self.routing.terms)
        self._by_sentence = judges_by_sentence(engine, self.routing, options)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"engine": self._engine}

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The inner engine's passages; where answers may be withheld, without those that a model took part in.

        `synthesize` is not passed on: it would bypass the guard.
        """
        turn, terms = Turn(query_bundle.query_str), self.routing.terms
        with turn.open():
            nodes = drive(sealed(Work(lambda: self._engine.retrieve(query_bundle)).alone(), turn, terms))
        return retrieved(nodes, turn) if terms.withholds and turn.has_begun else nodes

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        query = _Query(self, query_bundle)
        response = drive(query.answered())
        if not (query.streamed and isinstance(response, Response)):
            return response
        return TextStream((text for text in [response.response or ""]), response.source_nodes, response.metadata)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        query = _Query(self, query_bundle)
        response = await adrive(query.answered())
        if not (query.streamed and isinstance(response, Response)):
            return response

        async def pieces() -> AsyncGenerator[str]:
            yield response.response or ""

        return AsyncTextStream(pieces(), response.source_nodes, response.metadata)


def _require_undecided(response: RESPONSE_TYPE) -> None:
    if METADATA_KEY in (response.metadata or {}):
        raise InputError("the inner engine's response has been decided about already; guard it once")


class _Query:
    """One query under way. `streamed`: the inner engine's response was a stream, which was read to its end."""

    def __init__(self, guard: GuardedQueryEngine, query: QueryBundle) -> None:
        self._target, self._query, self._routing = guard.escalate_to, query, guard.routing.now()
        self._engine: BaseQueryEngine = guard._engine  # pyright: ignore[reportPrivateUsage] - this class is its other half
        self._by_sentence = guard._by_sentence  # pyright: ignore[reportPrivateUsage]
        self._turn = Turn(query.query_str)
        self._response: Whole | None = None
        self.streamed = False

    def answered(self) -> Steps[RESPONSE_TYPE]:
        """The response; a live stream where nothing is withheld."""
        terms, turn = self._routing.terms, self._turn
        stop, turn.leaving = terms.stop(), self._routing.leaving() if self._by_sentence else None
        try:
            with stopping(stop), cancelling(stop):
                response = yield from sealed(self._inner(), turn, terms)
        except UNWRITTEN as error:
            return self._delivered(not_written(error, terms))
        if is_live(response) and (turn.leaving is not None or not terms.withholds):
            return self._live(response, stop)

        def drafted() -> Steps[list[Draft[Whole]]]:
            return sealed(self._drafts(response), turn, terms)

        outcomes = yield from answers(terms, Work.of(drafted), self._ask, stop=stop)
        return self._delivered(one(outcomes))

    def _inner(self) -> Steps[RESPONSE_TYPE]:
        """The inner engine's response."""
        with self._turn.open():
            run = Work(lambda: self._engine.query(self._query), lambda: self._engine.aquery(self._query))
            return require_response((yield run.in_time()))

    def _drafts(self, given: RESPONSE_TYPE) -> Steps[list[Draft[Whole]]]:
        """The inner engine's whole response with its score."""
        with self._turn.open():
            self._response, delivery = yield Work.of(lambda: whole(given)).in_time()
        _require_undecided(given)
        self.streamed = given is not self._response
        return [(yield Work(lambda: self._routing.draft(self._turn, delivery)))]

    def _live(self, response: RESPONSE_TYPE, stop: Stop) -> RESPONSE_TYPE:
        """The inner engine's stream, as far as it may leave; once it has ended, its metadata holds the record."""
        metadata, nodes = dict(response.metadata or {}), response.source_nodes
        pieces = cast("Any", response).response_gen
        if self._routing.terms.withholds:
            _require_undecided(response)
            nodes = retrieved(nodes, self._turn)
            metadata = about_passages(metadata, nodes)
            steps = self._let_through(response, nodes, metadata, stop)
        else:
            steps = live(pieces, self._turn, self._routing, metadata, stop=stop)
        if isinstance(response, AsyncStreamingResponse):
            return AsyncTextStream(arun_stream(steps), nodes, metadata)
        return TextStream(run_stream(steps), nodes, metadata)

    def _let_through(
        self, response: Any, nodes: list[NodeWithScore], metadata: dict[str, Any], stop: Stop
    ) -> StreamSteps[str, None]:
        """The sentences as they leave. `nodes` and `metadata` are those of a withheld answer until it has ended."""
        left = ""

        def hold(text: str) -> Response:
            self._response = Response(text, response.source_nodes, response.metadata)
            return self._response

        def show(step: Any) -> Sequence[str]:
            nonlocal left
            if isinstance(step, SentencePiece):
                left += step.text
                return (step.text,)
            delivered = self._delivered(step)
            nodes[:] = delivered.source_nodes
            metadata.update(delivered.metadata or {})
            rest = step.verdict.text.removeprefix(left)
            return (rest,) if rest else ()

        stream: Any = response.response_gen
        pieces = GuardedPieces(lambda: stream, lambda: stream, self._turn, self._routing, hold=hold)
        return streamed(self._routing.terms, pieces, self._ask, show=show, stop=stop)

    def _ask(self, waiting: Sequence[Waiting[Whole]]) -> Work:
        structured = isinstance(self._response, PydanticResponse)
        return Work.of(lambda: _ask_target(self._target, self._query, structured=structured))

    def _delivered(self, outcome: Outcome[Whole]) -> Whole:
        """The response for an outcome; a text in the draft's place comes with the draft's passages alone.

        A target's answer behind delivered sentences comes with its own passages as well.
        """
        verdict, response = outcome.verdict, outcome.answer
        if response is not self._response:
            self._turn.withhold()
        if response is None or verdict.is_continued:
            nodes = retrieved(self._response.source_nodes, self._turn) if self._response else []
            metadata = about_passages(self._response.metadata, nodes) if self._response else {}
            if response is not None:
                nodes, metadata = with_passages(nodes, response.source_nodes), {**metadata, **(response.metadata or {})}
            response = Response(verdict.text, nodes, metadata)
        metadata = self._routing.attached(response.metadata, verdict, self._turn)
        if isinstance(response, Response) and not response.response:
            return TextResponse("", response.source_nodes, metadata)
        return replace(response, metadata=metadata)


# Responses of engines, and of targets.


def require_response(response: Any) -> RESPONSE_TYPE:
    """An engine's result, if it is a response.

    Raises:
        InputError: it is something else; engines of the user's return any object.
    """
    if not isinstance(response, get_args(RESPONSE_TYPE)):
        raise InputError(f"the engine returned a {type(response).__name__}; {EXPECTED}")
    return response


def whole(response: RESPONSE_TYPE) -> Steps[tuple[Whole, Delivery]]:
    """A response with its stream, if it has one, read to the end; and its delivery.

    Raises:
        InputError: it holds no text, or its stream is async and the reader is not.
    """
    if isinstance(response, (StreamingResponse, AsyncStreamingResponse)):
        pieces: list[str] | None = None
        stream: Any = response.response_gen
        if is_live(response):
            pieces = (
                yield _async_pieces(stream)
                if isinstance(response, AsyncStreamingResponse)
                else Work(lambda: list(stream))
            )
        text = require_text(response.response_txt or "") if pieces is None else "".join(map(require_text, pieces))
        read = Response(text, response.source_nodes, response.metadata)
        return read, replace(Delivery.streamed(pieces or (), stream), text=text, holder=read)
    if isinstance(response, PydanticResponse):
        return response, Delivery(str(response), response)
    return response, Delivery("" if response.response is None else require_text(response.response), response)


def _async_pieces(stream: Any) -> Work:
    """The pieces of an async stream."""

    def refuse() -> NoReturn:
        raise InputError("the engine answered a sync query with an async stream; use aquery")

    async def read() -> list[str]:
        return [piece async for piece in stream]

    return Work(refuse, read)


def is_live(response: RESPONSE_TYPE) -> bool:
    """Whether a response is still to be written."""
    return isinstance(response, (StreamingResponse, AsyncStreamingResponse)) and response.response_txt is None


def _ask_target(target: Any, query: QueryBundle, *, structured: bool) -> Steps[list[Reply[Any] | Refusal]]:
    """A target's answer to a query, where a structure is due if the draft was one; a stream is read to its end.

    Raises:
        InputError: the target is async, or answers with something else.
    """
    if isinstance(target, BaseQueryEngine):
        response = yield Work(lambda: target.query(query), lambda: target.aquery(query))
        answer, _ = yield from whole(require_response(response))
    elif isinstance(target, LLM):
        text = query.query_str
        answer = completed((yield Work(lambda: target.complete(text), lambda: target.acomplete(text))))
    else:
        answer = yield Work.calling(target, query.query_str, instead="aquery")
    if structured and not isinstance(answer, PydanticResponse):
        return [Refusal(f"The target must answer with a structure, not with a {type(answer).__name__}.")]
    return [reply_of(answer, (Response, PydanticResponse))]
