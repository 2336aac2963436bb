"""`calibrate_chain`: a calibration of whole questions, from a chain's real prompts and its delivered texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Unpack, cast
from uuid import uuid4

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import coerce_to_runnable

from langchain_semgrad_guard.chains import Guarded
from semgrad_guard.adapters.calibrating import LabelledDraft, Ran
from semgrad_guard.adapters.examples import AnyGrader, ChosenEstimator, RunOptions, calibrated
from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.guard import Steps, Work, adrive, asking, drive, recording

Chain = Runnable[Any, Any] | Callable[[Any], Any]
_CONVERSATIONS = ("thread_id", "session_id")
"""The names by which LangGraph and LangChain know conversations."""


class ChainOptions(RunOptions, total=False):
    """The options of a calibration of a chain."""

    name: str
    output: Callable[[Any], str]
    config: RunnableConfig | Callable[[Any], RunnableConfig] | None


def calibrate_chain(
    chain: Chain,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    alpha: float,
    delta: float,
    **options: Unpack[ChainOptions],
) -> Calibration:
    """Run a chain on examples, grade what it delivers, and calibrate on the scores of its questions.

    The score of a question is that of its least certain answer: each call of a model of semgrad-guard's counts, but
    those of helpers (`router=False`). While it runs nothing is withheld, unless by other routers' `guarded` chains
    within it. The promise is about prompts of the shape that the chain's own had.

        calibration = calibrate_chain(rag, [("Who built it?", ["Ada"]), ...], "token-f1", alpha=0.1, delta=0.05)
        router = UncertaintyRouterCallback(Policy.from_calibration(calibration))

    Where each question took one answer the calibration is also one of answers: the model keeps its promise by itself.
    Else it is for chains in `guarded`, and for code within `asking`.

    Args:
        chain: the chain as it will run, guarded or not, or a function of the input.
        examples: pairs of (input, right answer or answers), or {"input": ..., "answers": [...]}.
        grader: a grader, its name ("contains", "exact-match", "judge=openai:..."), or a function of the delivered text
            and the right answers.
        alpha: the largest error rate among the questions that are let through, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        record: a file (JSON Lines) that keeps every answer with its prompts; an interrupted run resumes from it, once
            three of its inputs were answered again as before. Calibrations on one record share delta
            (`calibration.tries`).
        name: the chain's name and version, which a record is bound to; change it with documents, prompts or code.
        max_concurrency: how many inputs are answered together.
        output: finds the delivered text in the chain's output; needed where that is neither a text, a message, an
            agent's state nor a mapping with an "answer" or an "output".
        config: for every run, or a function of the input. Each example has a conversation of its own: a `thread_id`, a
            `session_id` and all other names that the chain needs, where the config is no function.
        progress: a line on stderr, a function of (done, in all), or False.
        **options: others of `ExampleCalibration`.

    Raises:
        CalibrationError: an example's answer is scored in another way than those before it.
        InputError: bad examples, an unknown grader or option, or a record of another chain.
        GradingError: the grader cannot do its work.
        Exception: the chain's own.
    """
    return drive(_calibrated(chain, examples, grader, alpha=alpha, delta=delta, **options))


async def acalibrate_chain(
    chain: Chain,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    alpha: float,
    delta: float,
    **options: Unpack[ChainOptions],
) -> Calibration:
    """Like `calibrate_chain`, by the chain's asynchronous methods."""
    return await adrive(_calibrated(chain, examples, grader, alpha=alpha, delta=delta, **options))


def _calibrated(
    chain: Chain,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    name: str = "",
    output: Callable[[Any], str] | None = None,
    config: RunnableConfig | Callable[[Any], RunnableConfig] | None = None,
    **options: Any,
) -> Steps[Calibration]:
    runnable: Runnable[Any, Any] = coerce_to_runnable(cast("Any", chain))
    return calibrated(
        lambda estimator: _Runs(runnable, name, output or _text, config, estimator),
        examples,
        grader,
        aggregate="question",
        **options,
    )


class _Runs:
    """Runs of one chain, each in a conversation of its own."""

    def __init__(
        self,
        chain: Runnable[Any, Any],
        name: str,
        output: Callable[[Any], str],
        config: RunnableConfig | Callable[[Any], RunnableConfig] | None,
        estimator: ChosenEstimator,
    ) -> None:
        self._chain, self._output, self._config, self._estimator = chain, output, config, estimator
        self.identity = name

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
        chain = self._chain
        try:
            config = self._config(given) if callable(self._config) else self._fresh(self._config or {})
            with recording(self._estimator.recorded) as recorder, ExitStack() as scope:
                if isinstance(chain, Guarded):
                    recorder.question = scope.enter_context(asking(chain.router))
                made = yield Work(lambda: chain.invoke(given, config), lambda: chain.ainvoke(given, config))
            unscored = [one.verdict.reason for one in recorder.drafts if one.verdict.status == "unscored"]
            if unscored:
                raise CalibrationError(f"The answer has no score to calibrate: {unscored[0]}. Leave it out.")
            return Ran(self._output(made), [LabelledDraft(draft) for draft in recorder.drafts])
        except Exception as error:  # noqa: BLE001 - raised by `collect`, with its example
            return error

    def _fresh(self, config: RunnableConfig) -> RunnableConfig:
        """The config with a conversation of its own."""
        known = config.get("configurable", {})
        needed = [spec.id for spec in self._chain.config_specs if spec.id not in known and spec.default is None]
        fresh = dict.fromkeys((*_CONVERSATIONS, *needed), uuid4().hex)
        return {**config, "configurable": {**known, **fresh}}


def _text(output: Any) -> str:
    """The delivered text in the usual outputs of chains."""
    if isinstance(output, str):
        return output
    if isinstance(output, BaseMessage):
        return str(output.text)
    if isinstance(output, Mapping):
        state = cast("Mapping[str, Any]", output)
        for name in ("answer", "output"):
            if state.get(name) is not None:
                return _text(state[name])
        if state.get("messages"):  # an agent's state
            return _text(state["messages"][-1])
    raise InputError(
        f"the chain returned a {type(cast('object', output)).__name__}, in which the delivered text is not known; pass "
        "output=lambda returned: ..., which finds it"
    )
