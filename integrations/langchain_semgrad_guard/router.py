"""`UncertaintyRouterCallback`: the rules by which models decide about their answers, and the target for the others.

It is a callback only so that LangChain hands it through. It replaces nothing by itself: a model asks it before it
returns, and a model that would not ask it is refused. A target is a chat model, an agent's graph, or a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Literal, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tracers.context import register_configure_hook
from langchain_core.utils.json_schema import dereference_refs

from langchain_semgrad_guard import messages as convert
from semgrad_guard.errors import InputError, UnenforcedPolicyError
from semgrad_guard.guard import Paused, Question, Reply, Router, Steps, TargetReply, Work, escalating, external
from semgrad_guard.guard import asking as asking_question

_ASKS = "semgrad_guard"


class _Asks(str):
    """The invocation parameter of a model that asks its router. No client can send a value of this type."""

    __slots__ = ()


ASKING = {_ASKS: _Asks("asks its router")}
"""Part of the identifying parameters of every model here, by which handlers know it."""


class OnlyAsking(BaseCallbackHandler):
    """Refuses the run of a model that asks no router."""

    raise_error = run_inline = True

    def on_chat_model_start(self, serialized: Any, messages: Any, **run: Any) -> None:
        """Let a model's run begin, if it will ask.

        Raises:
            UnenforcedPolicyError: it will not.
        """
        parameters: dict[str, Any] = run.get("invocation_params") or {}
        if not isinstance(parameters.get(_ASKS), _Asks):
            raise UnenforcedPolicyError(
                "this model would ignore the router: use ChatSemGrad(..., router=router), or "
                "GuardedChatModel(model, router) around any other chat model; with router=False it is a helper, whose "
                "texts need no guard"
            )

    def on_llm_start(self, serialized: Any, prompts: Any, **run: Any) -> None:
        """Refuse a text-in, text-out model.

        Raises:
            UnenforcedPolicyError: always.
        """
        self.on_chat_model_start(serialized, prompts)


class UncertaintyRouterCallback(Router, OnlyAsking):
    """The rules by which models decide about their answers, and the target for those that are not let through.

        router = UncertaintyRouterCallback(Policy(threshold=0.004), escalate_to=larger)
        chat = ChatSemGrad(model="pocket", router=router)

    As a model's field it holds wherever the model is called. In a config it holds for the models of that run. Two
    different routers in one run are an error. One router may serve many models; its copies are equal to it.

    Args:
        policy: which answers to let through.
        escalate_to: answers in place of those that are not let through. A chat model gets the messages and the call's
            options and tools, an agent's graph a state with the messages, any other Runnable the messages; of a chain
            in `guarded`, it gets the chain's input. It returns a message or a string. The answer of a target without a
            router of its own is outside any promise.
        on_unscored, trusted_tools: as in `Router`.
        **options: `mode`, `abstain_message`, `on_error`, `timeout`, `keep_draft`, `monitor`, `notify` and `log`, as in
            `Terms`.

    Raises:
        InputError: an argument is not as described.
        BindingMismatchError: the target is a guarded model whose calibration does not follow this one's.
    """

    @classmethod
    def _require_target(cls, target: Any) -> None:
        require_runnable(target, "escalate_to")

    @cached_property
    def target_takes_state(self) -> bool:
        """Whether the target wants a state, `{"messages": [...]}`, as agents' graphs do."""
        return chat_model_in(self.escalate_to) is None and "messages" in fields_of(self.escalate_to, "input")


_in_questions: ContextVar[BaseCallbackHandler | None] = ContextVar("semgrad_guard_in_questions", default=None)
register_configure_hook(_in_questions, inheritable=True)
_ONLY_ASKING = OnlyAsking()


@contextmanager
def only_asking() -> Generator[None]:
    """The time in which the run of a model that asks no router is refused, whatever its config holds."""
    token = _in_questions.set(_ONLY_ASKING)
    try:
        yield
    finally:
        _in_questions.reset(token)


@contextmanager
def asking(router: UncertaintyRouterCallback) -> Generator[Question]:
    """One question, asked by own code: a refused call of a model with this router raises, and ends it.

    Every later call ends at once. An error that leaves the block after a refused call ends here; read
    `question.refused` behind it. Models in the block need this router (`router=`), or `router=False` where they are
    helpers, whose texts need no guard.

        with asking(router) as question:
            answer = agent.invoke({"messages": [("human", "Who built it?")]})["messages"][-1].text
        text = answer if question.refused is None else "I don't know."

    Raises:
        UnenforcedPolicyError: from the call of a model that has another router, or none.
    """
    with only_asking(), asking_question(router) as question:
        yield question


# Targets: the input of each, and its answer as a reply.

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


def is_interrupted(result: Any) -> bool:
    """Whether a graph has interrupted itself, by its state or a stream's pieces. No client can send these marks."""
    if isinstance(result, Mapping):
        result = cast("Mapping[str, Any]", result).get("__interrupt__")
    marks = getattr(result, "interrupts", result)
    if not isinstance(marks, list | tuple):
        return False
    return any(type(mark).__name__ == "Interrupt" or is_interrupted(mark) for mark in cast("list[Any]", marks))


def is_halted(chain: Runnable[Any, Any], result: Any, config: RunnableConfig) -> Steps[bool]:
    """Whether a chain is a graph that has interrupted itself; at a breakpoint its saved state alone tells that."""
    graph, halted = layers(chain)[-1], is_interrupted(result)
    if halted or is_task(config) or not getattr(graph, "checkpointer", None):
        return halted
    state = yield Work(lambda: graph.get_state(config), lambda: graph.aget_state(config))
    return bool(state.next)


def is_task(config: RunnableConfig) -> bool:
    """Whether a run is a task of a graph, and in its own place."""
    return callable(config.get("configurable", {}).get("__pregel_read"))


def reply_of(answer: Any) -> Reply[AIMessage]:
    """A target's answer as a reply: a message, with its own record if it has one.

    Raises:
        InputError: it returned something else, or a graph that was interrupted.
    """
    if is_interrupted(answer):
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
