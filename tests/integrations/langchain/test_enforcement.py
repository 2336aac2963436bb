"""Every path times every outcome: the delivered text, its metadata, no leak of the draft, every run closed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import BindingMismatchError, InputError, UnenforcedPolicyError
from tests.pairwise import in_turn, pairwise

from .support import (
    EVERYTHING,
    NOTHING,
    QUESTION,
    ROUTES,
    Ledger,
    Route,
    Wire,
    metadata_of,
    policy_for_another_model,
    text_of,
)

TARGET_TEXT = "from the library"
ABSTENTION = "I would rather not say."


def library(messages: list[BaseMessage]) -> AIMessage:
    return AIMessage(content=TARGET_TEXT)


@pytest.fixture
def second(larger: LanguageModel) -> ChatSemGrad:
    """A scored target."""
    return ChatSemGrad.from_model(larger, max_tokens=9)


ATTACHED = ("config", "constructor", "with_config")


@pytest.fixture(params=ATTACHED)
def attach(request: pytest.FixtureRequest) -> Callable[..., tuple[Any, list[Any]]]:
    """One way to attach a router: the model to call, and the callbacks for its config."""

    def attached(chat: ChatSemGrad, router: Any, *handlers: Any) -> tuple[Any, list[Any]]:
        if request.param == "config":
            return chat, [router, *handlers]
        if request.param == "constructor":
            return chat.model_copy(update={"callbacks": [router]}), list(handlers)
        return chat.with_config(callbacks=[router]), list(handlers)

    return attached


def assert_nothing_leaked(draft: str, pieces: list[Any], wire: Wire, *, spoken: str) -> None:
    """No token of the draft went out, live or in a piece; live tokens, if any, are those of the delivered text."""
    assert draft not in text_of(pieces)
    assert "".join(wire.tokens) in ("", spoken)
    assert draft not in repr(pieces), "the draft hides in the delivered metadata"


def assert_closed_once(wire: Wire, ledger: Ledger) -> None:
    assert sorted(map(str, wire.started)) == sorted(map(str, wire.ended))
    ledger.assert_balanced()


@in_turn(route=ROUTES, attach=ATTACHED, indirect=["route", "attach"])
def test_a_certain_answer_is_delivered(
    chat: ChatSemGrad, route: Route, attach: Any, draft: str, wire: Wire, ledger: Ledger
) -> None:
    model, callbacks = attach(chat, UncertaintyRouterCallback(policy=EVERYTHING), wire, ledger)
    pieces = route(model, QUESTION, {"callbacks": callbacks})
    assert text_of(pieces) == draft
    (record,) = metadata_of(pieces)
    assert (record["action"], record["status"], record["threshold"]) == ("answer", "scored", 1e308)
    assert_closed_once(wire, ledger)


@in_turn(route=ROUTES, attach=ATTACHED, indirect=["route", "attach"])
def test_an_uncertain_answer_is_withheld(
    chat: ChatSemGrad, route: Route, attach: Any, draft: str, wire: Wire, ledger: Ledger
) -> None:
    router = UncertaintyRouterCallback(policy=NOTHING, abstain_message=ABSTENTION)
    model, callbacks = attach(chat, router, wire, ledger)
    pieces = route(model, QUESTION, {"callbacks": callbacks})
    assert text_of(pieces) == ABSTENTION
    (record,) = metadata_of(pieces)
    assert (record["action"], record["status"], record["threshold"]) == ("abstain", "scored", -1.0)
    assert record["uncertainty"] > 0, "an abstention keeps its score"
    assert record["draft"] is None
    others = {key: value for key, value in pieces[-1].response_metadata.items() if key != "semgrad_guard"}
    assert others == {"model_name": chat.model, "model_provider": "semgrad_guard", "finish_reason": "stop"}
    assert_nothing_leaked(draft, pieces, wire, spoken=ABSTENTION)
    assert_closed_once(wire, ledger)


@pairwise(route=ROUTES, attach=ATTACHED, returns=["message", "text"], indirect=["route", "attach"])
def test_an_uncertain_answer_goes_to_any_runnable(
    chat: ChatSemGrad, route: Route, attach: Any, draft: str, wire: Wire, ledger: Ledger, returns: str
) -> None:
    target: Runnable[Any, Any] = RunnableLambda(library)
    if returns == "text":
        target = target | StrOutputParser()
    model, callbacks = attach(chat, UncertaintyRouterCallback(policy=NOTHING, escalate_to=target), wire, ledger)
    pieces = route(model, QUESTION, {"callbacks": callbacks})
    assert text_of(pieces) == TARGET_TEXT
    (record,) = metadata_of(pieces)
    assert (record["action"], record["promised"]) == ("escalate", False)
    assert (record["escalated"]["status"], record["escalated"]["model"]) == ("unscored", "external")
    assert_nothing_leaked(draft, pieces, wire, spoken=TARGET_TEXT)
    assert_closed_once(wire, ledger)
    assert any(run.name == "RunnableLambda" or run.run_type == "chain" for run in ledger.runs), "the target is traced"


@in_turn(route=ROUTES, attach=ATTACHED, indirect=["route", "attach"])
def test_an_uncertain_answer_goes_to_a_scored_model(
    chat: ChatSemGrad, route: Route, attach: Any, draft: str, wire: Wire, ledger: Ledger, second: ChatSemGrad
) -> None:
    model, callbacks = attach(chat, UncertaintyRouterCallback(policy=NOTHING, escalate_to=second), wire, ledger)
    pieces = route(model, QUESTION, {"callbacks": callbacks})
    expected = second.invoke(QUESTION)
    assert text_of(pieces) == expected.text != draft
    (record,) = metadata_of(pieces)
    assert record["action"] == "escalate"
    assert record["escalated"]["uncertainty"] == expected.response_metadata["semgrad_guard"]["uncertainty"]
    assert record["escalated"]["action"] == "answer"
    assert_nothing_leaked(draft, pieces, wire, spoken=expected.text)
    assert_closed_once(wire, ledger)
    assert len(ledger.models()) == 2, "the draft's run and the target's"


@in_turn(route=ROUTES, attach=ATTACHED, indirect=["route", "attach"])
def test_a_target_may_carry_a_router_of_its_own(
    chat: ChatSemGrad, route: Route, attach: Any, draft: str, wire: Wire, ledger: Ledger, second: ChatSemGrad
) -> None:
    last = UncertaintyRouterCallback(policy=NOTHING, abstain_message=ABSTENTION)
    guarded = second.with_config(callbacks=[last])
    model, callbacks = attach(chat, UncertaintyRouterCallback(policy=NOTHING, escalate_to=guarded), wire, ledger)
    pieces = route(model, QUESTION, {"callbacks": callbacks})
    assert text_of(pieces) == ABSTENTION
    (record,) = metadata_of(pieces)
    assert (record["action"], record["escalated"]["action"]) == ("escalate", "abstain")
    assert_nothing_leaked(draft, pieces, wire, spoken=ABSTENTION)
    assert_closed_once(wire, ledger)


@pytest.mark.parametrize("outcome", ["answer", "abstain", "escalate", "scored"])
def test_chains_deliver_the_same(
    chat: ChatSemGrad, route: Route, draft: str, wire: Wire, ledger: Ledger, second: ChatSemGrad, outcome: str
) -> None:
    routers = {
        "answer": UncertaintyRouterCallback(policy=EVERYTHING),
        "abstain": UncertaintyRouterCallback(policy=NOTHING, abstain_message=ABSTENTION),
        "escalate": UncertaintyRouterCallback(policy=NOTHING, escalate_to=RunnableLambda(library)),
        "scored": UncertaintyRouterCallback(policy=NOTHING, escalate_to=second),
    }
    prompt = ChatPromptTemplate.from_messages([("human", "{question}")])
    chain = prompt | chat | StrOutputParser()
    pieces = route(chain, {"question": QUESTION}, {"callbacks": [routers[outcome], wire, ledger]})
    expected = {"answer": draft, "abstain": ABSTENTION, "escalate": TARGET_TEXT, "scored": second.invoke(QUESTION).text}
    assert text_of(pieces) == expected[outcome]
    if outcome != "answer":
        assert_nothing_leaked(draft, pieces, wire, spoken=expected[outcome])
    assert_closed_once(wire, ledger)
    root = next(run for run in ledger.runs if run.parent_run_id is None)
    assert all(run.trace_id == root.trace_id for run in ledger.runs), "escalations stand in the chain's own trace"


@in_turn(route=ROUTES, attach=ATTACHED, indirect=["route", "attach"])
def test_a_policy_for_something_else_is_refused(
    chat: ChatSemGrad, route: Route, attach: Any, wire: Wire, ledger: Ledger
) -> None:
    router = UncertaintyRouterCallback(policy=policy_for_another_model())
    model, callbacks = attach(chat, router, wire, ledger)
    with pytest.raises(BindingMismatchError, match="model is 'tiny"):
        route(model, QUESTION, {"callbacks": callbacks})
    assert wire.started
    assert_closed_once(wire, ledger)


@pytest.mark.parametrize("on_unscored", ["abstain", "answer", "escalate"])
def test_an_answer_without_a_score_follows_the_policy(
    chat: ChatSemGrad, route: Route, on_unscored: Any, draft: str
) -> None:
    class Unscored(ChatSemGrad):
        def message_of(self, draft: Any, request: Any) -> AIMessage:
            return AIMessage(draft.answer.text)

    bare = Unscored.from_model(chat.language_model, max_tokens=12)
    policy = Policy(threshold=1e308, on_unscored=on_unscored)
    router = UncertaintyRouterCallback(policy=policy, escalate_to=RunnableLambda(library), abstain_message=ABSTENTION)
    pieces = route(bare, QUESTION, {"callbacks": [router]})
    assert text_of(pieces) == {"abstain": ABSTENTION, "answer": draft, "escalate": TARGET_TEXT}[on_unscored]
    (record,) = metadata_of(pieces)
    assert (record["status"], record["uncertainty"], record["promised"]) == ("unscored", None, False)


def test_a_router_does_not_escalate_inside_its_own_escalation(chat: ChatSemGrad, route: Route) -> None:
    requests: list[str] = []

    def note(messages: Any) -> Any:
        requests.append("asked")
        return messages

    router = UncertaintyRouterCallback(policy=NOTHING, abstain_message=ABSTENTION)
    guarded = chat.model_copy(update={"callbacks": [router]})
    router.escalate_to = RunnableLambda(note) | guarded
    pieces = route(guarded, QUESTION, {})
    assert requests == ["asked"]
    assert text_of(pieces) == ABSTENTION
    (record,) = metadata_of(pieces)
    assert (record["action"], record["escalated"]["action"]) == ("escalate", "abstain")


def test_an_error_in_the_target_reaches_the_caller(chat: ChatSemGrad, route: Route, wire: Wire, ledger: Ledger) -> None:
    def broken(messages: Any) -> str:
        raise LookupError("the library is closed")

    router = UncertaintyRouterCallback(policy=NOTHING, escalate_to=RunnableLambda(broken))
    with pytest.raises(LookupError, match="closed"):
        route(chat, QUESTION, {"callbacks": [router, wire, ledger]})
    assert wire.tokens == []
    assert_closed_once(wire, ledger)


def test_a_target_must_return_a_message_or_text(chat: ChatSemGrad, route: Route) -> None:
    router = UncertaintyRouterCallback(policy=NOTHING, escalate_to=RunnableLambda(lambda _: {"score": 1}))
    with pytest.raises(InputError, match="returned a dict"):
        route(chat, QUESTION, {"callbacks": [router]})


def test_the_target_sees_the_original_messages(chat: ChatSemGrad, route: Route) -> None:
    seen: list[list[BaseMessage]] = []

    def target(messages: list[BaseMessage]) -> str:
        seen.append(messages)
        return TARGET_TEXT

    router = UncertaintyRouterCallback(policy=NOTHING, escalate_to=RunnableLambda(target))
    route(chat, [("system", "Be brief."), ("human", QUESTION)], {"callbacks": [router]})
    ((system, human),) = seen
    assert (system.type, system.content, human.type, human.content) == ("system", "Be brief.", "human", QUESTION)


def test_the_draft_is_kept_on_request(chat: ChatSemGrad, route: Route, draft: str) -> None:
    pieces = route(chat, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING, keep_draft=True)]})
    (record,) = metadata_of(pieces)
    assert record["draft"] == draft
    assert draft not in text_of(pieces)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_streaming_field_sends_no_draft(
    language_model: LanguageModel, route: Route, streaming: bool, wire: Wire
) -> None:
    chat = ChatSemGrad.from_model(language_model, max_tokens=12, streaming=streaming)
    pieces = route(chat, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING), wire]})
    assert "".join(wire.tokens) in ("", "I don't know.")
    assert text_of(pieces) == "I don't know."


def test_without_a_router_tokens_are_live(chat: ChatSemGrad, draft: str, wire: Wire) -> None:
    for name in ("stream", "astream"):
        wire.tokens.clear()
        pieces = ROUTES[name](chat, QUESTION, {"callbacks": [wire]})
        assert len(pieces) > 5
        assert text_of(pieces) == "".join(wire.tokens) == draft


def test_a_verdict_can_be_read_back(chat: ChatSemGrad, second: ChatSemGrad) -> None:
    router = UncertaintyRouterCallback(policy=NOTHING, escalate_to=second, keep_draft=True)
    message = chat.invoke(QUESTION, {"callbacks": [router]})
    verdict = get_verdict(message)
    assert verdict is not None
    assert verdict.escalated_from is not None
    assert verdict.text == message.text
    record = message.response_metadata["semgrad_guard"]
    assert verdict.escalated_from.metadata(keep_draft=True) == record
    assert (verdict.uncertainty, verdict.model) == (record["escalated"]["uncertainty"], record["escalated"]["model"])


def test_two_routers_on_one_model_are_refused(chat: ChatSemGrad, route: Route, wire: Wire) -> None:
    callbacks = [UncertaintyRouterCallback(policy=EVERYTHING), UncertaintyRouterCallback(policy=NOTHING), wire]
    with pytest.raises(UnenforcedPolicyError, match="Attach one"):
        route(chat, QUESTION, {"callbacks": callbacks})
    assert wire.results == []
    assert wire.started == wire.ended


def test_one_router_attached_twice_is_one(chat: ChatSemGrad, route: Route) -> None:
    router = UncertaintyRouterCallback(policy=NOTHING, abstain_message=ABSTENTION)
    guarded = chat.model_copy(update={"callbacks": [router]})
    assert text_of(route(guarded, QUESTION, {"callbacks": [router]})) == ABSTENTION


def test_a_subclass_with_hooks_of_its_own_is_enforced(chat: ChatSemGrad, route: Route) -> None:
    class Own(UncertaintyRouterCallback):
        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            pass

    assert text_of(route(chat, QUESTION, {"callbacks": [Own(policy=NOTHING)]})) == "I don't know."
