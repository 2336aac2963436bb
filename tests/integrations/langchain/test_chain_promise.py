"""A guarded target's answer is promised where its calibration follows this guard's, whatever it is wrapped in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy, calibrate
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard import binding_of

from .support import QUESTION

WRAPPED: dict[str, Callable[[GuardedChatModel], Runnable[Any, Any]]] = {
    "function": lambda guard: RunnableLambda(lambda messages: guard.invoke(messages)),
    "chain": lambda guard: RunnableLambda(lambda messages: messages) | guard,
    "fallbacks": lambda guard: guard.with_fallbacks([guard]),
    "agent": lambda guard: create_agent(guard, []),
}
DIRECT: dict[str, Callable[[GuardedChatModel], Runnable[Any, Any]]] = {
    "itself": lambda guard: guard,
    "bound": lambda guard: guard.bind(max_tokens=3),
    "configured": lambda guard: guard.with_config(tags=["x"]),
    "retried": lambda guard: guard.with_retry(),
}


@pytest.fixture(scope="module")
def chat(language_model: LanguageModel) -> ChatSemGrad:
    return ChatSemGrad.from_model(language_model, max_tokens=3)


@pytest.fixture(scope="module")
def make_policy(chat: ChatSemGrad) -> Callable[..., Policy]:
    """Policies for the tiny model's answer to this question, of which all or nothing lies below the threshold."""
    verdict = get_verdict(chat.invoke(QUESTION))
    assert verdict is not None
    form = chat.language_model.render(QUESTION).form

    def make(*, scale: float, upstream: str | None = None) -> Policy:
        binding = binding_of(verdict).model_copy(update={"upstream": upstream})
        scores, right = [scale * i / 100 for i in range(100)], [True] * 100
        made = calibrate(scores, right, alpha=0.1, delta=0.1, grid=[scale / 2], prompts=[form] * 100, binding=binding)
        return Policy.from_calibration(made)

    return make


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_wrapped_guard(chat: ChatSemGrad, make_policy: Callable[..., Policy], wrapping: str, follows: bool) -> None:
    first = make_policy(scale=1e-300)
    second = make_policy(scale=1e300, upstream=first.calibration_id if follows else None)
    target = WRAPPED[wrapping](GuardedChatModel(chat, second))
    verdict = get_verdict(GuardedChatModel(chat, first, escalate_to=target).invoke(QUESTION))
    assert verdict is not None
    assert (verdict.action, verdict.status, verdict.promised) == ("escalate", "scored", follows)


@pytest.mark.parametrize("wrapping", DIRECT)
def test_a_guard_that_can_be_seen_is_refused_at_once(
    chat: ChatSemGrad, make_policy: Callable[..., Policy], wrapping: str
) -> None:
    first = make_policy(scale=1e-300)
    strange = DIRECT[wrapping](GuardedChatModel(chat, make_policy(scale=1e300)))
    own = DIRECT[wrapping](GuardedChatModel(chat, make_policy(scale=1e300, upstream=first.calibration_id)))
    with pytest.raises(BindingMismatchError, match="harder than all questions"):
        GuardedChatModel(chat, first, escalate_to=strange)
    with pytest.raises(BindingMismatchError, match="harder than all questions"):
        UncertaintyMiddleware(first, escalate_to=strange)
    router = UncertaintyRouterCallback(first, own)
    with pytest.raises(BindingMismatchError, match="harder than all questions"):
        router.escalate_to = strange
    assert router.escalate_to is own
    verdict = get_verdict(GuardedChatModel(chat, first, escalate_to=own).invoke(QUESTION))
    assert verdict is not None
    assert (verdict.action, verdict.promised) == ("escalate", True)
