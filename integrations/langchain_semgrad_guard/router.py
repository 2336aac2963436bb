"""`UncertaintyRouterCallback`: the rules by which models decide about their answers, and the target for the others.

It is a callback only so that LangChain hands it through. It replaces nothing by itself: a model asks it before it
returns, and a model that would not ask it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Unpack

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import Runnable
from langchain_core.tracers.context import register_configure_hook

from langchain_semgrad_guard.targets import chat_model_in, require_runnable, wants_state
from semgrad_guard import Policy
from semgrad_guard.errors import UnenforcedPolicyError
from semgrad_guard.guard import OnUnscored, Question, Router, RouterOptions, require_sequel
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

    def __init__(
        self,
        policy: Policy,
        escalate_to: Runnable[Any, Any] | None = None,
        *,
        on_unscored: OnUnscored | None = None,
        trusted_tools: Collection[str] = (),
        **options: Unpack[RouterOptions],
    ) -> None:
        super().__init__(policy, escalate_to, on_unscored=on_unscored, trusted_tools=trusted_tools, **options)
        if escalate_to is not None:
            require_runnable(escalate_to, "escalate_to")
            following = getattr(chat_model_in(escalate_to), "router", None)
            if isinstance(following, Router):
                require_sequel(policy, following.terms.policy)

    @cached_property
    def target_takes_state(self) -> bool:
        """Whether the target wants a state that holds the messages, as agents' graphs do."""
        return wants_state(self.escalate_to)


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
