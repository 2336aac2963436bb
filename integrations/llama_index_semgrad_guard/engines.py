"""Engines, each call of which is one question of the LLMs in it: guarded (`guarded`), and calibrated."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Unpack, cast, overload

from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import NodeWithScore, QueryBundle
from pydantic import TypeAdapter

from llama_index_semgrad_guard.records import Source, reporting, text_of
from llama_index_semgrad_guard.router import UncertaintyRouterCallback, whole, work_of
from semgrad_guard import METADATA_KEY
from semgrad_guard.adapters.examples import AnyGrader, RunOptions, calibrated
from semgrad_guard.adapters.recorded_runs import Runs
from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Outcome, Steps, Work, adrive, answered, drive, sealing
from semgrad_guard.records import digest_of

QUESTION_KEY = "question"
"""In a record: the digest of the question."""


@overload
def guarded(engine: BaseQueryEngine, router: UncertaintyRouterCallback) -> GuardedQueryEngine: ...
@overload
def guarded(engine: BaseChatEngine, router: UncertaintyRouterCallback, *, memory: Any = None) -> GuardedChatEngine: ...
def guarded(engine: Any, router: UncertaintyRouterCallback, *, memory: Any = None) -> Any:
    """The engine, each call of which is one question: delivered if every answer in it is let through.

        llm = SemGradLLM(model="pocket", router=router)
        engine = guarded(index.as_query_engine(llm=llm, response_mode="refine"), router)

    The first answer that is not let through ends the question, whatever the engine would make of it, and its target or
    the abstain message answers instead, without passages. A stream is read to its end, and leaves in one piece.

    Args:
        engine: answers by LLMs whose `router` is this one; helpers among them have `router=False`.
        router: decides, and has the target for questions that are not let through.
        memory: a chat engine's, which gets question and abstention; default: the engine's own.

    Raises:
        InputError: not an engine, not a router, or not a memory of a chat engine.
    """
    UncertaintyRouterCallback.require(router)
    if memory is not None and not (isinstance(engine, BaseChatEngine) and isinstance(memory, BaseMemory)):
        raise InputError(f"memory is that of a chat engine, not a {type(memory).__name__} of a {type(engine).__name__}")
    if isinstance(engine, BaseChatEngine):
        return GuardedChatEngine(engine, router, memory)
    if isinstance(engine, BaseQueryEngine):
        return GuardedQueryEngine(engine, router)
    raise InputError(
        f"a {type(engine).__name__} is neither a query engine nor a chat engine; around an agent, a workflow or code "
        "of your own, use `with asking(router)`"
    )


class _OnePiece:
    """A decided answer; it can be read as a stream, too."""

    response: Any

    @property
    def response_gen(self) -> Generator[str]:
        """The answer in one piece."""
        yield self.response or ""

    async def async_response_gen(self) -> AsyncGenerator[str]:
        """The answer in one piece."""
        yield self.response or ""

    def get_response(self) -> Any:
        """Itself: it is whole."""
        return self

    def print_response_stream(self) -> None:
        """Print the answer."""
        print(self.response or "", end="", flush=True)


class Answer(_OnePiece, Response):
    """A query engine's decided answer."""


class ChatAnswer(_OnePiece, AgentChatResponse):
    """A chat engine's decided answer."""


def _asked(
    router: UncertaintyRouterCallback, question: str, run: Work, source: Source
) -> Steps[tuple[Outcome[Any], dict[str, Any]]]:
    """The outcome of one question, and its response's metadata: the engine's own where its response goes out."""
    terms = reporting(router.terms, source)
    outcome = yield from answered(router, run, whole, lambda _: work_of(router.escalate_to, question), terms=terms)
    record = {**outcome.verdict.metadata(keep_draft=terms.keep_draft), QUESTION_KEY: digest_of(question)}
    own = getattr(outcome.answer, "metadata", None) if outcome.verdict.escalated is None else None
    return outcome, {**(own or {}), METADATA_KEY: record}


