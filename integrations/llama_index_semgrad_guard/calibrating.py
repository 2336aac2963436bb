"""`calibrate_engine`: a calibration from what an engine really asks its model, and from what it really delivers."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms.llm import LLM
from llama_index.core.memory import ChatMemoryBuffer

from llama_index_semgrad_guard.authorship import NOBODY, Aggregate, Answering
from llama_index_semgrad_guard.chat_engine import GuardedChatEngine
from llama_index_semgrad_guard.query_engine import GuardedQueryEngine
from llama_index_semgrad_guard.records import text_of
from llama_index_semgrad_guard.routing import Guarded
from llama_index_semgrad_guard.streams import awhole, whole
from semgrad_guard import Policy
from semgrad_guard.adapters.calibrating import Collecting, LabelledDraft, Progress, Ran, acollect, collect
from semgrad_guard.adapters.chain_identity import chain_identity
from semgrad_guard.adapters.examples import AnyGrader, ExampleCalibration
from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.guard import Recorder, recording

Engine = BaseQueryEngine | BaseChatEngine


def calibrate_engine(
    engine: Engine,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    alpha: float,
    delta: float,
    record: str | Path | None = None,
    max_concurrency: int = 1,
    aggregate: Aggregate | None = None,
    answering: Answering | None = None,
    output: Callable[[Any], str] | None = None,
    progress: Progress | bool = True,
    **options: Any,
) -> Calibration:
    """Run an engine on examples, grade what it delivers, and calibrate the scores as a guard around it computes them.

    While it runs nothing is withheld. The promise of the calibration is about prompts of the shape that the engine's
    own prompts had: an answer to another prompt is judged, and promised nothing. An example for which nothing is
    retrieved counts as one without a score.

        calibration = calibrate_engine(engine, [("Who built it?", ["Ada"]), ...], "token-f1", alpha=0.1, delta=0.05)
        guarded = GuardedQueryEngine(engine, Policy.from_calibration(calibration))

    Args:
        engine: the query or chat engine as it will run, with a `SemGradLLM` that answers; guarded or not. A chat engine
            begins each example anew, its own memory untouched.
        examples: pairs of (input, right answer or answers), or {"input": ..., "answers": [...]}. An input is a
            question; for a chat engine also a conversation, as {"role": ..., "content": ...} for each turn, whose last
            one is the question.
        grader: a grader, its name ("contains", "exact-match", "judge=openai:..."), or a function of the delivered text
            and the right answers.
        alpha: the largest error rate among the answers that are let through, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        record: a file (JSON Lines) that keeps every answer with its prompt; an interrupted run goes on from there, once
            three of its inputs were answered again as before. `calibration.n_recorded` counts what came from it.
        max_concurrency: how many inputs are answered together.
        aggregate, answering: as in `GuardedQueryEngine`, and the same there; a guarded engine brings its own.
        output: finds the delivered text in the engine's response; default: the whole of it.
        progress: a line on stderr, a function of (done, in all), or False.
        **options: others of `ExampleCalibration` (`labels`, `upstream`, `grid`, `confidence`, `seed`).

    Raises:
        CalibrationError: an example's answer has no score, or is scored in another way than those before it.
        InputError: no engine, bad examples, an unknown grader or option, or a record of another engine.
        GradingError: the grader cannot do its work.
        Exception: whatever the engine raises.
    """
    job = ExampleCalibration(examples, grader, alpha=alpha, delta=delta, show=progress is True, **options)
    runs = _Runs(engine, aggregate, answering, output)
    return job(collect(job.examples, runs.run, runs.collecting(record, max_concurrency, progress)))


async def acalibrate_engine(
    engine: Engine,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    alpha: float,
    delta: float,
    record: str | Path | None = None,
    max_concurrency: int = 1,
    aggregate: Aggregate | None = None,
    answering: Answering | None = None,
    output: Callable[[Any], str] | None = None,
    progress: Progress | bool = True,
    **options: Any,
) -> Calibration:
    """Like `calibrate_engine`, by the engine's asynchronous methods."""
    job = ExampleCalibration(examples, grader, alpha=alpha, delta=delta, show=progress is True, **options)
    runs = _Runs(engine, aggregate, answering, output)
    return job(await acollect(job.examples, runs.arun, runs.collecting(record, max_concurrency, progress)))


