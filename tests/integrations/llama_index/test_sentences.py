"""Answers by sentence: what is let through leaves, as it ends where the LLM streams, and no other sentence does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer

from llama_index_semgrad_guard import SemGradLLM, UncertaintyEvaluator, UncertaintyRouterCallback, asking, guarded
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel

from .scripted import verdict_of
from .ways import Ears, drained, reading

QUERY = "Where is Paris?"


@pytest.fixture(scope="module")
def fixed(wide: LanguageModel) -> LanguageModel:
    return FixedModel.like(wide)


def judged(fixed: LanguageModel, threshold: float, on_doubt: Any = "drop", **options: Any) -> SemGradLLM:
    router = UncertaintyRouterCallback(Policy(threshold=threshold), **options)
    return SemGradLLM.from_model(fixed, by="sentence", on_doubt=on_doubt, router=router)


@pytest.fixture(scope="module")
def scores(fixed: LanguageModel) -> list[float]:
    """Those of the three sentences, as an answer to the query alone."""
    verdict = verdict_of(judged(fixed, 1e9).complete(QUERY))
    return [sentence.uncertainty or 0.0 for sentence in verdict.sentences]


def due(scores: list[float], threshold: float, on_doubt: str) -> str:
    """The text that is delivered, by the rule."""
    through = [score <= threshold for score in scores]
    if on_doubt == "stop":
        count = through.index(False) if False in through else len(through)
        return "".join(PIECES[:count]) + (CLOSING_LINE if 0 < count < len(PIECES) else "")
    return "".join(piece for piece, passes in zip(PIECES, through, strict=True) if passes)


@pytest.mark.parametrize("on_doubt", ["stop", "drop"])
async def test_streams_and_whole_answers_deliver_the_same(
    on_doubt: Any, fixed: LanguageModel, scores: list[float]
) -> None:
    for threshold in sorted({0.0, *(score * 1.0001 for score in scores)}):
        llm, ears = judged(fixed, threshold, on_doubt), Ears()
        text = due(scores, threshold, on_doubt) or "I don't know."
        with ears.listening():
            whole = llm.complete(QUERY)
            pieces = list(llm.stream_complete(QUERY))
            apieces = await drained(await llm.astream_complete(QUERY))
        for found in (pieces, apieces):
            assert "".join(piece.delta or "" for piece in found) == found[-1].text == whole.text == text
            own = verdict_of(found[-1])
            delivered = [one.uncertainty for one in own.sentences if one.action == "deliver"]
            expected = [one.uncertainty for one in verdict_of(whole).sentences if one.action == "deliver"]
            assert delivered == pytest.approx(expected, rel=1e-5)
        kept = [piece for piece in PIECES if piece in text]
        assert [piece.delta for piece in pieces if piece.delta][: len(kept)] == kept
        assert not [piece for piece in PIECES if piece not in kept and piece.split()[0] in "\n".join(ears.heard)]
        assert "usage" not in whole.raw or text == TEXT  # it would tell about what was left out


def test_a_guarded_engine_delivers_a_part_of_its_last_answer(fixed: LanguageModel) -> None:
    whole = verdict_of(guarded(reading(llm := judged(fixed, 1e9)), llm.router).query(QUERY))
    own = sorted(sentence.uncertainty or 0.0 for sentence in whole.sentences)
    llm = judged(fixed, own[0] * 1.0001)
    response = guarded(reading(llm), llm.router).query(QUERY)
    verdict = verdict_of(response)
    assert sorted(one.action for one in verdict.sentences) == ["deliver", "drop", "drop"]
    assert str(response) in PIECES


def test_a_call_behind_a_part_ends_the_question(fixed: LanguageModel, scores: list[float]) -> None:
    """It would continue from less than the model wrote."""
    llm = judged(fixed, min(scores) * 1.0001)
    with asking(llm.router) as question:
        assert llm.complete(QUERY).text in PIECES
        llm.complete(QUERY)
    assert question.refused is not None
    assert "a part of an answer" in (question.refused.reason or "")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_memory_holds_the_delivered_sentences(asynchronous: bool, fixed: LanguageModel) -> None:
    whole = verdict_of(judged(fixed, 1e9).complete("And Rome?"))
    own = sorted(sentence.uncertainty or 0.0 for sentence in whole.sentences)
    llm, memory = judged(fixed, own[1] * 1.0001), ChatMemoryBuffer.from_defaults(token_limit=3000)
    engine = guarded(SimpleChatEngine.from_defaults(llm=llm, memory=memory), llm.router)
    reply = asyncio.run(engine.achat("And Rome?")) if asynchronous else engine.chat("And Rome?")
    assert [message.content for message in memory.get_all()] == ["And Rome?", str(reply)]
    assert str(reply) not in ("", TEXT, "I don't know.")


def test_a_response_with_a_doubtful_sentence_does_not_pass(fixed: LanguageModel) -> None:
    llm = SemGradLLM.from_model(fixed, by="sentence", on_doubt="drop")
    own = sorted(sentence.uncertainty or 0.0 for sentence in llm.score("q", TEXT).sentences)
    for threshold, passes in ((own[1], False), (own[2], True)):
        result = UncertaintyEvaluator(llm, Policy(threshold=threshold)).evaluate(query="q", response=TEXT)
        assert result.passing is passes
