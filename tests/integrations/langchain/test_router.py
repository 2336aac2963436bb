"""The router as a step of a chain: every path times every outcome, around both kinds of chat model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouter, UncertaintyRouterCallback, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import BindingMismatchError, InputError, UnenforcedPolicyError

from .served import Served
from .support import EVERYTHING, NOTHING, QUESTION, Ledger, Route, Wire, policy_for_another_model, text_of

PROMPT = ChatPromptTemplate.from_messages([("human", "{question}")])
ASKED = {"question": QUESTION}
ABSTENTION, ELSEWHERE = "I would rather not say.", "from elsewhere"


@pytest.fixture(params=["ChatSemGrad", "served elsewhere"])
def wrapped(request: pytest.FixtureRequest, chat: ChatSemGrad, language_model: LanguageModel) -> dict[str, Any]:
    """A router's arguments for its model."""
    if request.param == "ChatSemGrad":
        return {"llm": chat}
    return {"llm": Served(weights=language_model), "scorer": language_model}


def elsewhere(messages: list[BaseMessage]) -> AIMessage:
    assert [message.text for message in messages] == [QUESTION]
    return AIMessage(content=ELSEWHERE)


def test_a_chain_delivers_what_is_let_through(
    wrapped: dict[str, Any], route: Route, draft: str, wire: Wire, ledger: Ledger
) -> None:
    chain = PROMPT | UncertaintyRouter(**wrapped, policy=EVERYTHING) | StrOutputParser()
    assert text_of(route(chain, ASKED, {"callbacks": [wire, ledger]})) == draft
    assert sorted(map(str, wire.started)) == sorted(map(str, wire.ended))
    ledger.assert_balanced()


def test_a_chain_delivers_the_abstention_and_no_token_of_the_draft(
    wrapped: dict[str, Any], route: Route, draft: str, wire: Wire, ledger: Ledger
) -> None:
    router = UncertaintyRouter(**wrapped, policy=NOTHING, abstain_message=ABSTENTION)
    pieces = route(PROMPT | router | StrOutputParser(), ASKED, {"callbacks": [wire, ledger]})
    assert text_of(pieces) == ABSTENTION
    assert "".join(wire.tokens) in ("", ABSTENTION), "tokens of the draft went out"
    assert draft not in repr(pieces)
    assert ledger.models(), "the tracer of the chain hears the model"
    ledger.assert_balanced()


def test_a_chain_delivers_the_targets_answer(wrapped: dict[str, Any], route: Route, ledger: Ledger) -> None:
    router = UncertaintyRouter(**wrapped, policy=NOTHING, escalate_to=RunnableLambda(elsewhere))
    assert text_of(route(PROMPT | router | StrOutputParser(), ASKED, {"callbacks": [ledger]})) == ELSEWHERE
    ledger.assert_balanced()


def test_a_chain_decides_each_question_of_a_batch_by_its_own_score(wrapped: dict[str, Any]) -> None:
    questions = [{"question": text} for text in ("Who are you?", "Where?", "When did it begin?", "Why so?")]
    drafts = (PROMPT | UncertaintyRouter(**wrapped, policy=EVERYTHING)).batch(questions)
    scores = [_uncertainty(message) for message in drafts]
    lower, upper = sorted(scores)[1:3]
    policy = Policy(threshold=(lower + upper) / 2)  # alone and in a batch, scores differ in their last digits
    chain = PROMPT | UncertaintyRouter(**wrapped, policy=policy, abstain_message=ABSTENTION) | StrOutputParser()
    expected = [d.text if s <= lower else ABSTENTION for d, s in zip(drafts, scores, strict=True)]
    assert expected.count(ABSTENTION) == 2
    assert chain.batch(questions) == expected
    assert asyncio.run(chain.abatch(questions)) == expected
    assert dict(chain.batch_as_completed(questions)) == dict(enumerate(expected))


def _uncertainty(message: AIMessage) -> float:
    verdict = get_verdict(message)
    assert verdict is not None
    assert verdict.uncertainty is not None
    return verdict.uncertainty