class GuardedQueryEngine(BaseQueryEngine):
    """A query engine of questions (`guarded`). Its prompts are the engine's own."""

    def __init__(self, engine: BaseQueryEngine, router: UncertaintyRouterCallback) -> None:
        super().__init__(engine.callback_manager)
        self.engine, self.router = engine, router

    def get_prompts(self) -> PromptDictType:
        """The engine's prompts."""
        return self.engine.get_prompts()

    def update_prompts(self, prompts_dict: PromptDictType) -> None:
        """Change the engine's prompts."""
        self.engine.update_prompts(prompts_dict)

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {}

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The engine's passages."""
        return self.engine.retrieve(query_bundle)

    def _query(self, query_bundle: QueryBundle) -> Any:
        return drive(sealing(self._steps(query_bundle)))

    async def _aquery(self, query_bundle: QueryBundle) -> Any:
        return await adrive(sealing(self._steps(query_bundle)))

    def _steps(self, bundle: QueryBundle) -> Steps[Any]:
        run = Work(lambda: self.engine.query(bundle), lambda: self.engine.aquery(bundle))
        outcome, metadata = yield from _asked(self.router, bundle.query_str, run, "query_engine")
        response = outcome.answer
        if outcome.verdict.escalated is None and isinstance(response, PydanticResponse):
            response.metadata = metadata
            return response
        return Answer(outcome.verdict.text, getattr(response, "source_nodes", []), metadata)


class GuardedChatEngine(BaseChatEngine):
    """A chat engine of questions (`guarded`). After an abstention its memory holds the question and these words."""

    def __init__(self, engine: BaseChatEngine, router: UncertaintyRouterCallback, memory: Any = None) -> None:
        self.engine, self.router = engine, router
        self.memory: Any = getattr(engine, "_memory", None) if memory is None else memory

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> Any:
        """Ask a question."""
        return drive(sealing(self._steps(message, chat_history)))

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> Any:
        """Ask a question, on the event loop."""
        return await adrive(sealing(self._steps(message, chat_history)))

    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> Any:
        """As `chat`; the answer can be read as a stream, and comes in one piece."""
        return self.chat(message, chat_history)

    async def astream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> Any:
        """As `stream_chat`, on the event loop."""
        return await self.achat(message, chat_history)

    def reset(self) -> None:
        """Forget the conversation."""
        self.engine.reset()

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The conversation as the engine remembers it."""
        return self.engine.chat_history

    def _steps(self, message: str, history: list[ChatMessage] | None) -> Steps[Any]:
        run = Work(lambda: self.engine.chat(message, history), lambda: self.engine.achat(message, history))
        outcome, metadata = yield from _asked(self.router, message, run, "chat_engine")
        response, text = outcome.answer, outcome.verdict.text
        own = response is not None and outcome.verdict.escalated is None
        if not own and self.memory is not None:
            yield Work(lambda: _remember(self.memory, message, text))
        nodes, sources = getattr(response, "source_nodes", []), getattr(response, "sources", [])
        return ChatAnswer(response=text, sources=sources, source_nodes=nodes, metadata=metadata)


def _remember(memory: Any, question: str, answer: str) -> None:
    """Put a question, unless the engine has before it ended, and the text that the user saw into a memory."""
    held = memory.get_all()
    if not held or held[-1].role != MessageRole.USER or held[-1].content != question:
        memory.put(ChatMessage(role=MessageRole.USER, content=question))
    memory.put(ChatMessage(role=MessageRole.ASSISTANT, content=answer))


# Calibrations.

Engine = BaseQueryEngine | BaseChatEngine | BaseWorkflowAgent | Callable[[Any], Any]
"""What answers: an engine, guarded or not; an agent; or a function of the input, for own code and workflows."""


class EngineOptions(RunOptions, total=False):
    """The options of a calibration of an engine."""

    name: str
    output: Callable[[Any], str]


def calibrate_engine(
    engine: Engine, examples: Iterable[Any], grader: AnyGrader, **options: Unpack[EngineOptions]
) -> Calibration:
    """Run an engine on examples, grade what it delivers, and calibrate on the scores of its questions.

    The score of a question is that of its least certain answer: each call of a `SemGradLLM` counts, but those of
    helpers (`router=False`). While it runs nothing is withheld, unless by guards with other routers within the engine.
    The promise is about prompts of the shape that the engine's own had. An example without a call counts as one without
    a score.

        calibration = calibrate_engine(engine, [("Who built it?", ["Ada"]), ...], "token-f1", alpha=0.1, delta=0.05)
        router = UncertaintyRouterCallback(Policy.from_calibration(calibration))

    Where each question took one answer the calibration is also one of answers: the LLM keeps its promise by itself.
    Else it is for engines in `guarded`, and for code within `asking`.

    Args:
        engine: the query engine, chat engine or agent as it will run, or a function that answers an input. Chat engines
            and agents begin each example anew, and the conversations that are under way stay as they are.
        examples: pairs of (input, right answer or answers), or {"input": ..., "answers": [...]}. An input is a
            question; for chat engines and agents also a conversation, as {"role": ..., "content": ...} for each
            message, whose last one is the question.
        grader: a grader, its name ("contains", "exact-match", "judge=openai:..."), or a function of the delivered text
            and the right answers.
        alpha: the largest error rate among the questions that are let through, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        record: a file (JSON Lines) that keeps every answer with its prompts; an interrupted run resumes from it.
            Calibrations on one record share delta (`calibration.tries`).
        name: the engine's name and version, which a record is bound to; change it with documents, prompts or code.
        max_concurrency: how many inputs are answered together.
        output: finds the delivered text in the engine's response; default: the whole of it.
        progress: a line on stderr, a function of (done, in all), or False.
        **options: others of `ExampleCalibration`.

    Raises:
        CalibrationError: an example's answer is scored in another way than those before it.
        InputError: not an engine, bad examples, an unknown grader or option, or a record of another engine.
        GradingError: the grader cannot do its work.
        Exception: the engine's own.
    """
    return drive(_calibrated(engine, examples, grader, **options))


async def acalibrate_engine(
    engine: Engine, examples: Iterable[Any], grader: AnyGrader, **options: Unpack[EngineOptions]
) -> Calibration:
    """Like `calibrate_engine`, by the engine's asynchronous methods."""
    return await adrive(_calibrated(engine, examples, grader, **options))