class _Runs:
    """Runs of one engine, guarded so that its scores are those that a guard computes."""

    def __init__(
        self,
        engine: Engine,
        aggregate: Aggregate | None,
        answering: Answering | None,
        output: Callable[[Any], str] | None,
    ) -> None:
        self._guarded = _guarded(engine, aggregate, answering)
        self._output = output or _text

    def collecting(self, record: str | Path | None, max_concurrency: int, progress: Progress | bool) -> Collecting:
        """How the examples are answered."""
        return Collecting(
            chain=_fingerprint(self._guarded, self._output),
            at_once=max_concurrency,
            record=None if record is None else Path(record),
            progress=progress,
        )

    def run(self, inputs: Sequence[Any]) -> list[Ran | Exception]:
        """Answer the inputs, each in a thread of its own where there are several."""
        if len(inputs) == 1:
            return [self._one(inputs[0])]
        with ThreadPoolExecutor(len(inputs)) as pool:
            return list(pool.map(self._one, inputs))

    async def arun(self, inputs: Sequence[Any]) -> list[Ran | Exception]:
        """Like `run`, on the event loop."""
        return list(await asyncio.gather(*(self._aone(given) for given in inputs)))

    def _one(self, given: Any) -> Ran | Exception:
        try:
            with recording() as recorder:
                response = self._asked(given)
            return self._ran(response, recorder)
        except Exception as error:  # noqa: BLE001 - raised by whoever collects, with its example
            return error

    async def _aone(self, given: Any) -> Ran | Exception:
        try:
            with recording() as recorder:
                response = await self._aasked(given)
            return self._ran(response, recorder)
        except Exception as error:  # noqa: BLE001 - as above
            return error

    def _asked(self, given: Any) -> Any:
        if isinstance(self._guarded, GuardedQueryEngine):
            return whole(self._guarded.query(_question(given)))[0]
        history, question = _conversation(given)
        return _afresh(self._guarded, history).chat(question)

    async def _aasked(self, given: Any) -> Any:
        if isinstance(self._guarded, GuardedQueryEngine):
            return (await awhole(await self._guarded.aquery(_question(given))))[0]
        history, question = _conversation(given)
        return await _afresh(self._guarded, history).achat(question)

    def _ran(self, response: Any, recorder: Recorder) -> Ran:
        last = recorder.drafts[-1:]  # of guards within guards, the outermost decides last
        nobody = last and last[0].verdict.reason == NOBODY and last[0].verdict.model == "none"
        if last and last[0].verdict.status == "unscored" and not nobody:
            raise CalibrationError(f"The answer has no score to calibrate: {last[0].verdict.reason}. Leave it out.")
        return Ran(self._output(response), [LabelledDraft(draft) for draft in last])


def _guarded(
    engine: Engine, aggregate: Aggregate | None, answering: Answering | None
) -> GuardedQueryEngine | GuardedChatEngine:
    """The engine with a guard around it; while drafts are recorded, no guard withholds."""
    if isinstance(engine, Guarded):
        if aggregate is not None or answering is not None:
            raise InputError("a guarded engine brings its own aggregate and answering; leave them out here")
        return cast("GuardedQueryEngine | GuardedChatEngine", engine)
    kind = GuardedChatEngine if isinstance(engine, BaseChatEngine) else GuardedQueryEngine
    return kind(cast("Any", engine), Policy(threshold=0.0), aggregate=aggregate, answering=answering)


def _afresh(guarded: GuardedChatEngine, history: list[ChatMessage]) -> GuardedChatEngine:
    """The chat engine with this history, and a memory of its own."""
    inner: Any = copy.copy(guarded._engine)  # pyright: ignore[reportPrivateUsage] - the guard's other half
    inner._memory = ChatMemoryBuffer.from_defaults(chat_history=history, token_limit=2**20)  # pyright: ignore[reportUnknownMemberType]
    fresh = copy.copy(guarded)
    fresh._engine, fresh._memory = inner, inner._memory  # pyright: ignore[reportPrivateUsage]
    return fresh


def _question(given: Any) -> str:
    if not isinstance(given, str):
        raise InputError(f"a query engine is asked a text, not a {type(given).__name__}")
    return given


def _conversation(given: Any) -> tuple[list[ChatMessage], str]:
    """The turns before the last, and the last, which is the question."""
    if isinstance(given, str):
        return [], given
    if not isinstance(given, (list, tuple)) or not given:
        raise InputError(
            f"a chat engine is asked a text or a conversation, not a {type(cast('object', given)).__name__}"
        )
    turns = [_turn(each) for each in cast("Sequence[Any]", given)]
    return turns[:-1], turns[-1].content or ""


def _turn(given: Any) -> ChatMessage:
    if isinstance(given, ChatMessage):
        return given
    if isinstance(given, Mapping) and {"role", "content"} <= cast("Mapping[str, Any]", given).keys():
        return ChatMessage(role=cast("Any", given["role"]), content=cast("Any", given["content"]))
    raise InputError('a turn of a conversation is {"role": ..., "content": ...}')


def _text(response: Any) -> str:
    """The delivered text of a response."""
    return text_of(response)


def _fingerprint(guarded: GuardedQueryEngine | GuardedChatEngine, output: Callable[[Any], str]) -> str:
    """Sixteen hex digits for an engine's kind, its prompts, code and settings, and what counts."""
    inner: Any = guarded._engine  # pyright: ignore[reportPrivateUsage] - the guard's other half
    prompts: Mapping[str, Any] = inner.get_prompts() if hasattr(inner, "get_prompts") else {}
    texts = {name: prompt.get_template() for name, prompt in prompts.items()}
    counting = guarded.routing.counting
    made_of = chain_identity([inner, output], models=(LLM,))
    said = [type(inner).__qualname__, sorted(texts.items()), counting.aggregate, counting.answering_name, made_of]
    return hashlib.sha256(json.dumps(said, default=repr).encode()).hexdigest()[:16]
