"""`UncertaintyMiddleware` in `create_agent`: the delivered messages, the tools that run, and the metadata."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from langchain_semgrad_guard import (
    ChatSemGrad,
    HumanReview,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import (
    BindingMismatchError,
    InputError,
    LowConfidenceError,
    UnenforcedPolicyError,
)

from .agents import ASKED, RUNS, Run, ToolCaller, counting_tool
from .support import EVERYTHING, NOTHING, QUESTION, Ledger, Wire, policy_for_another_model


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]


@pytest.fixture
def caller(chat: ChatSemGrad) -> ToolCaller:
    return ToolCaller(scored=chat)


def guarded(model: Any, policy: Policy, tools: Any = (), **options: Any) -> Any:
    return create_agent(model, list(tools), middleware=[UncertaintyMiddleware(policy, **options)])


def last(state: dict[str, Any]) -> AIMessage:
    message = state["messages"][-1]
    assert isinstance(message, AIMessage)
    return message


def record_of(state: dict[str, Any]) -> dict[str, Any]:
    return last(state).response_metadata["semgrad_guard"]


def test_what_is_let_through_is_delivered(chat: ChatSemGrad, draft: str, run: Run) -> None:
    state = run(guarded(chat, EVERYTHING), ASKED, None)
    assert last(state).text == draft
    record = record_of(state)
    assert (record["action"], record["enforced"], record["threshold"]) == ("answer", True, 1e308)
    assert "semgrad_guard_review" not in state


def test_what_is_not_let_through_is_replaced(chat: ChatSemGrad, draft: str, run: Run, ledger: Ledger) -> None:
    state = run(guarded(chat, NOTHING, abstain_message="No."), ASKED, {"callbacks": [ledger]})
    assert last(state).text == "No."
    record = record_of(state)
    assert record["action"] == "abstain"
    assert record["uncertainty"] > 0
    assert draft not in json.dumps(state, default=repr)
    assert [run.outputs["generations"][0][0]["text"] for run in ledger.models()] == ["No."], (
        "the run ends with the outcome"
    )
    ledger.assert_balanced()


def test_the_draft_is_kept_on_request(chat: ChatSemGrad, draft: str) -> None:
    assert record_of(guarded(chat, NOTHING, keep_draft=True).invoke(ASKED))["draft"] == draft


def test_escalation_to_a_scored_chat_model(chat: ChatSemGrad, larger: LanguageModel, run: Run, ledger: Ledger) -> None:
    second = ChatSemGrad.from_model(larger, max_tokens=9)
    state = run(guarded(chat, NOTHING, escalate_to=second), ASKED, {"callbacks": [ledger]})
    assert last(state).text == second.invoke(QUESTION).text
    record = record_of(state)
    assert record["action"] == "escalate"
    assert record["escalated"]["status"] == "scored"
    assert len(ledger.models()) == 2
    ledger.assert_balanced()


def test_a_target_with_a_router_of_its_own_decides_for_itself(
    chat: ChatSemGrad, larger: LanguageModel, run: Run
) -> None:
    strict = UncertaintyRouterCallback(policy=NOTHING, abstain_message="Not me.")
    second = ChatSemGrad.from_model(larger, max_tokens=9, callbacks=[strict])
    state = run(guarded(chat, NOTHING, escalate_to=second), ASKED, None)
    assert last(state).text == "Not me."
    assert record_of(state)["escalated"]["action"] == "abstain"


def test_escalation_to_a_chain(chat: ChatSemGrad, run: Run) -> None:
    noted: list[Any] = []

    def answer(messages: Any) -> str:
        noted.extend(messages)
        return "Help."

    middleware = UncertaintyMiddleware(NOTHING, escalate_to=RunnableLambda(answer))
    agent = create_agent(chat, [], middleware=[middleware], system_prompt="Be brief.")
    state = run(agent, ASKED, None)
    assert last(state).text == "Help."
    assert last(state).id
    assert record_of(state)["escalated"]["status"] == "unscored"
    assert [message.text for message in noted] == ["Be brief.", QUESTION]


def test_a_doubtful_tool_call_does_not_run(caller: ToolCaller, run: Run) -> None:
    runs: list[str] = []
    state = run(guarded(caller, NOTHING, [counting_tool("speak", runs)]), ASKED, None)
    assert runs == []
    assert last(state).tool_calls == []
    assert record_of(state)["action"] == "abstain"
    assert len(caller.requests) == 1


def test_a_tool_call_that_is_let_through_runs(caller: ToolCaller, draft: str, run: Run) -> None:
    runs: list[str] = []
    state = run(guarded(caller, EVERYTHING, [counting_tool("speak", runs)]), ASKED, None)
    assert runs == ["speak"]
    assert last(state).text == draft
    verdicts = [get_verdict(message) for message in state["messages"] if isinstance(message, AIMessage)]
    assert [verdict and verdict.action for verdict in verdicts] == ["answer", "answer"]


@pytest.mark.parametrize(("names", "expected"), [(["speak"], ["speak"]), (["speak", "act"], [])])
def test_trusted_tools_run_whatever_the_score(
    caller: ToolCaller, run: Run, draft: str, names: list[str], expected: list[str]
) -> None:
    runs: list[str] = []
    tools = [counting_tool(name, runs) for name in names]
    state = run(guarded(caller, NOTHING, tools, trusted_tools=["speak", "no such tool"]), ASKED, None)
    assert runs == expected
    first = next(message for message in state["messages"] if isinstance(message, AIMessage))
    verdict = get_verdict(first)
    assert verdict is not None
    assert verdict.action == "abstain"
    assert verdict.enforced is (expected == []), "a trusted tool's call goes out with the decision as advice"
    assert draft not in repr(state), "the text next to it does not"
    assert record_of(state)["enforced"] is True, "the answer after it is withheld"


def test_an_escalated_tool_call_runs(caller: ToolCaller, chat: ChatSemGrad, run: Run) -> None:
    runs: list[str] = []
    larger = ToolCaller(scored=chat)
    state = run(guarded(caller, NOTHING, [counting_tool("speak", runs)], escalate_to=larger), ASKED, None)
    assert runs == ["speak"]
    assert len(caller.requests) == len(larger.requests) == 2
    assert [type(message) for message in state["messages"][1:]] == [AIMessage, ToolMessage, AIMessage]


def test_annotate_delivers_with_advice(chat: ChatSemGrad, draft: str, run: Run) -> None:
    state = run(guarded(chat, NOTHING, mode="annotate"), ASKED, None)
    assert last(state).text == draft
    record = record_of(state)
    assert (record["action"], record["enforced"]) == ("abstain", False)


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_every_decision_is_an_event(chat: ChatSemGrad, draft: str, run: Run, mode: Any) -> None:
    class Listener(Wire):
        events: list[Any] = []  # noqa: RUF012 - one per test

        def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            self.events.append((name, data["action"], data["enforced"]))

    listener = Listener()
    listener.events = []
    state = run(guarded(chat, NOTHING, mode=mode), ASKED, {"callbacks": [listener]})
    assert listener.events == [("semgrad_guard", "abstain", mode == "enforce")]
    if mode == "observe":
        assert last(state).text == draft
        assert record_of(state)["threshold"] is None, "the message is as the model made it"


def test_raise(chat: ChatSemGrad, draft: str, run: Run, ledger: Ledger) -> None:
    agent = guarded(chat, NOTHING, mode="raise")
    with pytest.raises(LowConfidenceError) as caught:
        run(agent, ASKED, {"callbacks": [ledger]})
    assert draft not in repr(vars(caught.value))
    ledger.assert_balanced()
    assert last(run(guarded(chat, EVERYTHING, mode="raise"), ASKED, None)).text == draft


def test_an_agents_name_stands_on_every_message(chat: ChatSemGrad, run: Run) -> None:
    for target in (None, RunnableLambda(lambda _: "Help."), chat):
        middleware = UncertaintyMiddleware(NOTHING, escalate_to=target)
        assert last(run(create_agent(chat, [], middleware=[middleware], name="ann"), ASKED, None)).name == "ann"


@pytest.mark.parametrize("on_unscored", ["abstain", "answer", "escalate"])
def test_a_message_without_a_score_goes_by_the_policy(run: Run, on_unscored: Any) -> None:
    class Unscored(ToolCaller):
        def _answer(self, messages: Any, tools: Any) -> AIMessage:
            return AIMessage("Bare.")

    policy = Policy(threshold=1e308, on_unscored=on_unscored)
    model = Unscored(scored=ChatSemGrad())
    state = run(guarded(model, policy, escalate_to=RunnableLambda(lambda _: "Help.")), ASKED, None)
    assert last(state).text == {"abstain": "I don't know.", "answer": "Bare.", "escalate": "Help."}[on_unscored]
    assert record_of(state)["status"] == "unscored"
    assert record_of(state)["action"] == on_unscored


def test_checkpoints_hold_plain_records(chat: ChatSemGrad, caller: ToolCaller, draft: str) -> None:
    runs: list[str] = []
    for model, policy in ((chat, NOTHING), (caller, EVERYTHING)):
        middleware = UncertaintyMiddleware(policy, escalate_to=chat)
        agent = create_agent(
            model,
            [counting_tool("speak", runs)] * (model is caller),
            middleware=[middleware],
            checkpointer=InMemorySaver(),
        )
        config: Any = {"configurable": {"thread_id": "1"}}
        agent.invoke(ASKED, config)
        kept = agent.get_state(config).values["messages"][-1].response_metadata
        assert json.loads(json.dumps(kept)) == kept
        agent.invoke({"messages": [("human", QUESTION)]}, config)
        assert len(agent.get_state(config).values["messages"]) >= 4


class Reply(BaseModel):
    """A structured answer."""

    word: str


@pytest.mark.parametrize("with_tool", [False, True])
def test_structured_responses(chat: ChatSemGrad, run: Run, with_tool: bool) -> None:
    caller = ToolCaller(scored=chat, ignores=("speak",))
    tools = [counting_tool("speak", [])] * with_tool

    def agent(policy: Policy, **options: Any) -> Any:
        middleware = [UncertaintyMiddleware(policy, **options)]
        return create_agent(caller, tools, middleware=middleware, response_format=ToolStrategy(Reply))

    state = run(agent(EVERYTHING), ASKED, None)
    assert state["structured_response"] == Reply(word="x")
    state = run(agent(NOTHING, escalate_to=caller.model_copy()), ASKED, None)
    assert state["structured_response"] == Reply(word="x")
    with pytest.raises(LowConfidenceError, match=r"above the threshold.*owes a structured response") as caught:
        run(agent(NOTHING), ASKED, None)
    assert caught.value.verdict.draft is None
    with pytest.raises(InputError, match="must be a chat model"):
        run(agent(NOTHING, escalate_to=RunnableLambda(lambda _: "text")), ASKED, None)


def test_a_router_and_a_middleware_are_one_too_many(chat: ChatSemGrad, run: Run) -> None:
    router = UncertaintyRouterCallback(policy=EVERYTHING)
    with pytest.raises(UnenforcedPolicyError, match="Keep one"):
        run(guarded(chat, EVERYTHING), ASKED, {"callbacks": [router]})
    with pytest.raises(UnenforcedPolicyError, match="Keep one"):
        run(guarded(chat.model_copy(update={"callbacks": [router]}), EVERYTHING), ASKED, None)


def test_a_policy_for_another_model_is_refused(chat: ChatSemGrad, run: Run, ledger: Ledger) -> None:
    with pytest.raises(BindingMismatchError):
        run(guarded(chat, policy_for_another_model()), ASKED, {"callbacks": [ledger]})
    ledger.assert_balanced()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": 0.5}, "needs a policy"),
        ({"mode": "block"}, "mode must be one of 'enforce'"),
        ({"escalate_to": len}, "RunnableLambda"),
        ({"trusted_tools": "search"}, r"\['search'\]"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        UncertaintyMiddleware(**{"policy": EVERYTHING, **options})
    with pytest.raises(InputError, match="'approve', 'edit' and 'reject'"):
        HumanReview(allowed_decisions=("accept",))  # type: ignore[arg-type]
