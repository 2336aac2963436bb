"""Models that think, in LlamaIndex: a response's text is the answer, scored given the thought."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ThinkingBlock

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback
from semgrad_guard import Policy
from tests.thinking import ANSWERS, THOUGHTS, thinking_model, written

from .scripted import verdict_of

QUESTION = next(iter(ANSWERS))
ANSWER, THOUGHT = ANSWERS[QUESTION], THOUGHTS[QUESTION]


@pytest.fixture(scope="module")
def llm() -> SemGradLLM:
    return SemGradLLM.from_model(thinking_model())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chat_tells_the_reasoning_apart(llm: SemGradLLM, stream: bool) -> None:
    messages = [ChatMessage(QUESTION)]
    pieces: list[ChatResponse] = list(llm.stream_chat(messages)) if stream else [llm.chat(messages)]
    response = pieces[-1]
    if stream:
        assert "".join(piece.delta or "" for piece in pieces) == ANSWER
    assert response.message.content == ANSWER
    thoughts = [block.content for block in response.message.blocks if isinstance(block, ThinkingBlock)]
    assert thoughts == [THOUGHT]
    verdict = verdict_of(response)
    assert (verdict.status, verdict.promised) == ("scored", False)


async def test_a_streams_reasoning_is_live(llm: SemGradLLM) -> None:
    pieces = [piece async for piece in await llm.astream_chat([ChatMessage(QUESTION)])]
    deltas = [piece.additional_kwargs.get("thinking_delta") for piece in pieces]
    newest = list(filter(None, deltas))
    assert "".join(newest) == THOUGHT
    assert len(newest) > 1
    first = pieces[0].message.blocks[0]
    assert isinstance(first, ThinkingBlock)
    assert (first.content, pieces[0].delta, pieces[0].message.content) == (newest[0], "", "")
    assert [piece.text for piece in llm.stream_complete(QUESTION)][-1] == ANSWER


def test_a_completion_and_a_text_from_elsewhere(llm: SemGradLLM) -> None:
    response: Any = llm.complete(QUESTION)
    assert (response.text, response.raw["reasoning_content"]) == (ANSWER, THOUGHT)
    for text in (written(QUESTION), f"[THINK]{THOUGHT}[/THINK]{ANSWER}", f"{THOUGHT}\n</think>\n\n{ANSWER}"):
        verdict = llm.score(QUESTION, text)
        assert (verdict.status, verdict.text, verdict.details.reasoning) == ("scored", ANSWER, THOUGHT)
    cut: Any = llm.complete(QUESTION, stop=["\n\n", "It is"])
    assert (cut.text, cut.raw["finish_reason"]) == (ANSWER, "stop"), "a stop string looks at the answer alone"


@pytest.mark.parametrize("mode", ["enforce", "annotate"])
def test_the_reasoning_is_withheld_with_the_answer(llm: SemGradLLM, mode: Any) -> None:
    router = UncertaintyRouterCallback(Policy(threshold=-1.0), mode=mode)
    judged = llm.model_copy(update={"router": router})
    response = judged.complete(QUESTION)
    assert verdict_of(response).status == "scored"
    assert response.text == (ANSWER if mode == "annotate" else "I don't know.")
    assert (THOUGHT in repr(response)) is (mode == "annotate")
