"""`calibrate_chain`: a calibration of whole questions, from a chain's real prompts and its delivered texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, cast
from uuid import uuid4

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import coerce_to_runnable

from langchain_semgrad_guard.chains import Guarded
from langchain_semgrad_guard.messages import output_of
from semgrad_guard.adapters.calibrating import Runs
from semgrad_guard.adapters.examples import AnyGrader, RunOptions, calibrated
from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Steps, Work, adrive, drive

Chain = Runnable[Any, Any] | Callable[[Any], Any]
_CONVERSATIONS = ("thread_id", "session_id")
"""The names by which LangGraph and LangChain know conversations."""


class ChainOptions(RunOptions, total=False):
    """The options of a calibration of a chain."""

    name: str
    output: Callable[[Any], str]
    config: RunnableConfig | Callable[[Any], RunnableConfig] | None


def calibrate_chain(
    chain: Chain, examples: Iterable[Any], grader: AnyGrader, **options: Unpack[ChainOptions]
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
        record: a file (JSON Lines) that keeps every answer with its prompts; an interrupted run resumes from it.
            Calibrations on one record share delta (`calibration.tries`).
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
    return drive(_calibrated(chain, examples, grader, **options))


async def acalibrate_chain(
    chain: Chain, examples: Iterable[Any], grader: AnyGrader, **options: Unpack[ChainOptions]
) -> Calibration:
    """Like `calibrate_chain`, by the chain's asynchronous methods."""
    return await adrive(_calibrated(chain, examples, grader, **options))


def _text(returned: Any) -> str:
    """The delivered text in the usual outputs of chains."""
    found = output_of(returned)
    if isinstance(found, BaseMessage):
        return str(found.text)
    if isinstance(found, str):
        return found
    raise InputError(
        f"the chain returned a {type(found).__name__}, in which the delivered text is not known; pass output=lambda "
        "returned: ..., which finds it"
    )


def _calibrated(
    chain: Chain,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    name: str = "",
    output: Callable[[Any], str] = _text,
    config: RunnableConfig | Callable[[Any], RunnableConfig] | None = None,
    **options: Any,
) -> Steps[Calibration]:
    if not (isinstance(chain, Runnable | Mapping) or callable(chain)):
        raise InputError(f"a chain is a Runnable or a function of the input, not a {type(chain).__name__}")
    given: Any = config
    if not (given is None or isinstance(given, dict) or callable(given)) or not callable(output):
        raise InputError("config is a dict or a function of the input, output a function of what the chain returns")
    runnable: Runnable[Any, Any] = coerce_to_runnable(cast("Any", chain))
    router = runnable.router if isinstance(runnable, Guarded) else None
    runs = _Runs(runnable, config or {}, name=name, router=router, output=output)
    return calibrated(runs, examples, grader, **options)


@dataclass(frozen=True)
class _Runs(Runs):
    """Runs of one chain."""

    chain: Runnable[Any, Any]
    config: RunnableConfig | Callable[[Any], RunnableConfig]

    def response_of(self, given: Any) -> Steps[Any]:
        """The chain's output."""
        chain, config = self.chain, self.config(given) if callable(self.config) else self._fresh(self.config)
        return (yield Work(lambda: chain.invoke(given, config), lambda: chain.ainvoke(given, config)))

    def _fresh(self, config: RunnableConfig) -> RunnableConfig:
        """The config with a conversation of its own."""
        known = config.get("configurable", {})
        needed = [spec.id for spec in self.chain.config_specs if spec.id not in known and spec.default is None]
        fresh = dict.fromkeys((*_CONVERSATIONS, *needed), uuid4().hex)
        return {**config, "configurable": {**known, **fresh}}
