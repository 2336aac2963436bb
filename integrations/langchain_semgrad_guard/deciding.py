"""`Deciding`: a chat model that asks its router before it returns, so that nothing in LangChain ever holds a draft.

    messages -> [the run begins, its router is known] -> draft -> score -> decision -> [the run ends with the outcome]

Histories, handlers, tracers, caches, checkpoints and errors come later. `invoke`, and runs in graphs and event streams,
go through `_generate`, which knows its run. `_stream` is not given one: `stream` calls it on a copy that knows who
decides.

Why: docs/decisions.md#0054
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, cast
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    CallbackManager,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers import LangChainTracer
from langchain_core.tracers._streaming import _StreamingCallbackHandler  # who wants tokens; LangGraph imports it, too
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run
from langchain_core.utils.utils import LC_ID_PREFIX
from langchain_core.utils.uuid import uuid7
from pydantic import ConfigDict, Field, PrivateAttr, SkipValidation, field_validator

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.router import ASKING, UncertaintyRouterCallback, answering_instead
from semgrad_guard import METADATA_KEY, Policy, Verdict
from semgrad_guard.errors import UnenforcedPolicyError
from semgrad_guard.guard import (
    Draft,
    HeldText,
    Outcome,
    Question,
    SentencePiece,
    Stop,
    StreamSteps,
    Terms,
    ThoughtPiece,
    Timeout,
    Work,
    arun_stream,
    is_escalating,
    question_of,
    run_stream,
    streamed,
)
from semgrad_guard.records import PromptForm, trace_fields

RunManager = CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun
Turns = list[BaseMessage]
Stops = list[str] | None
A_STRUCTURE = "A structure is owed, and no text can stand for it: an escalation target could answer in its form."


@dataclass(frozen=True)
class Decider:
    """Who decides about one answer, where that is known; and the callbacks of runs inside its run: the tracers' own."""

    router: UncertaintyRouterCallback | None
    question: Question | None
    inside: CallbackManager

    def terms(self, timeout: float | None) -> Terms | None:
        """How the answer is decided about; None: not at all. `timeout` holds where the router has none."""
        if self.router is None:
            return None
        terms = self.router.terms if self.question is None else self.question.terms
        if is_escalating(self.router):
            terms = replace(terms, can_escalate=False)
        return terms if terms.timeout is not None else replace(terms, timeout=timeout)


@dataclass
class Call:
    """One list of messages to answer, the options of the call, and how it is decided about.

    `is_live`: its pieces are wanted.
    """

    messages: list[BaseMessage]
    options: Mapping[str, Any]
    decider: Decider
    terms: Terms | None
    is_live: bool
    drafted: AIMessage | None = None

    @property
    def policy(self) -> Policy | None:
        """The policy by which its answer is decided about."""
        return None if self.terms is None else self.terms.policy

    @property
    def withholds(self) -> bool:
        """Whether its answer may be kept back."""
        return self.terms is not None and self.terms.withholds

    @property
    def owes_structure(self) -> bool:
        """Whether its answer has to be a call of a tool, or JSON."""
        form: Any = self.options.get("response_format") or self.options.get("format")
        is_text = isinstance(form, Mapping) and cast("Mapping[str, Any]", form).get("type") == "text"
        forced = self.options.get("tool_choice") not in (None, False, "auto", "none")
        return forced or not (is_text or not form)

    def draft(self, verdict: Verdict, message: AIMessage, prompt: PromptForm | None) -> Draft[AIMessage]:
        """The scored message as a draft, to be decided about."""
        calls, router = convert.calls_of(message), self.decider.router
        verdict = verdict.revised(tool_calls=calls)
        self.drafted = convert.decided(message, verdict)
        trusted = router is not None and router.trusts(calls) and not message.invalid_tool_calls
        owed = A_STRUCTURE if self.owes_structure else ""
        return Draft(verdict, self.drafted, prompt, trusted=trusted, irreplaceable=owed)

    def target_work(self) -> Work:
        """The work of the router's target."""
        router = cast("UncertaintyRouterCallback", self.decider.router)
        return answering_instead(
            router,
            self.messages,
            self.options,
            takes_state=router.target_takes_state,
            config={"callbacks": self.decider.inside},
            draft=self.drafted,
        )

    def delivered(self, outcome: Outcome[AIMessage]) -> AIMessage:
        """The message of an outcome."""
        verdict, draft = outcome.verdict, self.drafted or AIMessage("")
        keep_draft = self.terms is not None and self.terms.keep_draft
        calls_alone = self.withholds and not verdict.details.enforced and verdict.action != "answer"
        if outcome.answer is None or calls_alone:
            return convert.abstention(draft, verdict, keep_draft=keep_draft)
        if outcome.answer is not self.drafted:
            return convert.escalation(outcome.answer, verdict, draft, keep_draft=keep_draft)
        return convert.decided(draft, verdict, keep_draft=keep_draft)


