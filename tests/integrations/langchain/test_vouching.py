"""A guard trusts its own scores of the delivered text; neither records that came along nor unseen decoding."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import BaseModel, Field

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    HumanReview,
    LowConfidenceError,
    UncertaintyMiddleware,
    get_verdict,
)
from semgrad_guard import Calibration, LanguageModel, Policy, Verdict
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.pocket import CALIBRATION_PATH
from tests.pairwise import in_turn

from .served import ServedModel
from .support import EVERYTHING, NOTHING, QUESTION, Route, metadata_of, text_of

KNOWN = "What is the capital of Japan?"


class Server(ServedModel):
    """Answers with this text and metadata."""

    text: str = "Tokyo"
    metadata_given: dict[str, Any] = Field(default_factory=dict)

    def _answer(self, messages: list[BaseMessage], **options: Any) -> AIMessage:
        return AIMessage(content=self.text, response_metadata=dict(self.metadata_given))


class Silent(Server):
    """The same without a stream of its own."""

    _stream = BaseChatModel._stream


@pytest.fixture(scope="module")
def pocket() -> LanguageModel:
    return LanguageModel.from_pretrained("pocket")


@pytest.fixture(scope="module")
def promise() -> Policy:
    return Policy.from_calibration(Calibration.load(CALIBRATION_PATH))


@pytest.fixture(scope="module")
def record(pocket: LanguageModel, promise: Policy) -> dict[str, Any]:
    """The metadata of a promised answer."""
    answer = GuardedChatModel(ChatSemGrad.from_model(pocket), promise).invoke(KNOWN)
    verdict = get_verdict(answer)
    assert verdict is not None
    assert verdict.promised
    return dict(answer.response_metadata)


@pytest.mark.parametrize("kind", [Server, Silent])
def test_a_servers_own_record_is_not_believed(
    pocket: LanguageModel, promise: Policy, record: dict[str, Any], route: Route, kind: type[Server]
) -> None:
    guard = GuardedChatModel(kind(text="xyz", metadata_given=record), promise, scorer=pocket, prompt_template="chat")
    (found,) = metadata_of(route(guard, KNOWN, {}))
    assert found["action"] == "abstain"
    assert not found["promised"]


def test_a_record_beside_another_text_is_not_believed(
    pocket: LanguageModel, promise: Policy, record: dict[str, Any]
) -> None:
    def copied(_: Any) -> AIMessage:
        return AIMessage("LIE", response_metadata=record)

    guard = GuardedChatModel(ChatSemGrad.from_model(pocket), Policy(threshold=0.0), escalate_to=RunnableLambda(copied))
    verdict = get_verdict(guard.invoke(KNOWN))
    assert verdict is not None
    assert (verdict.status, verdict.promised) == ("unscored", False)
    moved = get_verdict(copied(None))
    assert moved is not None
    assert moved.reason == "the record that came with it was made for another text"
    own = GuardedChatModel(ChatSemGrad.from_model(pocket), promise).invoke(KNOWN).text
    assert get_verdict(AIMessage(f" {own}", response_metadata=record)).promised  # type: ignore[union-attr]


def test_a_calibration_of_own_answers_is_refused_for_served_ones(pocket: LanguageModel, promise: Policy) -> None:
    with pytest.raises(BindingMismatchError, match="served"):
        GuardedChatModel(Server(), promise, scorer=pocket).invoke(KNOWN)
    vouched = get_verdict(GuardedChatModel(Server(), promise, scorer=pocket, prompt_template="chat").invoke(KNOWN))
    assert vouched is not None
    assert vouched.promised


@pytest.mark.parametrize("reason", [{"finish_reason": "length"}, {"stop_reason": "max_tokens"}])
def test_a_served_answer_that_a_limit_ended_is_not_promised(
    pocket: LanguageModel, promise: Policy, reason: dict[str, Any]
) -> None:
    guard = GuardedChatModel(Server(metadata_given=reason), promise, scorer=pocket, prompt_template="chat")
    verdict = get_verdict(guard.invoke(KNOWN))
    assert verdict is not None
    assert not verdict.promised
    assert "cut off" in verdict.unfamiliar[0]


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"stop": ["k"]}])
def test_an_answer_that_the_call_cuts_off_is_not_promised(
    pocket: LanguageModel, promise: Policy, route: Route, options: dict[str, Any]
) -> None:
    guard = GuardedChatModel(ChatSemGrad.from_model(pocket), promise).bind(**options)
    (found,) = metadata_of(route(guard, KNOWN, {}))
    assert not found["promised"]
    assert "cut off" in found["unfamiliar"][0]


def test_a_stream_of_several_answers_is_refused(language_model: LanguageModel) -> None:
    guard = GuardedChatModel(Server(), EVERYTHING, scorer=language_model)
    with pytest.raises(InputError, match="a stream holds one answer"):
        list(guard.stream(QUESTION, n=2))
    assert len(guard.generate([[AIMessage("?")]], n=2).generations[0]) == 2


@pytest.mark.parametrize(
    "wrong", [{"monitor": 3}, {"timeout": -1}, {"timeout": 0}, {"timeout": float("nan")}, {"timeout": True}]
)
def test_wrong_terms_are_refused_at_once(chat: ChatSemGrad, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        GuardedChatModel(chat, NOTHING, **wrong)


def test_a_guard_around_a_guard(pocket: LanguageModel, promise: Policy) -> None:
    inner = GuardedChatModel(ChatSemGrad.from_model(pocket), promise)
    assert get_verdict(GuardedChatModel(inner, promise).invoke(KNOWN)).promised  # type: ignore[union-attr]


def test_a_function_of_the_verdict_cannot_tell_the_draft(chat: ChatSemGrad, draft: str, route: Route) -> None:
    def words(verdict: Verdict) -> str:
        return f"no: {verdict!r} {verdict.uncertainty}"

    pieces = route(GuardedChatModel(chat, NOTHING, abstain_message=words), QUESTION, {})
    assert text_of(pieces).startswith("no: ")
    assert draft not in text_of(pieces)
    kept = GuardedChatModel(chat, NOTHING, abstain_message=lambda verdict: f"not {verdict.draft}", keep_draft=True)
    assert kept.invoke(QUESTION).text == f"not {draft}"


class Reading(BaseModel):
    """The form that an agent owes."""

    city: str


@pytest.mark.parametrize("form", [Reading, ProviderStrategy(Reading)])
def test_an_abstention_where_a_structure_is_due_is_an_error(pocket: LanguageModel, form: Any) -> None:
    agent = create_agent(
        ChatSemGrad.from_model(pocket, max_tokens=24), response_format=form, middleware=[UncertaintyMiddleware(NOTHING)]
    )
    with pytest.raises(LowConfidenceError, match="structured response"):
        agent.invoke({"messages": [("user", QUESTION)]})


@in_turn(form=[Reading, ProviderStrategy(Reading)], waits=[False, True])
def test_a_person_can_give_the_structure_that_is_due(pocket: LanguageModel, form: Any, waits: bool) -> None:
    agent = create_agent(
        ChatSemGrad.from_model(pocket, max_tokens=24),
        response_format=form,
        middleware=[UncertaintyMiddleware(NOTHING, escalate_to=HumanReview())],
        checkpointer=InMemorySaver(),
    )
    thread: Any = {"configurable": {"thread_id": "1"}}

    def run(given: Any) -> dict[str, Any]:
        return asyncio.run(agent.ainvoke(given, thread)) if waits else agent.invoke(given, thread)

    (question,) = run({"messages": [("user", QUESTION)]})["__interrupt__"]
    (action,) = question.value["action_requests"]
    edited = {"name": action["name"], "args": dict.fromkeys(action["args"], '{"city": "Paris"}')}
    state = run(Command(resume={"decisions": [{"type": "edit", "edited_action": edited}]}))
    assert state["structured_response"] == Reading(city="Paris")
    run({"messages": [("user", QUESTION)]})
    with pytest.raises(LowConfidenceError, match="rejected by a person"):
        run(Command(resume={"decisions": [{"type": "reject"}]}))
