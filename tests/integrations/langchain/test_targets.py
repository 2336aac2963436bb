"""Escalation targets: what each gets, in which form it may answer, and who sees its run."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from semgrad_guard import LanguageModel
from semgrad_guard.errors import BindingMismatchError

from .listening import Ear, Tracer, shown
from .scripted import CANARY, SURE, Scripted, router
from .support import EVERYTHING, NOTHING, QUESTION, Route, policy_for_another_model, text_of, verdict_of

TARGETS: dict[str, Any] = {
    "chat model": lambda: Scripted(script=SURE),
    "bound": lambda: Scripted(script=SURE).bind(seed=3).with_config(tags=["x"]),
    "agent": lambda: create_agent(Scripted(script=SURE), []),
    "function": lambda: RunnableLambda(lambda messages: SURE if messages[-1].text else ""),
    "chain": lambda: RunnableLambda(lambda messages: messages[-1].text) | Scripted(script=SURE) | StrOutputParser(),
    "mapping": lambda: RunnableLambda(lambda messages: {"answer": SURE}),
}


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target: str, route: Route) -> None:
    pieces = route(GuardedChatModel(Scripted(), router(TARGETS[target]())), QUESTION, {})
    assert text_of(pieces) == SURE


@pytest.mark.parametrize("reply", ["  ", 3, {"messages": []}])
def test_replies_that_are_none(reply: Any, route: Route) -> None:
    rules = router(RunnableLambda(lambda _: reply), on_error="abstain")
    assert text_of(route(GuardedChatModel(Scripted(), rules), QUESTION, {})) == "WITHHELD"


def test_the_verdict_and_the_tokens_are_those_of_both(chat: ChatSemGrad, larger: LanguageModel, route: Route) -> None:
    second = ChatSemGrad.from_model(larger, max_tokens=9)
    first = chat.model_copy(update={"router": UncertaintyRouterCallback(NOTHING, second)})
    message = first.invoke(QUESTION)
    verdict = verdict_of(message)
    assert verdict.details.escalated_from is not None
    assert (verdict.action, verdict.uncertainty) == ("escalate", verdict_of(second.invoke(QUESTION)).uncertainty)
    used = [one.invoke(QUESTION).usage_metadata for one in (chat, second)]
    assert message.usage_metadata["output_tokens"] == sum(one["output_tokens"] for one in used if one)  # type: ignore[index]


def test_a_targets_own_count_of_tokens_is_kept() -> None:
    used: Any = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    target = RunnableLambda(lambda _: AIMessage(SURE, usage_metadata=used))
    verdict = verdict_of(GuardedChatModel(Scripted(), router(target)).invoke(QUESTION))
    assert (verdict.details.prompt_tokens, verdict.details.answer_tokens) == (7, 3)


def test_a_guarded_target_decides_by_itself(chat: ChatSemGrad, route: Route) -> None:
    for policy, text in ((NOTHING, "neither"), (EVERYTHING, chat.invoke(QUESTION).text)):
        second = chat.model_copy(update={"router": UncertaintyRouterCallback(policy, abstain_message="neither")})
        assert text_of(route(GuardedChatModel(Scripted(), router(second)), QUESTION, {})) == text


def test_only_tracers_see_the_target() -> None:
    ear, tracer = Ear(), Tracer()
    guard = GuardedChatModel(Scripted(), router(Scripted(script=SURE)))
    list(guard.stream(QUESTION, {"callbacks": [ear, tracer]}))
    assert ear.names == ["on_chat_model_start", "on_llm_new_token", "on_llm_end"]
    (own,) = tracer.roots
    (inner,) = own.child_runs
    assert SURE in shown(inner.outputs)
    assert CANARY not in "".join(tracer.events)
    assert not tracer.run_map, "every run has ended"


def test_a_calibration_that_does_not_follow(chat: ChatSemGrad) -> None:
    second = chat.model_copy(update={"router": UncertaintyRouterCallback(policy_for_another_model())})
    with pytest.raises(BindingMismatchError, match="not after this"):
        UncertaintyRouterCallback(policy_for_another_model(), second)