def test_it_says_what_the_callback_says(chat: ChatSemGrad) -> None:
    by_callback = chat.invoke(QUESTION, {"callbacks": [UncertaintyRouterCallback(NOTHING)]})
    by_router = UncertaintyRouter(chat, NOTHING).invoke(QUESTION)
    timeless = [{**m.response_metadata["semgrad_guard"], "scoring_ms": None} for m in (by_callback, by_router)]
    assert by_router.text == by_callback.text
    assert timeless[0] == timeless[1]


def test_a_served_answer_is_scored_as_the_scorers_own(chat: ChatSemGrad, language_model: LanguageModel) -> None:
    served = UncertaintyRouter(Served(weights=language_model), EVERYTHING, scorer=language_model).invoke(QUESTION)
    assert served.response_metadata["served_by"] == "a server"
    verdict = get_verdict(served)
    assert verdict is not None
    assert verdict.status == "scored"
    assert verdict.uncertainty == language_model_score(language_model, served.text)


def language_model_score(language_model: LanguageModel, text: str) -> float:
    """HybridGrad of a text, straight from the engine."""
    return language_model.score(QUESTION, text).hybridgrad


def test_handlers_of_the_served_model_hear_no_token_of_the_draft(
    language_model: LanguageModel, route: Route, wire: Wire
) -> None:
    served = Served(weights=language_model, streaming=True, callbacks=[wire])
    pieces = route(UncertaintyRouter(served, NOTHING, scorer=language_model), QUESTION, {})
    assert text_of(pieces) == "I don't know."
    assert wire.started, "they hear the guard's run"
    assert "".join(wire.tokens) in ("", "I don't know.")


def test_a_served_answer_without_text_is_unscored(language_model: LanguageModel, route: Route) -> None:
    router = UncertaintyRouter(
        Served(weights=language_model, silent=True, streaming=False),
        EVERYTHING,
        scorer=language_model,
        abstain_message=ABSTENTION,
    )
    (message,) = route(router, QUESTION, {})
    verdict = get_verdict(message)
    assert verdict is not None
    assert (verdict.status, verdict.action, message.text) == ("unscored", "abstain", ABSTENTION)
    assert "empty" in str(verdict.reason)


def test_the_cache_holds_drafts_that_each_router_judges_anew(
    wrapped: dict[str, Any], cache: InMemoryCache, draft: str
) -> None:
    withholding = UncertaintyRouter(**wrapped, policy=NOTHING, abstain_message=ABSTENTION)
    assert [withholding.invoke(QUESTION).text for _ in range(2)] == [ABSTENTION] * 2
    assert UncertaintyRouter(**wrapped, policy=EVERYTHING).invoke(QUESTION).text == draft


def test_a_foreign_calibration_is_refused(wrapped: dict[str, Any], route: Route) -> None:
    with pytest.raises(BindingMismatchError):
        route(PROMPT | UncertaintyRouter(**wrapped, policy=policy_for_another_model()), ASKED, {})


def test_arguments_bound_to_the_router_reach_the_model(chat: ChatSemGrad) -> None:
    assert len(UncertaintyRouter(chat, EVERYTHING).bind(max_tokens=3).invoke(QUESTION).text) <= 3
    bound = UncertaintyRouter(chat.bind(max_tokens=3), NOTHING, abstain_message=ABSTENTION, keep_draft=True)
    message = bound.invoke(QUESTION)
    assert message.text == ABSTENTION
    assert len(message.response_metadata["semgrad_guard"]["draft"]) <= 3


def test_a_second_router_is_refused(chat: ChatSemGrad, route: Route) -> None:
    chain = PROMPT | UncertaintyRouter(chat, EVERYTHING)
    with pytest.raises(UnenforcedPolicyError, match="2 routers"):
        route(chain, ASKED, {"callbacks": [UncertaintyRouterCallback(EVERYTHING)]})


def test_models_it_cannot_score_are_refused(chat: ChatSemGrad, language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="carry no score"):
        UncertaintyRouter(Served(weights=language_model), EVERYTHING)
    with pytest.raises(InputError, match="scores its own answers"):
        UncertaintyRouter(chat, EVERYTHING, scorer=language_model)
    with pytest.raises(InputError, match=r"\.with_retry\(\)"):
        UncertaintyRouter(chat.with_retry(), EVERYTHING)
    with pytest.raises(InputError, match="not a ChatPromptTemplate"):
        UncertaintyRouter(PROMPT, EVERYTHING)  # type: ignore[arg-type]