class Deciding(BaseChatModel):
    """A chat model whose answers a router lets through, hands on or withholds before they leave it.

    The router is its field, or that of the run's config; two different ones are an error. LangChain's cache would keep
    decisions, and is left out.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    router: Annotated[UncertaintyRouterCallback | Literal[False] | None, SkipValidation] = None
    """The rules for its answers, wherever it is called. False: it is a helper, whose texts need no guard."""
    timeout: Timeout = None
    """Seconds for generating and scoring; beneath a router that sets no limit, for its target as well."""
    streaming: bool | None = None
    """True: handlers hear tokens in every run. False: answers are made whole."""
    disable_streaming: Literal[True] = Field(default=True, exclude=True)  # pyright: ignore[reportIncompatibleVariableOverride]
    """LangChain always finds True here, and so gives each run to `_generate`, which streams where that is wanted."""
    cache: Literal[False] = Field(default=False, exclude=True)  # pyright: ignore[reportIncompatibleVariableOverride]

    _decider: Decider | None = PrivateAttr(default=None)

    @field_validator("router", mode="before")
    @classmethod
    def _is_router(cls, router: Any) -> Any:
        return UncertaintyRouterCallback.read(router)

    def _live(self, call: Call) -> StreamSteps[Any, Draft[AIMessage]]:
        """The steps of writing an answer: its pieces, and then its draft (`call.draft`)."""
        raise NotImplementedError

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return dict(ASKING)

    # Runs.

    def _generate(self, messages: Turns, stop: Stops = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        result = ChatResult(generations=[])
        with closing(run_stream(self._steps(messages, stop, kwargs, run_manager))) as pieces:
            for piece in pieces:
                if isinstance(piece, ChatResult):
                    result = piece
                else:
                    run_manager.on_llm_new_token(piece.text, chunk=piece)
        return result

    async def _agenerate(
        self, messages: Turns, stop: Stops = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        result = ChatResult(generations=[])
        async with aclosing(arun_stream(self._steps(messages, stop, kwargs, run_manager))) as pieces:
            async for piece in pieces:
                if isinstance(piece, ChatResult):
                    result = piece
                else:
                    await run_manager.on_llm_new_token(piece.text, chunk=piece)
        return result

    def _stream(
        self, messages: Turns, stop: Stops = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        with closing(run_stream(self._steps(messages, stop, kwargs, run_manager, is_stream=True))) as pieces:
            yield from (piece for piece in pieces if not isinstance(piece, ChatResult))

    async def _astream(
        self, messages: Turns, stop: Stops = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(arun_stream(self._steps(messages, stop, kwargs, run_manager, is_stream=True))) as pieces:
            async for piece in pieces:
                if not isinstance(piece, ChatResult):
                    yield piece

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: Stops = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Answer piece by piece, live or by sentence; in one piece where the whole answer may be withheld."""
        model, config = self._deciding(config)
        return super(Deciding, model).stream(input, config, stop=stop, **kwargs)

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: Stops = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Like `stream`, on the event loop."""
        model, config = self._deciding(config)
        return super(Deciding, model).astream(input, config, stop=stop, **kwargs)

    # The decision.

    def _deciding(self, config: RunnableConfig | None) -> tuple[Self, RunnableConfig]:
        """A copy for one stream, which knows who decides, and the stream's config."""
        config = ensure_config(config)
        run_id = config.get("run_id") or uuid7()
        copy = self.model_copy(update={"disable_streaming": self.streaming is False})
        copy._decider = self._decider_of(CallbackManager.configure(config.get("callbacks"), self.callbacks), run_id)
        return copy, cast("RunnableConfig", {**config, "run_id": run_id})

    def _decider_of(self, run: CallbackManager | RunManager, run_id: UUID) -> Decider:
        """Who decides in a run: this model's router, or one that LangChain found in the config or in the context.

        Raises:
            UnenforcedPolicyError: two different routers; or the router of the question that is being asked is not this
                model's.
        """
        inside = CallbackManager(handlers=[], parent_run_id=run_id)
        tracers = [one for one in run.inheritable_handlers if isinstance(one, BaseTracer | TracingHandler)]
        # The tokens of an escalation's run are no part of the answer's stream.
        inside.set_handlers([one for one in tracers if not isinstance(one, _StreamingCallbackHandler)])
        inside.add_tags(run.inheritable_tags)
        inside.add_metadata(run.inheritable_metadata)
        if self.router is False:
            return Decider(None, None, inside)
        question = question_of(self.router)
        found = {one for one in (self.router, *run.handlers) if isinstance(one, UncertaintyRouterCallback)}
        if question is not None:
            found = {one for one in found if question.outward(one) in (None, question)}
        if len(found) > 1:
            raise UnenforcedPolicyError(
                f"{len(found)} routers, and only one can decide: attach one, as the model's field (router=...) or in "
                "the config"
            )
        return Decider(next(iter(found), None), question, inside)

    def _steps(
        self, messages: Turns, stop: Stops, options: dict[str, Any], run: RunManager | None, *, is_stream: bool = False
    ) -> StreamSteps[ChatGenerationChunk | ChatResult, None]:
        """The chunks of what is let through, as they come, where they are wanted; and the result, which has their id.

        They are wanted by a stream, and by a run to which a handler of streams listens, unless a user has chosen.
        """
        decider = self._decider if run is None else self._decider_of(run, run.run_id)
        if decider is None:
            raise UnenforcedPolicyError(
                "a call without a run, in which a router could not be found: call invoke, stream or batch"
            )
        listeners = () if run is None else run.handlers
        is_heard = any(isinstance(one, _StreamingCallbackHandler) for one in listeners)
        is_live = is_stream or (is_heard if self.streaming is None else self.streaming)
        named = {} if run is None else {"id": f"{LC_ID_PREFIX}-{run.run_id}"}  # else LangGraph shows the answer again
        given = {name: value for name, value in options.items() if name != "stream"}
        given |= {} if stop is None else {"stop": stop}
        call = Call(messages, given, decider, decider.terms(self.timeout), is_live)
        shown = _Shown()

        def show(step: Any) -> Iterator[ChatGenerationChunk | ChatResult]:
            message = call.delivered(cast("Outcome[AIMessage]", step)) if isinstance(step, Outcome) else None
            if is_live:
                chunk = shown.piece(step) if message is None else shown.last(message)
                yield ChatGenerationChunk(message=chunk.model_copy(update=named))
            if message is not None:
                yield ChatResult(generations=[ChatGeneration(message=message.model_copy(update=named))])

        yield from streamed(
            call.terms,
            self._live(call),
            lambda _: call.target_work(),
            show=show,
            stop=Stop(self.timeout) if call.terms is None else None,
            question=decider.question,
            is_recorded=self.router is not False,
        )


