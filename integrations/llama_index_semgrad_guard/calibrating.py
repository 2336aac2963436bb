"""`calibrate_engine`: a calibration of whole questions, from an engine's real prompts and its delivered texts."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Unpack, cast

from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from pydantic import TypeAdapter

from llama_index_semgrad_guard.engines import GuardedChatEngine, GuardedQueryEngine
from llama_index_semgrad_guard.records import text_of
from llama_index_semgrad_guard.targets import whole
from semgrad_guard.adapters.calibrating import Runs
from semgrad_guard.adapters.examples import AnyGrader, RunOptions, calibrated
from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Steps, Work, adrive, drive

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
