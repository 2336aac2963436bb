"""`calibrate_engine`: a calibration from an engine's real prompts and its delivered texts."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack, cast

from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms.llm import LLM
from llama_index.core.memory import ChatMemoryBuffer

from llama_index_semgrad_guard.agent_steps import GuardedAgent
from llama_index_semgrad_guard.agents import GuardedFunctionAgent
from llama_index_semgrad_guard.authorship import NOBODY, Aggregate, Answering
from llama_index_semgrad_guard.chat_engine import GuardedChatEngine
from llama_index_semgrad_guard.query_engine import GuardedQueryEngine, whole
from llama_index_semgrad_guard.records import text_of
from llama_index_semgrad_guard.routing import Guarded
from semgrad_guard import Policy
from semgrad_guard.adapters.calibrating import LabelledDraft, Ran, least_certain
from semgrad_guard.adapters.code_identity import chain_identity, sixteen_digits
from semgrad_guard.adapters.examples import AnyGrader, ChosenEstimator, RunOptions, calibrated
from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.guard import Steps, Work, adrive, drive, recording

Engine = BaseQueryEngine | BaseChatEngine | GuardedAgent


class EngineOptions(RunOptions, total=False):
    """The options of a calibration of an engine."""

    aggregate: Aggregate | None
    answering: Answering | None
    output: Callable[[Any], str]


def calibrate_engine(
    engine: Engine,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    alpha: float,
    delta: float,
    **options: Unpack[EngineOptions],
) -> Calibration:
    """Run an engine on examples, grade its texts, and calibrate the scores as a guard around it computes them.

    While it runs nothing is withheld. The promise of the calibration is about prompts of the shape that the engine's
    own prompts had: an answer to another prompt is judged, and not promised. An example for which nothing is retrieved
    counts as one without a score.

        calibration = calibrate_engine(engine, [("Who built it?", ["Ada"]), ...], "token-f1", alpha=0.1, delta=0.05)
        guarded = GuardedQueryEngine(engine, Policy.from_calibration(calibration))

    Args:
        engine: the query or chat engine as it will run, with a `SemGradLLM` that answers; guarded or not. A chat engine
            begins each example anew, its own memory untouched. Or a guarded agent, with any threshold: of a function
            agent's run, the least certain message that it judges counts.
        examples: pairs of (input, right answer or answers), or {"input": ..., "answers": [...]}. An input is a
            question; for a chat engine also a conversation, as {"role": ..., "content": ...} for each message, whose
            last one is the question.
        grader: a grader, its name ("contains", "exact-match", "judge=openai:..."), or a function of the delivered text
            and the right answers.
        alpha: the largest error rate among the answers that are let through, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        record: a file (JSON Lines) that keeps every answer with its prompt; an interrupted run resumes from it, once
            three of its inputs were answered again as before. `calibration.n_recorded` counts its answers.
            Calibrations on one record share delta (`calibration.tries`).
        max_concurrency: how many inputs are answered together.
        aggregate, answering: as in `GuardedQueryEngine`, and the same there; a guarded engine brings its own.
        output: finds the delivered text in the engine's response; default: the whole of it.
        progress: a line on stderr, a function of (done, in all), or False.
        **options: others of `ExampleCalibration` (`estimator`, `extra_prompts`, `slots`, `labels`,
            `upstream`, `grid`, `robust`, `copies`, `tries`, `confidence`).

    Raises:
        CalibrationError: an example's answer has no score, or is scored in another way than those before it.
        InputError: not an engine, bad examples, an unknown grader or option, or a record of another engine.
        GradingError: the grader cannot do its work.
        Exception: the engine's own.
    """
    return drive(_calibrated(engine, examples, grader, alpha=alpha, delta=delta, **options))


async def acalibrate_engine(
    engine: Engine,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    alpha: float,
    delta: float,
    **options: Unpack[EngineOptions],
) -> Calibration:
    """Like `calibrate_engine`, by the engine's asynchronous methods."""
    return await adrive(_calibrated(engine, examples, grader, alpha=alpha, delta=delta, **options))


def _calibrated(
    engine: Engine,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    aggregate: Aggregate | None = None,
    answering: Answering | None = None,
    output: Callable[[Any], str] = text_of,
    **options: Any,
) -> Steps[Calibration]:
    guarded = _guarded(engine, aggregate, answering)
    return calibrated(lambda estimator: _Runs(guarded, output, estimator), examples, grader, **options)


