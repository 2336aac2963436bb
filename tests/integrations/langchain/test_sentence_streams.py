"""Guarded streams by sentence: chunks, tokens, events and graphs get every sentence that is let through as it ends."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.chat_models import BaseChatModel
from langgraph.graph import START, MessagesState, StateGraph

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback, get_verdict
from semgrad_guard import Guard, LanguageModel, Policy
from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.errors import InputError
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel
from tests.pairwise import in_turn


class Tokens(BaseCallbackHandler):
    """The tokens of runs, and their last text."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.end = ""

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.seen.append(token)

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.end = response.generations[0][0].text


@pytest.fixture(scope="module")
def fixed(language_model: LanguageModel) -> LanguageModel:
    return FixedModel.like(language_model)


@pytest.fixture(scope="module")
def between(fixed: LanguageModel) -> float:
    """A threshold between the scores of the surest sentence and of the second."""
    verdict = get_verdict(ChatSemGrad.from_model(fixed, by="sentence").invoke("q"))
    assert verdict is not None
    first, second, _ = sorted(s.uncertainty for s in verdict.sentences if s.uncertainty is not None)
    return (first + second) / 2


def guarded(fixed: LanguageModel, front: str, threshold: float, **given: Any) -> tuple[BaseChatModel, list[Any]]:
    chat = ChatSemGrad.from_model(fixed, by="sentence", **given)
    policy = Policy(threshold=threshold)
    return (chat, [UncertaintyRouterCallback(policy)]) if front == "router" else (GuardedChatModel(chat, policy), [])


@in_turn(front=["router", "guard"], on_doubt=["stop", "drop"])
async def test_every_stream_has_the_text_of_the_whole_answer(
    fixed: LanguageModel, between: float, front: str, on_doubt: Any
) -> None:
    model, router = guarded(fixed, front, between, on_doubt=on_doubt, cache=InMemoryCache())
    whole = model.invoke("q", config={"callbacks": router}).content
    tokens = Tokens()
    chunks = list(model.stream("q", config={"callbacks": [*router, tokens]}))
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    verdict = get_verdict(message)
    assert verdict is not None
    assert message.content == verdict.text == whole == tokens.end == "".join(tokens.seen)
    carried = [one for chunk in chunks for one in chunk.response_metadata.get("semgrad_guard_sentences", [])]
    assert carried == message.response_metadata.get("semgrad_guard_sentences", [])
    assert all(one["action"] == "deliver" for one in carried)
    pieces = [chunk.content async for chunk in model.astream("q", config={"callbacks": router})]
    assert pieces == [chunk.content for chunk in chunks]
    events: list[Any] = [event async for event in model.astream_events("q", config={"callbacks": router}, version="v2")]
    shown = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(shown) == whole
    assert model.invoke("q", config={"callbacks": router}).content == whole  # the cache holds the draft


@pytest.mark.parametrize("front", ["router", "guard"])
def test_a_graph_streams_the_sentences(fixed: LanguageModel, front: str) -> None:
    model, router = guarded(fixed, front, 1e9, cache=InMemoryCache())

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile()
    given = {"messages": [("user", "q")]}
    streamed = list(graph.stream(given, config={"callbacks": router}, stream_mode=["messages", "values"]))
    shown = [part[0].content for mode, part in streamed if mode == "messages" and part[0].content]
    assert shown[:3] == list(PIECES)
    assert streamed[-1][1]["messages"][-1].content == TEXT
    strict, router = guarded(fixed, front, 0.0)
    assert strict.invoke("q", config={"callbacks": router}).content == "I don't know."


def test_answers_that_only_their_end_decides_come_whole(fixed: LanguageModel) -> None:
    model, router = guarded(fixed, "router", 1e9)
    options: Any = {"response_format": {"type": "json_object"}}
    chunks = list(model.stream("q", config={"callbacks": router}, **options))
    assert len([chunk for chunk in chunks if chunk.content]) == 1


@pytest.mark.parametrize("threshold", ["all", "one"])
def test_log_probabilities_come_with_the_end_of_a_whole_answer(
    fixed: LanguageModel, between: float, threshold: str
) -> None:
    model, _ = guarded(fixed, "guard", 1e9 if threshold == "all" else between, on_doubt="drop")
    whole = model.invoke("q", logprobs=True)
    chunks = list(model.stream("q", logprobs=True))
    assert [chunk.content for chunk in chunks if chunk.content][: len(PIECES)] == (
        list(PIECES) if threshold == "all" else [whole.content]
    )
    ours, theirs = (one.response_metadata.get("logprobs", {}) for one in (reduce(add, chunks), whole))
    assert (threshold == "all") == bool(theirs)
    tokens = [[(one["token"], one["bytes"]) for one in found.get("content", ())] for found in (ours, theirs)]
    assert tokens[0] == tokens[1]
    values = [[one["logprob"] for one in found.get("content", ())] for found in (ours, theirs)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)  # read again where the stream let them go


def test_the_closing_line_is_the_last_chunk(fixed: LanguageModel) -> None:
    verdict = get_verdict(ChatSemGrad.from_model(fixed, by="sentence").invoke("Hello"))
    assert verdict is not None
    first, second, _ = (s.uncertainty or 0.0 for s in verdict.sentences)
    assert first < second
    model, router = guarded(fixed, "router", (first + second) / 2)
    shown = [chunk.content for chunk in model.stream("Hello", config={"callbacks": router}) if chunk.content]
    assert shown == [PIECES[0], CLOSING_LINE]


def test_a_calibration_by_sentence_brings_its_unit(fixed: LanguageModel) -> None:
    base = Guard(fixed, Policy(threshold=1e9), by="sentence", on_doubt="drop")
    own = [sentence.uncertainty or 0.0 for sentence in base("q").sentences]
    answers = [AnswerSentences(f"q{number}", TEXT, own, (True,) * 3, (None,) * 3) for number in range(60)]
    made = calibrate_sentences(answers, on_doubt="drop", alpha=0.2, delta=0.2, binding=base.binding, copies="keep")
    chat = ChatSemGrad.from_model(fixed, estimator=made)
    assert (chat.by, chat.on_doubt) == ("sentence", "drop")
    guarded = GuardedChatModel(ChatSemGrad.from_model(fixed), Policy.from_calibration(made))
    verdict = get_verdict(guarded.invoke("q"))
    assert verdict is not None
    assert (len(verdict.sentences), verdict.calibration_id) == (3, made.id)
    assert "".join(str(chunk.content) for chunk in guarded.stream("q")) == verdict.text
    with pytest.raises(InputError, match="on_doubt"):
        ChatSemGrad.from_model(fixed, estimator=made, by="answer", on_doubt="drop")
