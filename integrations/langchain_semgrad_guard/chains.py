"""Chains, each of whose runs is one question: guarded (`guarded`), and calibrated (`calibrate_chain`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack, cast
from uuid import uuid4

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.callbacks.manager import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import coerce_to_runnable
from langchain_core.runnables.config import patch_config
from pydantic import BaseModel

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.deciding import Deciding
from langchain_semgrad_guard.router import (
    UncertaintyRouterCallback,
    chat_model_in,
    fields_of,
    invoked,
    is_halted,
    is_task,
    only_asking,
    replying,
    require_runnable,
)
from semgrad_guard import METADATA_KEY, Verdict
from semgrad_guard.adapters.examples import AnyGrader, RunOptions, calibrated
from semgrad_guard.adapters.recorded_runs import Runs
from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import InputError, UnenforcedPolicyError
from semgrad_guard.guard import (
    Paused,
    Question,
    Reply,
    Steps,
    Work,
    adrive,
    answered,
    drive,
    is_escalating,
    is_withheld,
    question_of,
    sealing,
)

_KEPT = 1000
"""How many paused questions a chain remembers; of older ones it does not know which calls were let through."""

Abstention = Callable[[Any, Verdict], Any]
"""What stands for a withheld result, given the chain's input and the verdict, whose text is the abstain message."""


class Guarded(Runnable[Any, Any]):
    """A chain, each of whose runs is one question: see `guarded`."""

    def __init__(self, chain: Runnable[Any, Any], router: UncertaintyRouterCallback, abstain: Abstention) -> None:
        self.chain, self.router, self.abstain, self.name = chain, router, abstain, f"guarded_{chain.get_name()}"
        self._paused = OrderedDict[tuple[str, str], list[Verdict]]()

    @property
    def OutputType(self) -> Any:  # noqa: N802 - LangChain's name
        """The chain's own."""
        return self.chain.OutputType

    @property
    def config_specs(self) -> Any:
        """The chain's own."""
        return self.chain.config_specs

    def get_input_schema(self, config: RunnableConfig | None = None) -> Any:
        """The chain's own."""
        return self.chain.get_input_schema(config)

    def get_output_schema(self, config: RunnableConfig | None = None) -> Any:
        """The chain's own."""
        return self.chain.get_output_schema(config)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Ask one question."""

        def call(given: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> Any:
            return self._work(given, patch_config(config, callbacks=run_manager.get_child()), kwargs).call()

        return self._call_with_config(call, input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Like `invoke`, on the event loop."""

        async def call(given: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig) -> Any:
            return await self._work(given, patch_config(config, callbacks=run_manager.get_child()), kwargs).begin()

        return await self._acall_with_config(call, input, config)

    def _work(self, given: Any, config: RunnableConfig, kwargs: dict[str, Any]) -> Work:
        return Work.of(lambda: sealing(self._steps(given, config, kwargs)))

    def _steps(self, given: Any, config: RunnableConfig, kwargs: dict[str, Any]) -> Steps[Any]:
        """The chain's result, or what stands for it. A message carries the question's record."""
        chain, router = self.chain, self.router

        def run() -> Steps[Any]:
            with only_asking():
                question, earlier = cast("Question", question_of(router)), self._paused.pop(_place_of(config), [])
                if is_task(config) or given is None or type(given).__name__ == "Command":  # it resumes
                    question.verdicts += earlier
                result = yield invoked(chain, given, config, kwargs)
                if not isinstance(result, Paused) and (yield from is_halted(chain, result, config)):
                    result = Paused(_Interrupted(result))
            if question.refused is None and isinstance(result, Paused):
                self._remember(question, config)
            return result

        def ask(_: Any) -> Work:
            if is_escalating(router):
                raise InputError("the target asked the chain that it answers for")
            target, callbacks = router.escalate_to, cast("BaseCallbackManager", config.get("callbacks")).copy()
            for handler in [one for one in callbacks.handlers if isinstance(one, UncertaintyRouterCallback)]:
                callbacks.remove_handler(handler)  # no router of the run decides about an answer in the chain's place
            return replying(router, invoked(target, given, patch_config(config, callbacks=callbacks)), read=_reply)

        try:
            outcome = yield from answered(router, Work.of(run), lambda out: Work.at_once(partial(_text_of, out)), ask)
        except _Interrupted as pause:
            return pause.args[0]
        verdict, result = outcome.verdict, outcome.answer
        if result is None and is_withheld(verdict):
            return self.abstain(given, verdict)
        keep_draft = router.terms.keep_draft
        return convert.decided(result, verdict, keep_draft=keep_draft) if isinstance(result, AIMessage) else result

    # A graph that interrupts itself answers in several runs, which are one question.

    def _remember(self, question: Question, config: RunnableConfig) -> None:
        if (place := _place_of(config))[0]:  # without a thread nothing can be resumed
            self._paused[place] = list(question.verdicts)
        while len(self._paused) > _KEPT:
            self._paused.popitem(last=False)


class _Interrupted(Exception):  # noqa: N818 - no error: it ends a question that nothing is decided about
    """A graph has interrupted itself; its result, which tells that, goes out as it is."""


