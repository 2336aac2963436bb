"""`HumanReview`: a person decides, the model is called once, and the agent follows the decision."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import BaseModel

from langchain_semgrad_guard import ChatSemGrad, HumanReview, UncertaintyMiddleware
from semgrad_guard.errors import InputError, LowConfidenceError

from .agents import ASKED, RUNS, Run, ToolCaller, counting_tool, spoken, streamed
from .support import NOTHING, QUESTION, Ledger

CONFIG: dict[str, Any] = {"configurable": {"thread_id": "1"}}
APPROVE, REJECT = {"type": "approve"}, {"type": "reject"}


def edit(name: str, **args: Any) -> dict[str, Any]:
    return {"type": "edit", "edited_action": {"name": name, "args": args}}


def resume(*decisions: dict[str, Any]) -> Command[Any]:
    return Command(resume={"decisions": list(decisions)})


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]


@pytest.fixture
def caller(chat: ChatSemGrad) -> ToolCaller:
    return ToolCaller(scored=chat)


def reviewed(model: Any, tools: Any = (), *, others: Any = (), **options: Any) -> Any:
    middleware = [UncertaintyMiddleware(NOTHING, escalate_to=HumanReview(), abstain_message="No.", **options), *others]
    return create_agent(model, list(tools), middleware=middleware, checkpointer=InMemorySaver())


def last(state: dict[str, Any]) -> AIMessage:
    assert isinstance(state["messages"][-1], AIMessage)
    return state["messages"][-1]


def asked_of(state: dict[str, Any]) -> dict[str, Any]:
    """The question to the person."""
    (interrupt,) = state["__interrupt__"]
    assert json.loads(json.dumps(interrupt.value)) == interrupt.value
    return interrupt.value


@pytest.mark.parametrize(
    ("decision", "says", "action", "reason"),
    [
        (APPROVE, None, "escalate", "approved by a person"),
        (edit("answer", text="Edited."), "Edited.", "escalate", "edited by a person"),
        (REJECT, "No.", "abstain", "rejected by a person"),
        ({**REJECT, "message": "Ask me later."}, "Ask me later.", "abstain", "rejected by a person"),
    ],
)
def test_a_person_decides_about_a_text(
    caller: ToolCaller, draft: str, run: Run, decision: Any, says: str | None, action: str, reason: str, ledger: Ledger
) -> None:
    agent = reviewed(caller)
    shown = asked_of(run(agent, ASKED, {**CONFIG, "callbacks": [ledger]}))
    (request,) = shown["action_requests"]
    assert (request["name"], request["args"]) == ("answer", {"text": draft})
    assert "above the threshold" in request["description"]
    assert shown["review_configs"] == [{"action_name": "answer", "allowed_decisions": ["approve", "edit", "reject"]}]
    assert shown["semgrad_guard"]["action"] == "escalate"
    state = run(agent, resume(decision), CONFIG)
    assert last(state).text == (says or draft)
    assert [message.type for message in state["messages"]] == ["human", "ai"]
    record = last(state).response_metadata["semgrad_guard"]
    assert record["action"] == action
    assert reason == record.get("escalated", record)["reason"]
    assert not record["promised"]
    assert len(caller.requests) == 1, "the model is asked once"
    ledger.assert_balanced()
    run(agent, ASKED, CONFIG)
    assert len(caller.requests) == 2, "the next question is a new one"


def test_a_person_decides_about_tool_calls(caller: ToolCaller, draft: str, run: Run) -> None:
    runs: list[str] = []
    tools = [counting_tool("speak", runs), counting_tool("act", runs)]
    agent = reviewed(caller, tools)
    shown = asked_of(run(agent, ASKED, CONFIG))
    assert [request["name"] for request in shown["action_requests"]] == ["speak", "act"]
    assert runs == []
    second = asked_of(run(agent, resume(APPROVE, edit("act", word="y")), CONFIG))
    assert sorted(runs) == ["act", "speak"]
    assert second["action_requests"][0]["args"] == {"text": draft}, "the answer that follows is judged as well"
    state = run(agent, resume(APPROVE), CONFIG)
    results = {message.name: message.text for message in state["messages"] if message.type == "tool"}
    assert results == {"speak": "said x", "act": "said y"}
    assert len(caller.requests) == 2


def test_one_rejection_withholds_every_tool_call(caller: ToolCaller, run: Run) -> None:
    runs: list[str] = []
    agent = reviewed(caller, [counting_tool("speak", runs), counting_tool("act", runs)])
    run(agent, ASKED, CONFIG)
    state = run(agent, resume(APPROVE, REJECT), CONFIG)
    assert runs == []
    assert last(state).text == "No."
    assert last(state).tool_calls == []
    assert len(caller.requests) == 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("yes", "is answered by"),
        ({"decisions": [{"type": "accept"}]}, "is answered by"),
        ({"decisions": []}, "1 actions were to be reviewed and 0 decisions came"),
        ({"decisions": [edit("answer", words="x")]}, "an edited answer is"),
        ({"decisions": [REJECT]}, "'reject' is not allowed here, only approve, edit"),
    ],
)
def test_after_a_wrong_answer_the_question_is_put_again(
    caller: ToolCaller, draft: str, run: Run, answer: Any, says: str
) -> None:
    person = HumanReview(allowed_decisions=("approve", "edit"), description="Look at this.")
    middleware = UncertaintyMiddleware(NOTHING, escalate_to=person)
    agent = create_agent(caller, [], middleware=[middleware], checkpointer=InMemorySaver())
    assert asked_of(run(agent, ASKED, CONFIG))["action_requests"][0]["description"] == "Look at this."
    for _ in range(2):
        again = asked_of(run(agent, Command(resume=answer), CONFIG))
        assert says in again["error"]
        assert again["action_requests"][0]["args"] == {"text": draft}
    assert last(run(agent, resume(APPROVE), CONFIG)).text == draft
    assert len(caller.requests) == 1


@pytest.mark.parametrize("sync", [True, False])
def test_a_message_stream_shows_nothing_before_the_decision(chat: ChatSemGrad, draft: str, sync: bool) -> None:
    agent = reviewed(chat)
    before = streamed(agent, ASKED, CONFIG, sync=sync)
    assert spoken(before) == ""
    assert draft not in repr(before)
    assert spoken(streamed(agent, resume(APPROVE), CONFIG, sync=sync)) == draft


def test_a_question_that_overtakes_the_review(caller: ToolCaller, draft: str, run: Run) -> None:
    agent = reviewed(caller)
    run(agent, ASKED, CONFIG)
    run(agent, {"messages": [("human", "Another?")]}, CONFIG)
    assert [message.text for message in caller.requests[-1]] == [QUESTION, "Another?"]
    state = run(agent, resume(APPROVE), CONFIG)
    assert [message.type for message in state["messages"]] == ["human", "human", "ai"]


@pytest.mark.parametrize("guard_first", [True, False])
def test_langchains_own_review_of_tool_calls_still_happens(caller: ToolCaller, run: Run, guard_first: bool) -> None:
    runs: list[str] = []
    both: list[Any] = [
        UncertaintyMiddleware(NOTHING, escalate_to=HumanReview()),
        HumanInTheLoopMiddleware(interrupt_on={"speak": True}),
    ]
    middleware = both if guard_first else both[::-1]
    agent = create_agent(caller, [counting_tool("speak", runs)], middleware=middleware, checkpointer=InMemorySaver())
    assert "semgrad_guard" in asked_of(run(agent, ASKED, CONFIG))
    assert "semgrad_guard" not in asked_of(run(agent, resume(APPROVE), CONFIG))
    assert runs == [], "approving the message is not approving the tool call"
    run(agent, resume(APPROVE), CONFIG)
    assert runs == ["speak"]
    assert len(caller.requests) == 2


class Reply(BaseModel):
    """A structured answer."""

    word: str


def test_structured_responses(caller: ToolCaller, run: Run) -> None:
    middleware = UncertaintyMiddleware(NOTHING, escalate_to=HumanReview())
    agent = create_agent(
        caller, [], middleware=[middleware], response_format=ToolStrategy(Reply), checkpointer=InMemorySaver()
    )
    run(agent, ASKED, CONFIG)
    state = run(agent, resume(edit("Reply", word="better")), CONFIG)
    assert state["structured_response"] == Reply(word="better")
    run(agent, ASKED, CONFIG)
    with pytest.raises(LowConfidenceError, match="rejected by a person") as caught:
        run(agent, resume(REJECT), CONFIG)
    assert caught.value.verdict.draft is None
    assert "withheld answer" not in str(caught.value)
    requests = len(caller.requests)
    assert "__interrupt__" in run(agent, ASKED, CONFIG), "what was decided about one question is not said to another"
    assert len(caller.requests) == requests + 1


def test_without_a_checkpointer_nobody_can_answer(caller: ToolCaller, run: Run) -> None:
    agent = create_agent(caller, [], middleware=[UncertaintyMiddleware(NOTHING, escalate_to=HumanReview())])
    with pytest.raises(InputError, match="needs a checkpointer"):
        run(agent, ASKED, None)
    assert caller.requests == [], "the model is not asked"


def test_after_a_rejection_the_state_holds_no_draft(caller: ToolCaller, draft: str, run: Run) -> None:
    agent = reviewed(caller)
    run(agent, ASKED, CONFIG)
    run(agent, resume(REJECT), CONFIG)
    assert draft not in repr(agent.get_state(CONFIG))


class InterruptsWhileAsking(AgentMiddleware):
    """The naive way: an interrupt in `wrap_model_call`, whose node runs again on resuming."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        from langgraph.types import interrupt

        response = handler(request)
        interrupt("?")
        return response


def test_the_naive_review_asks_the_model_twice(caller: ToolCaller) -> None:
    agent = create_agent(caller, [], middleware=[InterruptsWhileAsking()], checkpointer=InMemorySaver())
    agent.invoke(ASKED, CONFIG)
    agent.invoke(Command(resume="yes"), CONFIG)
    assert len(caller.requests) == 2