class TracingHandler(BaseCallbackHandler):
    """A handler of ours that traces, though it is not one of LangChain's tracers."""


class UncertaintyLangChainTracer(LangChainTracer):
    """LangChain's LangSmith tracer, which also writes verdicts into the metadata of the runs they are about.

        chat.invoke(question, config={"callbacks": [UncertaintyLangChainTracer()]})

    It takes the place of the tracer that LANGSMITH_TRACING adds: LangChain adds none where there is one. Runs can then
    be filtered by `semgrad_guard.action`, `semgrad_guard.uncertainty` and so on. It is a tracer of its own, because
    runs are sent as soon as they end.
    """

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> Run:
        """Add the verdict, if the answer carries one, before the run is sent."""
        verdict, run = convert.verdict_of(response), self.run_map.get(str(run_id))
        if verdict is not None and run is not None:
            run.add_metadata(trace_fields(verdict.metadata()))
        return super().on_llm_end(response, run_id=run_id, **kwargs)


class _Shown:
    """What has been shown of one answer, in chunks."""

    def __init__(self) -> None:
        self._text, self._thought, self._held = "", "", HeldText()
        self._passed = False

    def piece(self, piece: Any) -> AIMessageChunk:
        """A piece as a chunk: a text, a thought, a sentence that is let through, or a served model's own chunk."""
        if isinstance(piece, AIMessageChunk):
            metadata = {name: held for name, held in piece.response_metadata.items() if name != METADATA_KEY}
            changes = {"chunk_position": None, "response_metadata": metadata}  # the record is this guard's own
            self._passed, message = True, piece.model_copy(update=changes)
            if isinstance(message.content, str) and message.content:  # text that may turn out to be reasoning waits
                message = message.model_copy(update={"content": self._held.add(message.content)})
        elif isinstance(piece, ThoughtPiece):
            self._thought += piece.text
            message = AIMessageChunk(content="", additional_kwargs={convert.REASONING: piece.text})
        else:
            message = AIMessageChunk(content=piece.text if isinstance(piece, SentencePiece) else piece)
        self._text += convert.message_text(message)
        return message

    def last(self, message: AIMessage) -> AIMessageChunk:
        """The rest, with the record."""
        chunk, rest = convert.as_chunk(message), convert.message_text(message)[len(self._text) :]
        if self._passed:
            record = {name: held for name, held in message.response_metadata.items() if name == METADATA_KEY}
            thought = {name: held for name, held in message.additional_kwargs.items() if name == convert.REASONING}
            chunk = AIMessageChunk(content=rest, response_metadata=record, chunk_position="last")
            chunk.additional_kwargs = thought if self._held.held else {}
            return chunk
        if self._text or self._thought:
            chunk.content = rest
            if self._thought == chunk.additional_kwargs.get(convert.REASONING):
                del chunk.additional_kwargs[convert.REASONING]
        return chunk
