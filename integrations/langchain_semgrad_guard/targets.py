"""Escalation targets: a chat model, an agent's graph, a chain; the input of each, and its answer as a reply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from typing import Any, Literal, cast

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.utils.json_schema import dereference_refs

from langchain_semgrad_guard import messages as convert
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Paused, Reply, Router, Steps, TargetReply, Work, escalating, external

_FORWARDED = ("max_tokens", "temperature", "top_p", "seed", "response_format", "stop")
"""Options of a call that other chat models understand as well; those of its tools are bound."""


def answering_instead(
    router: Router,
    messages: list[BaseMessage],
    options: Mapping[str, Any],
    *,
    takes_state: bool,
    config: RunnableConfig,
    draft: AIMessage | None,
) -> Work:
    """The work of a router's target in the place of a draft, with the options of its call.

    The target is given the messages, or where it takes a state (an agent's graph), a state that holds them. A chat
    model answers in the same form, with the same tools.
    """
    runnable: Any = router.escalate_to
    *bindings, model = layers(runnable)
    own = dict[str, Any]()
    if isinstance(model, BaseChatModel):
        own = {name: options[name] for name in _FORWARDED if options.get(name) is not None}
        tools = options.get("tools")
        if tools and not any("tools" in binding.kwargs for binding in bindings):
            chosen = {name: options[name] for name in ("tool_choice",) if options.get(name) is not None}
            runnable = model.bind_tools(convert.openai_tools(tools), **chosen)
            for binding in reversed(bindings):
                runnable = binding.model_copy(update={"bound": runnable})
    state: Any = {"messages": messages} if takes_state else messages
    return replying(router, invoked(runnable, state, config, own), read=reply_of, draft=draft)


def replying(
    router: Router, answering: Work, *, read: Callable[[Any], Reply[Any]], draft: AIMessage | None = None
) -> Work:
    """The work of a router's target: its answer, read as a reply, or its error in the place of one."""

    def steps() -> Steps[list[TargetReply[Any]]]:
        token = _draft.set(draft)
        try:
            with escalating(router):
                result = yield answering
            return [result if isinstance(result, Paused) else read(result)]
        except Exception as error:  # noqa: BLE001 - the router decides
            return [error]
        finally:
            _draft.reset(token)

    return Work.of(steps)


def invoked(
    runnable: Runnable[Any, Any], given: Any, config: RunnableConfig, options: Mapping[str, Any] | None = None
) -> Work:
    """The work of a Runnable: its result, or `Paused` where LangGraph interrupts the graph around."""
    own = options or {}

    def paused(error: Exception) -> Paused | Exception:
        return Paused(error) if any(kind.__name__ == "GraphBubbleUp" for kind in type(error).__mro__) else error

    work = Work(lambda: runnable.invoke(given, config, **own), lambda: runnable.ainvoke(given, config, **own))
    return work.replacing(paused)


def reply_of(answer: Any) -> Reply[AIMessage]:
    """A target's answer as a reply: a message, with its own record if it has one.

    Raises:
        InputError: it returned something else, or a graph that was interrupted.
    """
    if isinstance(answer, Mapping) and cast("Mapping[str, Any]", answer).get("__interrupt__"):
        raise InputError("the escalation target was interrupted before it had an answer")
    message = convert.as_message(convert.output_of(answer))
    message = message.model_copy(update={"id": None, "name": None})  # they belong to the run that delivers
    recorded, calls = convert.stage_verdict(message), convert.calls_of(message)
    if recorded is None:
        used = message.usage_metadata
        counts: dict[str, Any] = (
            {} if used is None else {"prompt_tokens": used["input_tokens"], "answer_tokens": used["output_tokens"]}
        )
        return Reply(external(convert.message_text(message), tool_calls=calls, **counts), message)
    return Reply(recorded.revised(tool_calls=calls), message)


_draft: ContextVar[AIMessage | None] = ContextVar("semgrad_guard_draft", default=None)


def withheld_draft() -> AIMessage | None:
    """Within an escalation target: the message that was not let through, for a person's review; None elsewhere.

    What the target does with it is its own affair: an interrupt that shows it keeps it in the graph's checkpoints.
    """
    return _draft.get()


# The form of a target.


def require_runnable(given: object, role: str) -> None:
    """Return if it is a Runnable; its `role` is for the error.

    Raises:
        InputError: it is none.
    """
    if not isinstance(given, Runnable):
        raise InputError(f"{role} must be a Runnable, not a {type(given).__name__}; wrap a function in RunnableLambda")


def wants_state(runnable: Runnable[Any, Any]) -> bool:
    """Whether a Runnable wants `{"messages": [...]}` in place of the messages themselves."""
    return chat_model_in(runnable) is None and "messages" in fields_of(runnable, "input")


def fields_of(runnable: Runnable[Any, Any], side: Literal["input", "output"]) -> Collection[str]:
    """The names in the mapping that a Runnable takes or returns; none where it is no mapping, or not known."""
    try:
        schema = dereference_refs(getattr(runnable, f"get_{side}_jsonschema")())
    except Exception:  # noqa: BLE001 - schemas are a courtesy: LangChain raises many kinds of errors where there is none
        state = getattr(getattr(runnable, "builder", None), f"{side}_schema", None)  # of a graph, such as a TypedDict
        return getattr(state, "__annotations__", ())
    return schema.get("properties", ())


def layers(runnable: Any) -> list[Any]:
    """A Runnable and what is within its bindings, from the outside; the last one is no binding."""
    found = [runnable]
    while isinstance(found[-1], RunnableBindingBase):
        found.append(cast("RunnableBindingBase[Any, Any]", found[-1]).bound)
    return found


def chat_model_in(runnable: Any) -> BaseChatModel | None:
    """The chat model inside of bindings; None where there is none."""
    innermost = layers(runnable)[-1]
    return innermost if isinstance(innermost, BaseChatModel) else None