def _place_of(config: RunnableConfig) -> tuple[str, str]:
    """The conversation of a run, and its place in the graph around it; "" where there is none."""
    known = config.get("configurable", {})
    return str(known.get("thread_id", "")), str(known.get("checkpoint_ns", ""))


def guarded(
    chain: Runnable[Any, Any], router: UncertaintyRouterCallback, *, abstain: Abstention | None = None
) -> Guarded:
    """A chain, each of whose runs is one question: its own result where every guarded call is let through.

    The first call of a model that is not let through ends the question, and every later call ends at once. What comes
    out is the answer of the router's target, which gets the chain's input, or an abstention in the form of the chain's
    own output. Nothing inside of it is altered, so that a calibration of whole questions (`calibrate_chain`) holds.

    Models inside have this router as their field, or `router=False` where they are helpers (they condense a question,
    write a query or a title). A memory goes around: inside it keeps a question without its answer.

    Args:
        chain: any Runnable.
        router: the rules. Its target answers in the form of the chain.
        abstain: what stands for a withheld result, given the chain's input and the verdict, whose text is the abstain
            message. By default a text, a message, or a mapping with "messages", "answer" or "output", as the chain's
            own.

    Raises:
        InputError: not a Runnable, or not a router; or nothing can stand for what the chain returns: give `abstain`.
        UnenforcedPolicyError: a model in it has another router, or none; where the chain does not show its models, when
            such a one is called.
    """
    UncertaintyRouterCallback.require(router)
    require_runnable(chain, "a guarded chain")
    if not (abstain is None or callable(abstain)):
        raise InputError("abstain is a function of the chain's input and the verdict")
    for model in _models_in(chain):
        if not isinstance(model, Deciding) or (model.router is not False and model.router != router):
            raise UnenforcedPolicyError(
                f"{model.get_name()} in the chain does not have the question's router: give it there (router=router), "
                "wrap another provider's model (GuardedChatModel(model, router)), or declare a helper, whose texts "
                "need no guard (router=False)"
            )
    return Guarded(chain, router, abstain or _abstention(chain))


def _models_in(chain: Runnable[Any, Any]) -> list[BaseChatModel]:
    """The chat models that a chain shows."""
    try:
        nodes = chain.get_graph().nodes.values()
    except Exception:  # noqa: BLE001 - a graph is a courtesy: some are known with a config only
        return []
    return [model for node in nodes if (model := chat_model_in(node.data)) is not None]


def _reply(result: Any) -> Reply[Any]:
    """A target's answer in the chain's form.

    Raises:
        InputError: there is none.
    """
    if result is None:
        raise InputError("the escalation target returned nothing; it answers in the form of the chain")
    recorded = convert.stage_verdict(result) if isinstance(result, AIMessage) else None
    return Reply(_text_of(result) if recorded is None else recorded, result)


def _text_of(result: Any) -> str:
    found = convert.output_of(result)
    return convert.message_text(found) if isinstance(found, BaseMessage) else str(found)


# The form of an abstention.

_FIELDS = ("answer", "output", "messages")
"""The fields of a chain's output that hold its answer."""


def _abstention(chain: Runnable[Any, Any]) -> Abstention:
    output: Any = chain.OutputType
    if output is str:
        return _a_text
    if chat_model_in(chain) is not None or "BaseMessage" in repr(output) or "AIMessage" in repr(output):
        return _a_message
    is_object = isinstance(output, type) and issubclass(output, BaseModel)
    known = () if is_object else fields_of(chain, "output")
    if names := [name for name in _FIELDS if name in known]:
        return partial(_a_mapping, names)
    raise InputError(
        f"nothing can stand for a withheld {output}: give abstain=, a function of the chain's input and the verdict, "
        "whose text is the abstain message"
    )


def _a_text(given: Any, verdict: Verdict) -> str:
    return verdict.text


def _a_message(given: Any, verdict: Verdict) -> AIMessage:
    return AIMessage(content=verdict.text, response_metadata={METADATA_KEY: verdict.metadata()})


def _a_mapping(names: Sequence[str], given: Any, verdict: Verdict) -> dict[str, Any]:
    """The chain's input with these fields; without sources, which may hold a model's text."""
    fields = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {}
    turns = [*convert_to_messages(fields.get("messages") or []), _a_message(given, verdict)]
    return {**fields, **{name: turns if name == "messages" else verdict.text for name in names}}


# Calibrations.

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
    found = convert.output_of(returned)
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
        result = yield Work(lambda: chain.invoke(given, config), lambda: chain.ainvoke(given, config))
        if (yield from is_halted(chain.chain if isinstance(chain, Guarded) else chain, result, config)):
            raise InputError("the chain interrupts itself: calibrate a function of the input that also resumes it")
        return result

    def _fresh(self, config: RunnableConfig) -> RunnableConfig:
        """The config with a conversation of its own."""
        known = config.get("configurable", {})
        needed = [spec.id for spec in self.chain.config_specs if spec.id not in known and spec.default is None]
        fresh = dict.fromkeys((*_CONVERSATIONS, *needed), uuid4().hex)
        return {**config, "configurable": {**known, **fresh}}
