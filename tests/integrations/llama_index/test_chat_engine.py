"""`GuardedChatEngine`: four engines, four ways, and a memory that holds what the user saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer, Memory
from sqlalchemy.ext.asyncio import create_async_engine

from llama_index_semgrad_guard import (
    GuardedChatEngine,
    GuardedQueryEngine,
    LowConfidenceError,
    SemGradLLM,
    get_verdict,
)
from semgrad_guard import Policy
from semgrad_guard.errors import InputError
from tests.pairwise import pairwise

from .conftest import PASSAGES, Passages
from .scripted import BOTH, WAY

PASS, STOP = Policy(threshold=1e308), Policy(threshold=-1e308)
FIRST, SECOND = "Where is Paris?", "And Oslo?"
KINDS = ("simple", "context", "condense question", "condense plus context")
WAYS = ("sync", "async", "stream", "async stream")
Maker = Callable[..., BaseChatEngine]


@pytest.fixture
def make_chat(llm: SemGradLLM, make_engine: Callable[..., Any]) -> Maker:
    def make(kind: str, *, passages: tuple[str, ...] = PASSAGES, **options: Any) -> BaseChatEngine:
        options.setdefault("memory", ChatMemoryBuffer.from_defaults(token_limit=3000))
        if kind == "simple":
            return SimpleChatEngine.from_defaults(llm=llm, **options)
        if kind == "condense question":
            engine = make_engine(passages=passages, streaming=True)
            return CondenseQuestionChatEngine.from_defaults(engine, llm=llm, **options)
        made = ContextChatEngine if kind == "context" else CondensePlusContextChatEngine
        return made.from_defaults(Passages(*passages), llm=llm, **options)

    return make


async def say(engine: BaseChatEngine, way: str, message: str, **options: Any) -> tuple[str, Any]:
    """What the user sees, and the response after all of it has been seen."""
    if way == "sync":
        response: Any = engine.chat(message, **options)
        return response.response.strip(), response
    if way == "async":
        response = await engine.achat(message, **options)
        return response.response.strip(), response
    if way == "stream":
        response = engine.stream_chat(message, **options)
        return "".join(response.response_gen).strip(), response
    response = await engine.astream_chat(message, **options)
    return "".join([piece async for piece in response.async_response_gen()]).strip(), response


def texts(engine: BaseChatEngine) -> list[str]:
    return [(message.content or "").strip() for message in engine.chat_history]


WHOLE = {"sync": "sync", "async": "async", "stream": "sync", "async stream": "async"}


@pairwise(kind=KINDS, asynchronous=BOTH, streaming=BOTH)
async def test_two_turns_are_remembered_as_the_user_saw_them(
    kind: str, asynchronous: bool, streaming: bool, make_chat: Maker
) -> None:
    way = WAY[asynchronous, streaming]
    plain = make_chat(kind)
    # LlamaIndex strips what it streams before it remembers it; a guarded stream is a turn of `chat`.
    bare = [(await say(plain, WHOLE[way], message))[0] for message in (FIRST, SECOND)]
    passed, stopped = GuardedChatEngine(make_chat(kind), PASS), GuardedChatEngine(make_chat(kind), STOP)
    records: list[dict[str, Any]] = []
    for message, expected in zip((FIRST, SECOND), bare, strict=True):
        text, response = await say(passed, way, message)
        assert text == expected
        records.append(response.metadata["semgrad_guard"])
        text, response = await say(stopped, way, message)
        assert text == "I don't know."
        assert response.metadata["semgrad_guard"]["draft"] is None
        assert response.metadata["semgrad_guard"]["action"] == "abstain"
        assert response.sources == []
    assert [record["action"] for record in records] == ["answer", "answer"]
    assert all(record["uncertainty"] is not None and record["enforced"] for record in records)
    assert texts(passed) == texts(plain)
    assert texts(stopped) == [FIRST, "I don't know.", SECOND, "I don't know."]
    stopped.reset()
    assert stopped.chat_history == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["simple", "condense plus context"])
async def test_escalation_gets_the_conversation(kind: str, way: str, make_chat: Maker, llm: SemGradLLM) -> None:
    seen: list[list[str]] = []

    def elsewhere(messages: Any) -> str:
        seen.append([message.content for message in messages])
        return f"elsewhere {len(seen)}"

    guarded = GuardedChatEngine(make_chat(kind), STOP, escalate_to=elsewhere)
    for message in (FIRST, SECOND):
        text, response = await say(guarded, way, message)
        verdict = get_verdict(response)
        assert verdict is not None
        assert (verdict.action, verdict.text, verdict.escalated_from is not None) == ("escalate", text, True)
    assert seen == [[FIRST], [FIRST, "elsewhere 1", SECOND]]
    assert texts(guarded) == [FIRST, "elsewhere 1", SECOND, "elsewhere 2"]


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_escalation_to_an_llm_an_engine_and_a_guarded_engine(way: str, make_chat: Maker, llm: SemGradLLM) -> None:
    history = [ChatMessage(role="user", content="Hello"), ChatMessage(role="assistant", content="Good day.")]
    expected = llm.chat([*history, ChatMessage(role="user", content=FIRST)]).message.content
    targets = {"llm": llm, "engine": make_chat("simple"), "guarded": GuardedChatEngine(make_chat("simple"), PASS)}
    for kind, target in targets.items():
        guarded = GuardedChatEngine(make_chat("simple"), STOP, escalate_to=target)
        text, response = await say(guarded, way, FIRST, chat_history=history)
        assert text == expected
        status = response.metadata["semgrad_guard"]["escalated"]["status"]
        assert status == ("unscored" if kind == "engine" else "scored")
        assert texts(guarded) == ["Hello", "Good day.", FIRST, expected]


@pairwise(kind=KINDS, asynchronous=BOTH, streaming=BOTH)
async def test_annotated_turns_are_live_and_remembered_whole(
    kind: str, asynchronous: bool, streaming: bool, make_chat: Maker
) -> None:
    way = WAY[asynchronous, streaming]
    plain, guarded = make_chat(kind), GuardedChatEngine(make_chat(kind), STOP, mode="annotate")
    for message in (FIRST, SECOND):
        expected, _ = await say(plain, way, message)
        text, response = await say(guarded, way, message)
        assert text == expected
        record = response.metadata["semgrad_guard"]
        assert (record["action"], record["enforced"], record["status"]) == ("abstain", False, "scored")
    assert texts(guarded) == texts(plain)


def test_a_live_stream_comes_in_pieces_and_a_guarded_one_in_one(make_chat: Maker, wide: Any) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    slow = SimpleChatEngine.from_defaults(llm=SemGradLLM.from_model(wide, max_tokens=12), memory=memory)
    live = GuardedChatEngine(slow, STOP, mode="annotate").stream_chat(FIRST)
    pieces = live.response_gen
    next(pieces)
    assert live.metadata == {}
    assert len(list(pieces)) > 2
    assert live.metadata["semgrad_guard"]["scored_tokens"] == 12
    assert len(list(GuardedChatEngine(make_chat("simple"), PASS).stream_chat(FIRST).response_gen)) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_raising_keeps_the_draft_out_of_the_memory(way: str, make_chat: Maker) -> None:
    draft = make_chat("simple").chat(FIRST)
    guarded = GuardedChatEngine(make_chat("simple"), STOP, mode="raise", abstain_message="No.")
    with pytest.raises(LowConfidenceError) as raised:
        await say(guarded, way, FIRST)
    assert str(draft) not in repr(vars(raised.value))
    assert texts(guarded) == [FIRST, "No."]


async def test_observing_leaves_no_trace_in_the_response(make_chat: Maker) -> None:
    guarded = GuardedChatEngine(make_chat("simple"), STOP, mode="observe")
    for way in WAYS:
        _, response = await say(guarded, way, FIRST)
        assert response.metadata == {}


@pairwise(kind=["context", "condense question", "condense plus context"], asynchronous=BOTH, streaming=BOTH)
async def test_the_condensed_question_is_not_taken_for_the_answer(
    kind: str, asynchronous: bool, streaming: bool, make_chat: Maker
) -> None:
    """Nothing retrieved: the only call of the second turn condenses the question, and its score is not the answer's."""
    way = WAY[asynchronous, streaming]
    guarded = GuardedChatEngine(make_chat(kind, passages=()), PASS)
    for message in (FIRST, SECOND):
        text, response = await say(guarded, way, message)
        assert text == "I don't know."
        assert response.metadata["semgrad_guard"]["status"] == "unscored"