def _calibrated(
    engine: Any,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    name: str = "",
    output: Callable[[Any], str] = text_of,
    **options: Any,
) -> Steps[Calibration]:
    if not isinstance(engine, (BaseQueryEngine, BaseChatEngine, BaseWorkflowAgent)) and not callable(engine):
        raise InputError(f"a {type(engine).__name__} is no engine, agent or function that could be asked")
    router = engine.router if isinstance(engine, GuardedQueryEngine | GuardedChatEngine) else None
    if not callable(output):
        raise InputError("output is a function of what the engine returns")
    return calibrated(_Runs(engine, name=name, router=router, output=output), examples, grader, **options)


@dataclass(frozen=True)
class _Runs(Runs):
    """Runs of one engine."""

    engine: Any

    def response_of(self, given: Any) -> Steps[Any]:
        """The engine's response, a stream read to its end."""
        response = yield self._fresh(given)
        yield whole(response)
        return response

    def _fresh(self, given: Any) -> Work:
        """The engine's work on an input, in a conversation that begins with it."""
        engine = self.engine
        if isinstance(engine, BaseQueryEngine):
            if not isinstance(given, str):
                raise InputError(f"a query engine is asked a text, not a {type(given).__name__}")
            return Work(lambda: engine.query(given), lambda: engine.aquery(given))
        if not isinstance(engine, BaseChatEngine | BaseWorkflowAgent):
            return Work.calling(engine, given, instead="acalibrate_engine")
        history, question = _conversation(given)
        if isinstance(engine, BaseChatEngine):
            fresh = _with_memory(engine, history)
            return Work(lambda: fresh.chat(question), lambda: fresh.achat(question))

        async def run() -> Any:
            agent = cast("Any", engine)
            return await agent.run(user_msg=question, chat_history=history)

        return Work(lambda: asyncio.run(run()), run)


def _with_memory(engine: Any, history: list[ChatMessage]) -> Any:
    """A copy of a chat engine that remembers this conversation alone."""
    fresh = copy.copy(engine)
    if isinstance(engine, GuardedChatEngine):
        fresh.engine = _with_memory(engine.engine, history)
        fresh.memory = getattr(fresh.engine, "_memory", None)
    elif not hasattr(engine, "_memory"):
        raise InputError(
            f"a {type(engine).__name__} keeps its conversation elsewhere than LlamaIndex's engines, and the examples "
            "would share it: calibrate a function that makes an engine for each question, "
            "lambda question: make().chat(question)"
        )
    else:
        fresh._memory = ChatMemoryBuffer.from_defaults(chat_history=history, token_limit=2**20)  # pyright: ignore[reportUnknownMemberType]
    return fresh


_CONVERSATION: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


def _conversation(given: Any) -> tuple[list[ChatMessage], str]:
    """The messages before the last, and the last, which is the question."""
    if isinstance(given, str):
        return [], given
    try:
        *history, question = _CONVERSATION.validate_python(given)
    except ValueError as error:
        raise InputError(
            'a chat engine is asked a text, or a conversation of messages {"role": ..., "content": ...}, not '
            f"{given!r:.100}"
        ) from error
    return history, question.content or ""