class _Runs:
    """Runs of one engine, guarded so that its scores are those that a guard computes."""

    def __init__(
        self,
        guarded: GuardedQueryEngine | GuardedChatEngine | GuardedAgent,
        output: Callable[[Any], str],
        estimator: ChosenEstimator,
    ) -> None:
        self._guarded, self._output, self._estimator = guarded, output, estimator
        self._inner: Any = guarded if isinstance(guarded, GuardedAgent) else guarded._engine  # pyright: ignore[reportPrivateUsage] - the guard's other half
        estimator.require_fitted([guarded], models=(LLM,))

    @property
    def identity(self) -> str:
        """Sixteen hex digits for the engine's kind, its prompts, code and settings, and the calls that count."""
        inner = self._inner
        prompts: Mapping[str, Any] = inner.get_prompts() if hasattr(inner, "get_prompts") else {}
        texts = {name: prompt.get_template() for name, prompt in prompts.items()}
        counting = self._guarded.routing.counting
        made_of = chain_identity([inner, self._output], models=(LLM,))
        facts = [type(inner).__qualname__, sorted(texts.items()), counting.aggregate, counting.answering_name, made_of]
        return sixteen_digits(json.dumps(facts, default=repr))

    def run(self, inputs: Sequence[Any]) -> list[Ran | Exception]:
        """Answer the inputs, in a thread for each where there are several."""
        if len(inputs) == 1:
            return [drive(self._ran(inputs[0]))]
        with ThreadPoolExecutor(len(inputs)) as pool:
            return list(pool.map(drive, map(self._ran, inputs)))

    async def arun(self, inputs: Sequence[Any]) -> list[Ran | Exception]:
        """Like `run`, on the event loop."""
        return list(await asyncio.gather(*(adrive(self._ran(given)) for given in inputs)))

    def _ran(self, given: Any) -> Steps[Ran | Exception]:
        try:
            with recording(self._estimator.recorded) as recorder:
                response = yield from self._response(given)
            drafts = recorder.drafts[-1:]  # of guards within guards the outermost decides last
            if drafts and isinstance(self._guarded, GuardedFunctionAgent):
                drafts = [least_certain(recorder.drafts)]
            verdict = drafts[0].verdict if drafts else None
            unwritten = verdict is not None and verdict.reason == NOBODY and verdict.model == "none"
            if verdict is not None and verdict.status == "unscored" and not unwritten:
                raise CalibrationError(f"The answer has no score to calibrate: {verdict.reason}. Leave it out.")
            return Ran(self._output(response), [LabelledDraft(draft) for draft in drafts])
        except Exception as error:  # noqa: BLE001 - raised by `collect`, with its example
            return error

    def _response(self, given: Any) -> Steps[Any]:
        guarded = self._guarded
        if isinstance(guarded, GuardedAgent):
            (history, question), agent = _conversation(given), cast("Any", guarded)

            async def run() -> Any:
                return await agent.run(user_msg=question, chat_history=history)

            return (yield Work(lambda: asyncio.run(run()), run))
        if isinstance(guarded, GuardedQueryEngine):
            if not isinstance(given, str):
                raise InputError(f"a query engine is asked a text, not a {type(given).__name__}")
            response = yield Work(lambda: guarded.query(given), lambda: guarded.aquery(given))
            return (yield from whole(response))[0]
        history, question = _conversation(given)
        fresh, inner = copy.copy(guarded), copy.copy(self._inner)
        inner._memory = ChatMemoryBuffer.from_defaults(chat_history=history, token_limit=2**20)  # pyright: ignore[reportUnknownMemberType]
        fresh._engine, fresh._memory = inner, inner._memory  # pyright: ignore[reportPrivateUsage] - the guard's other half
        return (yield Work(lambda: fresh.chat(question), lambda: fresh.achat(question)))


def _guarded(
    engine: Engine, aggregate: Aggregate | None, answering: Answering | None
) -> GuardedQueryEngine | GuardedChatEngine | GuardedAgent:
    """The engine with a guard around it; while drafts are recorded, no guard withholds."""
    if isinstance(engine, Guarded | GuardedAgent):
        if aggregate is not None or answering is not None:
            raise InputError("a guarded engine brings its own aggregate and answering; leave them out here")
        return cast("GuardedQueryEngine | GuardedChatEngine | GuardedAgent", engine)
    if isinstance(engine, BaseWorkflowAgent):
        raise InputError("an agent is calibrated with its guard: GuardedFunctionAgent(..., policy=Policy(threshold=0))")
    kind = GuardedChatEngine if isinstance(engine, BaseChatEngine) else GuardedQueryEngine
    return kind(cast("Any", engine), Policy(threshold=0.0), aggregate=aggregate, answering=answering)


def _conversation(given: Any) -> tuple[list[ChatMessage], str]:
    """The messages before the last, and the last, which is the question."""
    if isinstance(given, str):
        return [], given
    if not isinstance(given, (list, tuple)) or not given:
        raise InputError(
            f"a chat engine is asked a text or a conversation, not a {type(cast('object', given)).__name__}"
        )
    messages: list[ChatMessage] = []
    for message in cast("Sequence[Any]", given):
        if isinstance(message, Mapping) and {"role", "content"} <= cast("Mapping[str, Any]", message).keys():
            message = ChatMessage(role=cast("Any", message["role"]), content=cast("Any", message["content"]))
        if not isinstance(message, ChatMessage):
            raise InputError('a message of a conversation is {"role": ..., "content": ...}')
        messages.append(message)
    return messages[:-1], messages[-1].content or ""
