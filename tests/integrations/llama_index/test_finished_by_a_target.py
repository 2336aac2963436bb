"""A target that finishes an answer: its text is the same in responses, streams, memories and records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine, SemGradLLM, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel

from .conftest import Heard, Passages

QUESTION, REPLY = "Where is Paris?", "Ask a cook."
FINISHED = f"{PIECES[0]}\n\n{REPLY}"
WITHHELD = [piece.strip() for piece in PIECES[1:]]


@pytest.fixture(scope="module")
def llm(make_language_model: Callable[..., LanguageModel]) -> SemGradLLM:
    model = make_language_model(max_position_embeddings=4096)
    return SemGradLLM.from_model(FixedModel.like(model), by="sentence", on_doubt="escalate")


def query_engine(llm: SemGradLLM, *, streaming: bool = False) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(Passages("Paris is in France."), llm=llm, streaming=streaming)


def between(response: Any) -> Policy:
    """A threshold that lets the first sentence through, and not the second one."""
    first, second, _ = (one["uncertainty"] for one in response.metadata["semgrad_guard"]["sentences"])
    assert first < second
    return Policy(threshold=(first + second) / 2)


@pytest.fixture(scope="module")
def of_queries(llm: SemGradLLM) -> Policy:
    return between(GuardedQueryEngine(query_engine(llm), Policy(threshold=1e9), mode="annotate").query(QUESTION))


@pytest.fixture(scope="module")
def of_chats(llm: SemGradLLM) -> Policy:
    engine = SimpleChatEngine.from_defaults(llm=llm)
    return between(GuardedChatEngine(engine, Policy(threshold=1e9), mode="annotate").chat(QUESTION))


def require_both(record: dict[str, Any], *, stopped: bool) -> None:
    actions = [sentence["action"] for sentence in record["sentences"]]
    assert actions == ["deliver", "escalate", "escalate"][: 2 if stopped else 3]
    assert (record["action"], record["promised"], record["escalated"]["status"]) == ("escalate", False, "unscored")


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_query(llm: SemGradLLM, of_queries: Policy, recorder: Heard, streaming: bool) -> None:
    received: list[Any] = []

    async def atarget(query: str) -> str:
        received.append(query)
        return REPLY

    def target(query: str) -> str:
        received.append(query)
        return REPLY

    inner = query_engine(llm, streaming=streaming)
    response: Any = GuardedQueryEngine(inner, of_queries, escalate_to=target).query(QUESTION)
    other: Any = await GuardedQueryEngine(inner, of_queries, escalate_to=atarget).aquery(QUESTION)
    if streaming:
        assert list(response.response_gen) == [PIECES[0], f"\n\n{REPLY}"]
        assert [piece async for piece in other.response_gen] == [PIECES[0], f"\n\n{REPLY}"]
    else:
        assert (response.response, other.response) == (FINISHED, FINISHED)
        verdict = get_verdict(response)
        assert verdict is not None
        assert (verdict.text, verdict.is_continued) == (FINISHED, True)
    for one in (response, other):
        require_both(one.metadata["semgrad_guard"], stopped=streaming)
        assert [node.node.get_content() for node in one.source_nodes] == ["Paris is in France."]
    assert received == [QUESTION] * 2
    seen = repr([vars(response), vars(other), [event.record for event in recorder.verdicts]])
    assert not [piece for piece in WITHHELD if piece in seen]


def test_an_engine_finishes_with_its_own_passages(llm: SemGradLLM, of_queries: Policy, wide: LanguageModel) -> None:
    own = SemGradLLM.from_model(FixedModel.like(wide), by="sentence")
    second = RetrieverQueryEngine.from_args(Passages("Milk is white."), llm=own)
    strict = GuardedQueryEngine(second, Policy(threshold=0.0))
    for target, due in ((second, f"{PIECES[0]}\n\n{TEXT}"), (strict, f"{PIECES[0]}{CLOSING_LINE}")):
        response: Any = GuardedQueryEngine(query_engine(llm), of_queries, escalate_to=target).query(QUESTION)
        assert response.response == due
        passages = [node.node.get_content() for node in response.source_nodes]
        assert passages == ["Paris is in France.", "Milk is white."][: 1 + (target is second)]
    same = Passages("Paris is in France.")
    nodes = same.retrieve(QUESTION)
    same._retrieve = lambda _: nodes  # type: ignore[method-assign]
    inner, target = (RetrieverQueryEngine.from_args(same, llm=one) for one in (llm, own))
    both: Any = GuardedQueryEngine(inner, of_queries, escalate_to=target).query(QUESTION)
    assert (both.response, len(both.source_nodes)) == (f"{PIECES[0]}\n\n{TEXT}", 1)


@pytest.mark.parametrize("way", ["chat", "achat", "stream_chat", "astream_chat"])
async def test_a_chat(llm: SemGradLLM, of_chats: Policy, way: str) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    engine = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
    received: list[Any] = []

    def target(messages: Any) -> AgentChatResponse:
        received.append([message.content for message in messages])
        return AgentChatResponse(REPLY)

    guard = GuardedChatEngine(engine, of_chats, escalate_to=target)
    if way == "chat":
        reply: Any = guard.chat(QUESTION)
        assert reply.response == FINISHED
    elif way == "achat":
        guard.escalate_to = lambda messages: _later(target, messages)
        reply = await guard.achat(QUESTION)
        assert reply.response == FINISHED
    elif way == "stream_chat":
        reply = guard.stream_chat(QUESTION)
        assert list(reply.response_gen) == [PIECES[0], f"\n\n{REPLY}"]
    else:
        reply = await guard.astream_chat(QUESTION)
        assert [piece async for piece in reply.async_response_gen()] == [PIECES[0], f"\n\n{REPLY}"]
    require_both(reply.metadata["semgrad_guard"], stopped="stream" in way)
    assert received == [[QUESTION]]
    assert [message.content for message in memory.get_all()] == [QUESTION, FINISHED]
    assert not [piece for piece in WITHHELD if piece in repr([vars(reply), memory.get_all()])]


async def _later(target: Any, messages: Any) -> Any:
    return target(messages)