async def test_eight_conversations_at_once_keep_their_answers_and_scores(make_chat: Maker) -> None:
    engines = [GuardedChatEngine(make_chat("simple"), PASS) for _ in range(8)]
    alone = [GuardedChatEngine(make_chat("simple"), PASS).chat(f"{FIRST} {i}") for i in range(8)]
    together = await asyncio.gather(*(engine.achat(f"{FIRST} {i}") for i, engine in enumerate(engines)))
    scores = [[r.metadata["semgrad_guard"]["uncertainty"] for r in group] for group in (alone, together)]
    assert scores[1] == pytest.approx(scores[0])
    assert len(set(scores[0])) == 8


def test_llama_index_default_memory_holds_no_draft(llm: SemGradLLM) -> None:
    database = create_async_engine("sqlite+aiosqlite://")
    memory = Memory.from_defaults(token_limit=2000, async_engine=database)
    guarded = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm, memory=memory), STOP)
    guarded.chat(FIRST)
    assert [message.content for message in memory.get_all()] == [FIRST, "I don't know."]
    asyncio.run(database.dispose())


def test_what_cannot_be_guarded_is_named(make_chat: Maker, make_engine: Callable[..., Any], llm: SemGradLLM) -> None:
    simple = make_chat("simple")
    with pytest.raises(InputError, match="guarded already"):
        GuardedChatEngine(GuardedChatEngine(simple, PASS), PASS)
    inner = CondenseQuestionChatEngine.from_defaults(GuardedQueryEngine(make_engine(), PASS), llm=llm)
    with pytest.raises(InputError, match="guarded already"):
        GuardedChatEngine(inner, PASS)
    assert inner.chat(FIRST).sources[0].raw_output.metadata["semgrad_guard"]["action"] == "answer"
    with pytest.raises(InputError, match="mode must be"):
        GuardedChatEngine(simple, PASS, mode="loud")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs a policy"):
        GuardedChatEngine(simple, 0.5)  # type: ignore[arg-type]
    del simple._memory  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="keeps no conversation"):
        GuardedChatEngine(simple, PASS)
    other = SimpleChatEngine.from_defaults(llm=MockLLM(), memory=ChatMemoryBuffer.from_defaults(token_limit=3000))
    assert GuardedChatEngine(other, PASS).chat(FIRST).metadata["semgrad_guard"]["status"] == "unscored"  # type: ignore[index]
