"""`calibrate_chain`: a calibration made from a chain's real prompts to its model, and from its real answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import coerce_to_runnable
from langchain_core.runnables.config import ensure_config, merge_configs

from semgrad_guard.adapters.calibrating import Aggregate, LabelledDraft, Ran
from semgrad_guard.adapters.code_identity import chain_identity, sixteen_digits
from semgrad_guard.adapters.examples import AnyGrader, ChosenEstimator, RunOptions, calibrated
from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.guard import Recorder, Steps, adrive, drive, recording

Chain = Runnable[Any, Any] | Callable[[Any], Any]
Output = Callable[[Any], str]
"""The delivered text in a chain's output."""


class ChainOptions(RunOptions, total=False):
    """The options of a calibration of a chain."""

    aggregate: Aggregate
    answering: str | None
    output: Output | None
    config: RunnableConfig | None


def calibrate_chain(
    chain: Chain,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    alpha: float,
    delta: float,
    **options: Unpack[ChainOptions],
) -> Calibration:
    """Run a chain on examples, grade its answers, and calibrate the scores of its answering model.

    While it runs nothing is withheld, whatever guards are in it. The promise of the calibration is about prompts of
    the shape that the chain's own prompts had: an answer to another prompt is judged, and not promised.

        calibration = calibrate_chain(rag, [("Who built it?", ["Ada"]), ...], "token-f1", alpha=0.1, delta=0.05)
        router = UncertaintyRouterCallback(policy=Policy.from_calibration(calibration))

    Args:
        chain: the chain as it will run, with a `ChatSemGrad` that answers.
        examples: pairs of (input, right answer or answers), or {"input": ..., "answers": [...]}.
        grader: a grader, its name ("contains", "exact-match", "judge=openai:..."), or a function of the delivered text
            and the right answers.
        alpha: the largest error rate among the answers that are let through, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        record: a file (JSON Lines) that keeps every answer with its prompt; an interrupted run resumes there, once
            three of its inputs were answered again as before. `calibration.n_recorded` counts what came from it.
            Calibrations on one record share delta (`calibration.tries`).
        max_concurrency: how many inputs are answered together (`chain.batch`).
        aggregate: where an example makes several scored calls: "one" is an error, "max" takes the least certain one.
            Then the calibration is for a judge of the chain by the worst of its scores: a guard around one of its calls
            refuses it.
        answering: a tag or a run name of the call that writes the answer; other calls do not count.
        output: finds the delivered text in the chain's output; needed where that is neither a text, a message, an
            agent's state nor a mapping with an "answer".
        progress: a line on stderr, a function of (done, in all), or False.
        config: for every run.
        **options: others of `ExampleCalibration` (`estimator`, `extra_prompts`, `slots`, `labels`,
            `upstream`, `grid`, `robust`, `copies`, `tries`, `confidence`).

    Raises:
        CalibrationError: an example made no scored call, or several of which none is chosen.
        InputError: bad examples, an unknown grader or option, or a record of another chain.
        GradingError: the grader cannot do its work.
        Exception: whatever the chain raises.
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
    config: RunnableConfig | None = None,
    output: Output | None = None,
    **options: Any,
) -> Steps[Calibration]:
    return calibrated(lambda estimator: _Runs(chain, config, output, estimator), examples, grader, **options)


class _Runs:
    """Runs of one chain, several inputs at a time, each with its drafts."""

    def __init__(
        self,
        chain: Chain,
        config: RunnableConfig | None,
        output: Output | None,
        estimator: ChosenEstimator,
    ) -> None:
        self._chain: Runnable[Any, Any] = coerce_to_runnable(cast("Any", chain))
        self._config, self._output, self._estimator = config, output or _text, estimator
        estimator.require_fitted([self._chain, config], models=(BaseLanguageModel,))

    @property
    def identity(self) -> str:
        """Sixteen hex digits for the chain's steps, prompts, code and settings. Its answers identify its model."""
        graph = self._chain.get_graph().to_json()
        prompts = [repr(prompt) for prompt in self._chain.get_prompts()]
        settings = sorted((name, repr(value)) for name, value in (self._config or {}).get("configurable", {}).items())
        made_of = chain_identity([self._chain, self._output], models=(BaseLanguageModel,))
        return sixteen_digits(json.dumps([graph, prompts, settings, made_of], default=str))

    def run(self, inputs: Sequence[Any]) -> list[Ran | Exception]:
        """Run the inputs together."""
        listeners = [_Calls() for _ in inputs]
        with recording(self._estimator.recorded) as recorder:
            outputs = self._chain.batch(list(inputs), self._configs(listeners), return_exceptions=True)
        return self._ran(outputs, listeners, recorder)

    async def arun(self, inputs: Sequence[Any]) -> list[Ran | Exception]:
        """Like `run`, on the event loop."""
        listeners = [_Calls() for _ in inputs]
        with recording(self._estimator.recorded) as recorder:
            outputs = await self._chain.abatch(list(inputs), self._configs(listeners), return_exceptions=True)
        return self._ran(outputs, listeners, recorder)

    def _configs(self, listeners: Sequence[_Calls]) -> list[RunnableConfig]:
        size: RunnableConfig = {"max_concurrency": len(listeners)}
        shared = ensure_config(self._config)
        return [merge_configs(shared, size, {"callbacks": [listener]}) for listener in listeners]

    def _ran(self, outputs: Sequence[Any], listeners: Sequence[_Calls], recorder: Recorder) -> list[Ran | Exception]:
        drafts = [_drafts(recorder, listener, alone=len(listeners) == 1) for listener in listeners]
        return [
            output if isinstance(output, Exception) else Ran(self._output(output), made)
            for output, made in zip(outputs, drafts, strict=True)
        ]


class _Calls(BaseCallbackHandler):
    """The model calls of one run of the chain: their tags and names, by run id."""

    run_inline = True

    def __init__(self) -> None:
        self.labels: dict[str, frozenset[str]] = {}

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: Any, **known: Any) -> None:
        """Note the call's labels."""
        names = [known.get("name"), *(known.get("tags") or ())]
        self.labels[str(run_id)] = frozenset(name for name in names if isinstance(name, str))


def _drafts(recorder: Recorder, calls: _Calls, *, alone: bool) -> list[LabelledDraft]:
    """The drafts of one run of the chain.

    Raises:
        CalibrationError: several ran together, and it cannot be told which one a draft belongs to.
    """
    if not alone and any(draft.source is None for draft in recorder.drafts):
        raise CalibrationError(
            "It cannot be told which example a scored call belongs to. Run one at a time (max_concurrency=1)."
        )
    return [
        LabelledDraft(draft, calls.labels.get(draft.source or "", frozenset()))
        for draft in recorder.drafts
        if alone or draft.source in calls.labels
    ]


def _text(output: Any) -> str:
    """The delivered text in the usual outputs of chains."""
    if isinstance(output, str):
        return output
    if isinstance(output, BaseMessage):
        return str(output.text)
    if isinstance(output, Mapping):
        state = cast("Mapping[str, Any]", output)
        if state.get("answer") is not None:
            return _text(state["answer"])
        if state.get("messages"):  # an agent's state
            return _text(state["messages"][-1])
    raise InputError(
        f"the chain returned a {type(cast('object', output)).__name__}, in which the delivered text is not known; pass "
        "output=lambda returned: ..., which finds it"
    )
