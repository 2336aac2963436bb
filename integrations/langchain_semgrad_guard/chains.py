"""`guarded`: a chain, each of whose runs is one question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.callbacks.manager import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import patch_config
from pydantic import BaseModel

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.deciding import Deciding
from langchain_semgrad_guard.router import UncertaintyRouterCallback, only_asking
from langchain_semgrad_guard.targets import chat_model_in, fields_of, invoked, replying, require_runnable
from semgrad_guard import METADATA_KEY, Verdict
from semgrad_guard.errors import InputError, UnenforcedPolicyError
from semgrad_guard.guard import Reply, Steps, Work, answered, is_escalating, is_withheld, sealed

Abstention = Callable[[Any, Verdict], Any]
"""What stands for a withheld result, given the chain's input and the verdict, whose text is the abstain message."""


class Guarded(Runnable[Any, Any]):
    """A chain, each of whose runs is one question: see `guarded`."""

    def __init__(self, chain: Runnable[Any, Any], router: UncertaintyRouterCallback, abstain: Abstention) -> None:
        self.chain, self.router, self.abstain, self.name = chain, router, abstain, f"guarded_{chain.get_name()}"

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
        """The work of one question, whose error holds no draft."""
        return Work.of(lambda: self._steps(given, config, kwargs)).replacing(sealed)

    def _steps(self, given: Any, config: RunnableConfig, kwargs: dict[str, Any]) -> Steps[Any]:
        """The chain's result, or what stands for it. A message carries the question's record."""
        chain, router = self.chain, self.router

        def run() -> Steps[Any]:
            with only_asking():
                return (yield invoked(chain, given, config, kwargs))

        def ask(_: Any) -> Work:
            if is_escalating(router):
                raise InputError("the target asked the chain that it answers for")
            target: Any = router.escalate_to
            return replying(router, invoked(target, given, _outside(config)), read=_reply)

        outcome = yield from answered(router, Work.of(run), lambda found: Work.at_once(lambda: _text_of(found)), ask)
        verdict, result = outcome.verdict, outcome.answer
        if result is None and is_withheld(verdict):
            return self.abstain(given, verdict)
        keep_draft = router.terms.keep_draft
        return convert.decided(result, verdict, keep_draft=keep_draft) if isinstance(result, AIMessage) else result


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


def _outside(config: RunnableConfig) -> RunnableConfig:
    """The config of a target, which answers in the chain's place: no router of the run decides about it."""
    callbacks = cast("BaseCallbackManager", config.get("callbacks")).copy()
    for handler in [one for one in callbacks.handlers if isinstance(one, UncertaintyRouterCallback)]:
        callbacks.remove_handler(handler)
    return patch_config(config, callbacks=callbacks)


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
