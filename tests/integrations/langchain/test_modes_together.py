"""Modes in batches, behind fallbacks, with caches, and before an audience that streams."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers._streaming import _V2StreamingCallbackHandler

from langchain_semgrad_guard import (
    ChatSemGrad,
    LowConfidenceError,
    UncertaintyRouter,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import UnenforcedPolicyError
from tests.pairwise import pairwise

from .router_kit import ABSTENTION, ELSEWHERE, KINDS, MODES, PATHS, PROMPT, Kit
from .served import Served
from .support import (
    EVERYTHING,
    NOTHING,
    QUESTION,
    Ledger,
    Route,
    collect,
    text_of,
)

QUESTIONS = [{"question": text} for text in ("Who are you?", "Where?", "When did it begin?", "Why so?")]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_raise_in_batches(kit: Kit, asynchronous: bool) -> None:
    drafts = (PROMPT | kit.router(EVERYTHING)).batch(QUESTIONS)
    lower, upper = sorted(_uncertainty(message) for message in drafts)[1:3]
    router = kit.router(Policy(threshold=(lower + upper) / 2), mode="raise")
    config: Any = {"callbacks": [kit.wire, kit.ledger]}

    def batch(model: Any, inputs: Any, **settings: Any) -> list[Any]:
        call = model.abatch if asynchronous else model.batch
        found = call(inputs, config, **settings)
        return asyncio.run(found) if asynchronous else found

    for model, inputs in ((PROMPT | router, QUESTIONS), (router, [question["question"] for question in QUESTIONS])):
        found = batch(model, inputs, return_exceptions=True)
        for answer, known in zip(found, drafts, strict=True):
            if _uncertainty(known) <= lower:
                assert answer.text == known.text
            else:
                assert isinstance(answer, LowConfidenceError)
                assert known.text not in repr(vars(answer))
        with pytest.raises(LowConfidenceError):
            batch(model, inputs)
    kit.assert_closed()


def _uncertainty(message: AIMessage) -> float:
    verdict = get_verdict(message)
    assert verdict is not None
    assert verdict.uncertainty is not None
    return verdict.uncertainty


def test_fallbacks_by_confidence(kit: Kit, route: Route, draft: str) -> None:
    sure = FakeListChatModel(responses=[ELSEWHERE])
    chain = kit.router(NOTHING, mode="raise").with_fallbacks([sure], exceptions_to_handle=(LowConfidenceError,))
    pieces = route(chain, QUESTION, {"callbacks": [kit.wire, kit.ledger]})
    assert text_of(pieces) == ELSEWHERE
    assert draft not in "".join(kit.wire.tokens)
    kit.assert_closed()


@pytest.mark.parametrize("mode", MODES)
def test_the_cache_holds_answers_that_each_router_judges_anew(
    kit: Kit, cache: InMemoryCache, draft: str, mode: str
) -> None:
    first = kit.router(NOTHING, mode=mode)
    for _ in range(2):  # the second answer comes from the cache
        if mode == "raise":
            with pytest.raises(LowConfidenceError):
                first.invoke(QUESTION, {"callbacks": [kit.wire, kit.ledger]})
        else:
            first.invoke(QUESTION, {"callbacks": [kit.wire, kit.ledger]})
    record = kit.router(EVERYTHING, mode="annotate").invoke(QUESTION).response_metadata["semgrad_guard"]
    assert (record["action"], record["threshold"], record["reason"]) == ("answer", 1e308, None)
    assert kit.router(EVERYTHING).invoke(QUESTION).text == draft
    kit.assert_closed()


class Audience(BaseCallbackHandler, _V2StreamingCallbackHandler):
    """Hears what LangGraph's version 3 hears: a run's events, or its message where it ends without any."""

    def __init__(self) -> None:
        self.reply, self.records, self.runs = "", list[dict[str, Any]](), 0
        self.streamed = set[UUID]()

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        self.runs += 1

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        if run_id not in self.streamed:
            (generation,) = response.generations[0]
            assert isinstance(generation, ChatGeneration)
            self.reply += generation.message.text
            self.records.append(generation.message.response_metadata["semgrad_guard"])

    def on_stream_event(self, event: Any, *, run_id: UUID, **_: Any) -> None:
        self.streamed.add(run_id)
        if event["event"] == "content-block-delta":
            self.reply += event["delta"]["text"]
        if event["event"] == "message-finish":
            self.records.append(event["metadata"]["semgrad_guard"])


@pairwise(
    kit=KINDS,
    path=["invoke", "ainvoke", "batch", "abatch", "stream_events v3", "astream_events v3"],
    mode=["enforce", "annotate"],
    indirect=["kit"],
)
def test_an_audience_hears_each_answer_once(kit: Kit, path: str, mode: str, draft: str) -> None:
    """On the paths where LangChain speaks to it in events."""
    audience = Audience()
    PATHS[path](kit.router(NOTHING, mode=mode), QUESTION, {"callbacks": [audience, kit.ledger]})
    assert audience.reply == (ABSTENTION if mode == "enforce" else draft)
    assert [record["action"] for record in audience.records] == ["abstain"]
    assert audience.runs == 1
    kit.assert_closed()


def test_an_annotated_live_answer_leaves_no_decision_in_the_cache(chat: ChatSemGrad, cache: InMemoryCache) -> None:
    annotating = UncertaintyRouter(chat, NOTHING, mode="annotate")
    node = RunnableLambda(lambda _: annotating.invoke(QUESTION))  # with an audience, invoke streams and caches
    for _ in range(2):
        events = collect(node.astream_events("go", version="v2"))
        (end,) = [event["data"]["output"] for event in events if event["event"] == "on_chat_model_end"]
        assert end.response_metadata["semgrad_guard"]["action"] == "abstain"
    for other, action in ((EVERYTHING, "answer"), (NOTHING, "abstain")):  # replayed from the cache, judged anew
        audience = Audience()
        UncertaintyRouter(chat, other, mode="annotate").invoke(QUESTION, {"callbacks": [audience]})
        (record,) = audience.records
        assert (record["action"], record["threshold"]) == (action, other.threshold)
        assert (record["reason"] is None) == (action == "answer")
    record = chat.invoke(QUESTION).response_metadata["semgrad_guard"]
    assert (record["action"], record["enforced"], record["threshold"], record["reason"]) == ("answer", True, None, None)


def test_a_router_is_heard_where_it_is_called_without_a_config(kit: Kit, route: Route) -> None:
    node = RunnableLambda(lambda _: kit.router(NOTHING).invoke(QUESTION).text)
    assert text_of(route(node, "go", {"callbacks": [kit.wire, kit.ledger]})) == ABSTENTION
    kit.assert_closed()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_half_read_live_stream_leaves_no_router_behind(
    chat: ChatSemGrad, language_model: LanguageModel, ledger: Ledger, asynchronous: bool
) -> None:
    router = UncertaintyRouterCallback(NOTHING, mode="annotate")
    config: Any = {"callbacks": [router, ledger]}

    def elsewhere() -> None:
        with pytest.raises(UnenforcedPolicyError):
            Served(weights=language_model).invoke(QUESTION, {"callbacks": [router]})
        assert chat.invoke(QUESTION).response_metadata["semgrad_guard"]["threshold"] is None

    async def arun() -> None:
        live: Any = chat.astream(QUESTION, config)
        await anext(live)
        elsewhere()
        await live.aclose()

    if asynchronous:
        asyncio.run(arun())
    else:
        live: Any = chat.stream(QUESTION, config)
        next(live)
        elsewhere()
        live.close()
    assert ledger.closed, "a stream that is left closes its run"
    ledger.assert_balanced()
