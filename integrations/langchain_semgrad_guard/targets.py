"""Escalation targets: a chat model, an agent's graph, a chain; the input of each, and its answer as a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBinding, RunnableBindingBase

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Call, TargetReply, TargetRequest
from langchain_semgrad_guard.runs import tracers_only, within_graph
from semgrad_guard import Policy
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Paused, Reply, external, require_policy, require_sequel

_FORWARDED = ("max_tokens", "temperature", "top_p", "seed", "response_format")
"""Options of a call that other chat models understand as well; those of its tools are bound."""


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

    def ask(self, requests: Sequence[TargetRequest]) -> Sequence[TargetReply]:
        """The answers to one batch of requests, or errors in their places."""
        with tracers_only(requests[0].call.inner) as config:
            runnable, options = self._formed(requests[0].call)
            inputs, configs = self._inputs(requests), self._configs(requests, config)
            replies = runnable.batch(inputs, configs, return_exceptions=True, **options)
        return list(map(_reply, replies))

    async def aask(self, requests: Sequence[TargetRequest]) -> Sequence[TargetReply]:
        """Like `ask`, without blocking the event loop."""
        with tracers_only(requests[0].call.inner) as config:
            runnable, options = self._formed(requests[0].call)
            inputs, configs = self._inputs(requests), self._configs(requests, config)
            replies = await runnable.abatch(inputs, configs, return_exceptions=True, **options)
        return list(map(_reply, replies))

    def _inputs(self, requests: Sequence[TargetRequest]) -> list[Any]:
        messages = [request.call.messages for request in requests]
        return [{"messages": given} for given in messages] if self.state_in else messages

    def _configs(self, requests: Sequence[TargetRequest], config: RunnableConfig) -> list[RunnableConfig]:
        shared = config.get("configurable", {})
        changes = [
            {"callbacks": request.call.inner, "configurable": {**shared, **within_graph(request.call.configurable)}}
            for request in requests
        ]
        return [cast("RunnableConfig", {**config, **change}) for change in changes]

    def _formed(self, call: Call) -> tuple[Runnable[Any, Any], dict[str, Any]]:
        """The Runnable for this call, and the call's options: a chat model answers in the same form."""
        if self.chat_model is None:
            return self.runnable, {}
        given = {name: value for name, value in call.target_options.items() if value is not None}
        options = {name: given[name] for name in _FORWARDED if name in given}
        if call.stop is not None:
            options["stop"] = call.stop
        tools = given.get("tools")
        if not tools or "tools" in bound_options(self.runnable):
            return self.runnable, options
        chosen = {name: given[name] for name in ("tool_choice",) if name in given}
        return _rebound(self.runnable, self.chat_model.bind_tools(tools, **chosen)), options


def _reply(answer: Any) -> TargetReply:
    if isinstance(answer, Exception):
        return _explained(answer)
    try:
        message = convert.message_of(answer)
    except InputError as error:
        return error
    recorded, calls = convert.stage_verdict(message), convert.calls_of(message)
    if recorded is None:
        return Reply(external(convert.message_text(message), tool_calls=calls), message)
    return Reply(recorded.model_copy(update={"tool_calls": calls}), message)


def _explained(error: Exception) -> Paused | Exception:
    """A target's error: it stops the graph around the guard, or is put in plain words where it is LangGraph's."""
    if "GraphBubbleUp" in {kind.__name__ for kind in type(error).__mro__}:
        return Paused(error)
    explained = outside_a_graph(error, author="the escalation target")
    if isinstance(error, ValueError) and "thread_id" in str(error):
        explained = InputError(
            "the escalation target has a checkpointer, which needs a thread: ask the guard with "
            'config={"configurable": {"thread_id": ...}}, bind one to the target (target.with_config(...)), or compile '
            "the target without a checkpointer"
        )
    if explained is None:
        return error
    explained.__cause__ = error
    return explained


def outside_a_graph(error: Exception, *, author: str) -> InputError | None:
    """In plain words: LangGraph's error about a graph that is not there; None for any other error."""
    if isinstance(error, KeyError) and "__pregel_" in str(error):
        return InputError(f"{author} is not part of a graph here. {convert.INTERRUPTING}")
    return None


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


def bound_options(runnable: Any) -> Mapping[str, Any]:
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
