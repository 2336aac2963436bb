"""Agents: LangChain's own, with a guarded model or behind the middleware; tools, structures, and a person's review."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelFallbackMiddleware, wrap_model_call
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    LowConfidenceError,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    withheld_draft,
)
from semgrad_guard.errors import UnenforcedPolicyError

from .scripted import CANARY, SURE, WITHHELD, Scripted, router
from .support import NOTHING, RUNS, shown, verdict_of

ASKED: Any = {"messages": [("human", "q")]}


ran: list[str] = []


@tool
def pay(to: str) -> str:
    """Pay a person."""
    ran.append(to)
    return f"paid {to}"


@tool
def search(word: str) -> str:
    """Search."""
    ran.append(word)
    return f"found {word}"


def calling(*names: str, text: str = "") -> Callable[[Any], AIMessage]:
    """Calls these tools once, then answers surely."""

    def script(messages: Any) -> AIMessage:
        if isinstance(messages[-1], ToolMessage):
            return AIMessage(SURE)
        calls = [
            {"name": name, "args": {"to": "Ann"} if name == "pay" else {"word": "x"}, "id": f"call-{name}"}
            for name in names
        ]
        return AIMessage(text, tool_calls=calls)

    return script


def texts(state: Any) -> list[str]:
    return [message.text for message in state["messages"]]


@pytest.fixture(autouse=True)
def _none_ran() -> None:
    ran.clear()


@pytest.mark.parametrize("how", ["field", "middleware"])
def test_a_doubtful_call_does_not_run(how: str, run: Callable[..., Any]) -> None:
    for names, expected, left in (
        (["pay"], [], WITHHELD),
        (["search"], ["x"], SURE),
        (["pay", "search"], [], WITHHELD),
    ):
        ran.clear()
        inner = Scripted(script=calling(*names, text=f"about {CANARY}"))
        rules = router(trusted_tools=["search"])
        model = GuardedChatModel(inner, rules) if how == "field" else inner
        middleware = [] if how == "field" else [UncertaintyMiddleware(rules)]
        state = run(create_agent(model, [pay, search], middleware=middleware), ASKED)
        assert ran == expected
        assert texts(state)[-1] == left
        assert CANARY not in shown(state)


def test_a_model_that_another_middleware_swaps_in(run: Callable[..., Any]) -> None:
    other = Scripted(script=f"It is {CANARY}")

    @wrap_model_call
    def swap(request: Any, handler: Any) -> Any:
        return handler(request.override(model=other))

    @wrap_model_call
    async def aswap(request: Any, handler: Any) -> Any:
        return await handler(request.override(model=other))

    chosen = swap if run is RUNS["invoke"] else aswap
    before = create_agent(Scripted(script=SURE), [], middleware=[chosen, UncertaintyMiddleware(router())])
    assert texts(run(before, ASKED))[-1] == WITHHELD
    behind = create_agent(Scripted(script=SURE), [], middleware=[UncertaintyMiddleware(router()), chosen])
    with pytest.raises(UnenforcedPolicyError, match="put this one last"):
        run(behind, ASKED)


def test_fallbacks_go_before_the_middleware(run: Callable[..., Any]) -> None:
    failing, second = Scripted(fails=True), Scripted(script=f"It is {CANARY}")
    guard = UncertaintyMiddleware(router())
    agent = create_agent(failing, [], middleware=[ModelFallbackMiddleware(second), guard])
    assert texts(run(agent, ASKED))[-1] == WITHHELD


def test_a_scored_model_in_the_middleware(chat: ChatSemGrad, run: Callable[..., Any]) -> None:
    rules = UncertaintyRouterCallback(NOTHING, abstain_message=WITHHELD)
    assert texts(run(create_agent(chat, [], middleware=[UncertaintyMiddleware(rules)]), ASKED))[-1] == WITHHELD
    other = chat.model_copy(update={"router": UncertaintyRouterCallback(NOTHING)})
    with pytest.raises(UnenforcedPolicyError, match="another router"):
        run(create_agent(other, [], middleware=[UncertaintyMiddleware(rules)]), ASKED)


class Capital(BaseModel):
    city: str


@pytest.mark.parametrize("how", ["field", "middleware"])
def test_no_text_stands_for_a_structure(how: str, run: Callable[..., Any]) -> None:
    inner, rules = Scripted(script=f"It is {CANARY}"), router()
    model = GuardedChatModel(inner, rules) if how == "field" else inner
    middleware = [] if how == "field" else [UncertaintyMiddleware(rules)]
    agent = create_agent(model, [], middleware=middleware, response_format=ToolStrategy(Capital))
    with pytest.raises(LowConfidenceError):
        run(agent, ASKED, {"recursion_limit": 25})
    assert len(inner.requests) == 1


def test_a_target_answers_with_tools(run: Callable[..., Any]) -> None:
    target = RunnableLambda(lambda _: AIMessage("", tool_calls=[{"name": "pay", "args": {"to": "Bo"}, "id": "1"}]))
    inner = Scripted(script=lambda messages: SURE if isinstance(messages[-1], ToolMessage) else CANARY)
    agent = create_agent(GuardedChatModel(inner, router(escalate_to=target)), [pay])
    assert texts(run(agent, ASKED))[-1] == SURE
    assert ran == ["Bo"]


def test_a_target_model_gets_the_tools_and_options(run: Callable[..., Any]) -> None:
    larger = Scripted(script=SURE)
    model = GuardedChatModel(Scripted(), router(escalate_to=larger)).bind(temperature=0.5, seed=3)
    assert run(model, "q").text == SURE
    assert larger.requests[-1][1] == {"temperature": 0.5, "seed": 3}
    state = run(create_agent(GuardedChatModel(Scripted(), router(escalate_to=larger)), [pay]), ASKED)
    assert texts(state)[-1] == SURE
    assert larger.requests[-1][1]["tools"][0]["function"]["name"] == "pay"


# A person's review: a target that interrupts.


def ask_person(messages: Any) -> AIMessage | str:
    draft = withheld_draft()
    assert draft is not None
    decision = interrupt({"text": draft.text, "calls": draft.tool_calls})
    if decision["type"] == "reject":
        return decision.get("message", "")
    return AIMessage(decision.get("text", draft.text), tool_calls=decision.get("calls", draft.tool_calls))


CALL = {"name": "pay", "args": {"to": "Bo"}, "id": "call-pay"}
REVIEWS: dict[str, tuple[Any, dict[str, Any], str, list[str]]] = {
    "approve a text": (f"It is {CANARY}", {"type": "approve"}, f"It is {CANARY}", []),
    "edit a text": (f"It is {CANARY}", {"type": "edit", "text": "Rome"}, "Rome", []),
    "reject a text": (f"It is {CANARY}", {"type": "reject", "message": "Nobody knows."}, "Nobody knows.", []),
    "reject without words": (f"It is {CANARY}", {"type": "reject"}, WITHHELD, []),
    "approve a call": (calling("pay"), {"type": "approve"}, SURE, ["Ann"]),
    "approve a call next to a text": (calling("pay", text=f"about {CANARY}"), {"type": "approve"}, SURE, ["Ann"]),
    "edit a call": (calling("pay"), {"type": "edit", "calls": [CALL]}, SURE, ["Bo"]),
    "reject a call": (calling("pay"), {"type": "reject", "message": "Too much."}, "Too much.", []),
}


@pytest.mark.parametrize("review", REVIEWS)
@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_a_person_decides(review: str, on_error: Any, run: Callable[..., Any]) -> None:
    script, decision, text, calls = REVIEWS[review]
    rules = router(escalate_to=RunnableLambda(ask_person), on_unscored="escalate", on_error=on_error)
    agent = create_agent(GuardedChatModel(Scripted(script=script), rules), [pay], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    waiting = run(agent, ASKED, config)
    assert set(waiting["__interrupt__"][0].value) == {"text", "calls"}
    assert ran == []
    state = run(agent, Command(resume=decision), config)
    assert (texts(state)[-1], ran) == (text, calls)
    verdict = verdict_of(state["messages"][-1] if not calls else state["messages"][1])
    assert verdict.promised is False


def test_no_draft_is_shown_outside_a_review() -> None:
    assert withheld_draft() is None
    GuardedChatModel(Scripted(), router(escalate_to=RunnableLambda(lambda _: "x"))).invoke([HumanMessage("q")])
    assert withheld_draft() is None
