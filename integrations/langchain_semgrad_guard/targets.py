"""Escalation targets: a chat model, an agent's graph, a chain. What each is asked, and what becomes of its answer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from langchain_core.callbacks import CallbackManager
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBinding, RunnableBindingBase

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.hearing import tracers_only, users_own
from langchain_semgrad_guard.tools import calls_of
from semgrad_guard import Policy, Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Refusal, Reply, external, require_policy, require_sequel

Said = Reply[AIMessage] | Refusal | Exception

_FORWARDED = ("max_tokens", "temperature", "top_p", "seed", "response_format")
"""Options of a call that other chat models understand as well; those of its tools are bound."""


@dataclass(frozen=True)
class Asked:
    """What a target is asked: the messages and options of the call, and the draft that was not let through."""

    messages: list[BaseMessage]
    stop: list[str] | None
    options: Mapping[str, Any]
    heard: CallbackManager
    draft: AIMessage
    verdict: Verdict
    configurable: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Target(Protocol):
    """Somebody who answers what is not let through."""

    def ask(self, asked: Sequence[Asked]) -> Sequence[Said]: ...

    async def aask(self, asked: Sequence[Asked]) -> Sequence[Said]: ...


def target_of(escalate_to: Any, policy: Policy) -> RunnableTarget | None:
    """A Runnable as the target of a guard with this policy.

    Raises:
        InputError: it is no Runnable, or one that takes no messages.
        BindingMismatchError: it is a guarded model, with bindings or without, whose calibration does not follow.
    """
    if escalate_to is None:
        return None
    if not isinstance(escalate_to, Runnable):
        raise InputError(
            f"escalate_to must be a Runnable, not a {type(escalate_to).__name__}; wrap a function in RunnableLambda"
        )
    target = cast("Runnable[Any, Any]", escalate_to)
    follows = getattr(_chat_model_in(target), "policy", None)
    if isinstance(follows, Policy):
        require_sequel(require_policy(policy), follows)
    return RunnableTarget(target, state_in=_takes_state(target))


@dataclass(frozen=True, eq=False)
class RunnableTarget:
    """A Runnable that is given the messages; or, where it takes a state (an agent's graph), a state that holds them."""

    runnable: Runnable[Any, Any]
    state_in: bool = False
    chat_model: BaseChatModel | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat_model", _chat_model_in(self.runnable))

    def ask(self, asked: Sequence[Asked]) -> Sequence[Said]:
        """The answers to one batch of questions, or errors in their places."""
        with tracers_only(asked[0].heard) as config:
            runnable, options = self._formed(asked[0])
            inputs, configs = self._inputs(asked), self._configs(asked, config)
            return [_said(each) for each in runnable.batch(inputs, configs, return_exceptions=True, **options)]

    async def aask(self, asked: Sequence[Asked]) -> Sequence[Said]:
        """Like `ask`, without blocking the event loop."""
        with tracers_only(asked[0].heard) as config:
            runnable, options = self._formed(asked[0])
            inputs, configs = self._inputs(asked), self._configs(asked, config)
            return [_said(each) for each in await runnable.abatch(inputs, configs, return_exceptions=True, **options)]

    def _inputs(self, asked: Sequence[Asked]) -> list[Any]:
        return [{"messages": each.messages} if self.state_in else each.messages for each in asked]

    def _configs(self, asked: Sequence[Asked], config: RunnableConfig) -> list[RunnableConfig]:
        shared = config.get("configurable", {})
        own = [{**shared, **users_own(each.configurable)} for each in asked]
        return [
            cast("RunnableConfig", {**config, "callbacks": each.heard, "configurable": configurable})
            for each, configurable in zip(asked, own, strict=True)
        ]

    def _formed(self, asked: Asked) -> tuple[Runnable[Any, Any], dict[str, Any]]:
        """The Runnable as it is asked in this call, and the call's options: a chat model answers in the same form."""
        if self.chat_model is None:
            return self.runnable, {}
        options = {name: asked.options[name] for name in _FORWARDED if asked.options.get(name) is not None}
        if asked.stop is not None:
            options["stop"] = asked.stop
        tools = asked.options.get("tools")
        if not tools or "tools" in _bound(self.runnable):
            return self.runnable, options
        chosen = {name: asked.options[name] for name in ("tool_choice",) if asked.options.get(name) is not None}
        return _rebound(self.runnable, self.chat_model.bind_tools(tools, **chosen)), options


def _said(answer: Any) -> Said:
    if isinstance(answer, Exception):
        return _explained(answer)
    try:
        message = _message_of(answer)
    except InputError as error:
        return error
    recorded, calls = convert.stage_verdict(message), calls_of(message)
    if recorded is None:
        return Reply(external(convert.message_text(message), tool_calls=calls), message)
    return Reply(recorded.model_copy(update={"tool_calls": calls}), message)


def _explained(error: Exception) -> Exception:
    """A target's error; in plain words where it is LangGraph's about a graph that a target is no part of."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GraphBubbleUp" in names or (isinstance(error, KeyError) and "__pregel_" in str(error)):
        explained = InputError(
            "an escalation target is no part of the graph around it: it cannot interrupt it, write to its stream, or "
            "read its state. Ask a person with UncertaintyMiddleware(escalate_to=HumanReview()), or do it in a node of "
            "your graph that follows on the guard's verdict."
        )
    elif isinstance(error, ValueError) and "thread_id" in str(error):
        explained = InputError(
            "the escalation target has a checkpointer, which needs a thread: ask the guard with "
            'config={"configurable": {"thread_id": ...}}, bind one to the target (target.with_config(...)), or compile '
            "the target without a checkpointer"
        )
    else:
        return error
    explained.__cause__ = error
    return explained


def _message_of(answer: Any) -> AIMessage:
    """What a target returned, as a message; of a state, its last one.

    Raises:
        InputError: it returned neither a message nor a string.
    """
    said: Any = cast("Mapping[str, Any]", answer).get("messages") if isinstance(answer, Mapping) else None
    if said:
        answer = said[-1]
        if not isinstance(answer, AIMessage):
            raise InputError("the escalation target ended on a message that is no answer (a tool's, or a question)")
    message = convert.as_message(answer)
    # Identities and names belong to the run that delivers, and to the agent around it.
    return message.model_copy(update={"id": None, "name": None}) if not isinstance(message, AIMessageChunk) else message


def _takes_state(runnable: Runnable[Any, Any]) -> bool:
    """Whether a Runnable wants `{"messages": [...]}` in place of the messages themselves.

    Raises:
        InputError: it wants something else.
    """
    if _chat_model_in(runnable) is not None:
        return False
    try:
        schema = runnable.get_input_jsonschema()
    except Exception:  # noqa: BLE001 - schemas are a courtesy: LangChain raises many kinds of errors where there is none
        return False
    fields = schema.get("properties")
    if schema.get("type") == "object" and fields:
        if "messages" in fields:
            return True
        names = ", ".join(sorted(fields))
        form = ", ".join(f"{name!r}: messages[-1].text" for name in sorted(fields))
        raise InputError(
            f"escalate_to takes {{{names}}} and an escalation hands it the list of messages. Put a step before it that "
            f"makes the one of the other: RunnableLambda(lambda messages: {{{form}}}) | chain"
        )
    if schema.get("type") == "string":
        raise InputError(
            "escalate_to takes a string and an escalation hands it the list of messages. Put a step before it: "
            "RunnableLambda(lambda messages: messages[-1].text) | chain"
        )
    return False


def _chat_model_in(runnable: Any) -> BaseChatModel | None:
    while isinstance(runnable, RunnableBindingBase):
        runnable = cast("RunnableBindingBase[Any, Any]", runnable).bound
    return runnable if isinstance(runnable, BaseChatModel) else None


def _bound(runnable: Any) -> Mapping[str, Any]:
    """The options that are bound to a chat model."""
    found: dict[str, Any] = {}
    while isinstance(runnable, RunnableBindingBase):
        binding = cast("RunnableBindingBase[Any, Any]", runnable)
        found, runnable = {**binding.kwargs, **found}, binding.bound
    return found


def _rebound(runnable: Any, model: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """The same bindings around another model."""
    if not isinstance(runnable, RunnableBindingBase):
        return model
    binding = cast("RunnableBinding[Any, Any]", runnable)
    return binding.model_copy(update={"bound": _rebound(binding.bound, model)})


# A target may hold the guarded model itself: inside its own escalation a guard still judges, but hands on no further.


@dataclass(eq=False)
class _Escalation:
    """One escalation of a guard. Tasks that its target has left behind keep its context, but not its meaning."""

    guard: object
    is_over: bool = False


_escalating: ContextVar[tuple[_Escalation, ...]] = ContextVar("semgrad_guard_escalating", default=())


@contextmanager
def escalating(guard: object) -> Generator[None]:
    """The time during which a guard's target answers."""
    escalation = _Escalation(guard)
    token = _escalating.set((*_escalating.get(), escalation))
    try:
        yield
    finally:
        escalation.is_over = True
        _escalating.reset(token)


def is_escalating(guard: object) -> bool:
    """Whether this happens inside the guard's own escalation."""
    return any(each.guard is guard and not each.is_over for each in _escalating.get())
