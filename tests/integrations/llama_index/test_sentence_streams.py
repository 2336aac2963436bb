"""Guarded streams by sentence: engines deliver every sentence that is let through as it ends, and no other."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine, SemGradLLM
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import DeadlineExceededError
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel
from tests.pairwise import pairwise

from .conftest import Passages
from .test_stopping import held, require_stopped

QUERY = "Where is Paris?"


@pytest.fixture(scope="module")
def fixed(wide: LanguageModel) -> LanguageModel:
    return FixedModel.like(wide)


def engine(fixed: LanguageModel, *passages: str, on_doubt: Any = None, **options: Any) -> RetrieverQueryEngine:
    llm = SemGradLLM.from_model(fixed, by="sentence", on_doubt=on_doubt)
    found = Passages(*(passages or ("Paris is in France.",)))
    return RetrieverQueryEngine.from_args(found, llm=llm, streaming=True, **options)


@pytest.fixture(scope="module")
def scores(fixed: LanguageModel) -> list[float]:
    response: Any = GuardedQueryEngine(engine(fixed), Policy(threshold=1e9)).query(QUERY)
    assert list(response.response_gen) == [*PIECES[:2], PIECES[2]]
    return [sentence["uncertainty"] for sentence in response.metadata["semgrad_guard"]["sentences"]]


@pytest.mark.parametrize("on_doubt", ["stop", "drop", "mark"])
async def test_a_query_streams_the_sentences_of_its_record(
    fixed: LanguageModel, scores: list[float], on_doubt: Any
) -> None:
    plain = GuardedQueryEngine(engine(fixed, on_doubt=on_doubt), Policy(threshold=1e9))
    for threshold in sorted({0.0, *scores, 1e9}):
        guard = GuardedQueryEngine(plain._engine, Policy(threshold=threshold))
        response: Any = guard.query(QUERY)
        before = dict(response.metadata)
        pieces = list(response.response_gen)
        record = response.metadata["semgrad_guard"]
        actions = [sentence["action"] for sentence in record["sentences"]]
        kept = [piece for piece, action in zip(PIECES, actions, strict=False) if action in ("deliver", "mark")]
        due = "".join(kept)
        if not kept:
            assert pieces == ["I don't know."]
        elif on_doubt == "stop" and actions[-1] == "stop":
            assert "".join(pieces) == due + CLOSING_LINE
        else:
            assert "".join(pieces) == due
        assert "semgrad_guard" not in before
        assert len(response.source_nodes) == 1
        asynchronous: Any = await guard.aquery(QUERY)
        assert [piece async for piece in asynchronous.response_gen] == pieces
        assert asynchronous.metadata["semgrad_guard"]["sentences"] == record["sentences"] or kept


KINDS = ("simple", "context", "condense plus context")


def chat(fixed: LanguageModel, kind: str, on_doubt: Any) -> tuple[Any, ChatMemoryBuffer]:
    llm = SemGradLLM.from_model(fixed, by="sentence", on_doubt=on_doubt)
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    if kind == "simple":
        return SimpleChatEngine.from_defaults(llm=llm, memory=memory), memory
    made = ContextChatEngine if kind == "context" else CondensePlusContextChatEngine
    return made.from_defaults(Passages("Paris is in France."), llm=llm, memory=memory), memory


async def replied(guard: GuardedChatEngine, asynchronous: bool, message: str) -> tuple[list[str], Any]:
    if asynchronous:
        stream = await guard.astream_chat(message)
        return [piece async for piece in stream.async_response_gen()], stream
    stream = guard.stream_chat(message)
    return list(stream.response_gen), stream


@pairwise(kind=KINDS, asynchronous=[False, True], on_doubt=["stop", "drop"])
async def test_a_chat_streams_and_remembers_the_sentences(
    fixed: LanguageModel, kind: str, asynchronous: bool, on_doubt: Any
) -> None:
    inner, memory = chat(fixed, kind, on_doubt)
    for message in ("Where is Paris?", "And Oslo?"):
        pieces, stream = await replied(GuardedChatEngine(inner, Policy(threshold=1e9)), asynchronous, message)
        assert pieces == list(PIECES)
        assert len(stream.source_nodes) == (kind != "simple")
    own = [sentence["uncertainty"] for sentence in stream.metadata["semgrad_guard"]["sentences"]]
    for threshold in (min(own), sorted(own)[1], 0.0):
        memory.reset()
        pieces, stream = await replied(GuardedChatEngine(inner, Policy(threshold=threshold)), asynchronous, "And Rome?")
        sentences = stream.metadata["semgrad_guard"]["sentences"]
        kept = [piece for piece, one in zip(PIECES, sentences, strict=False) if one["action"] == "deliver"]
        assert pieces[: len(kept)] == (kept or ["I don't know."][:0])
        text = "".join(pieces)
        assert [message.content for message in memory.get_all()] == ["And Rome?", text]
        withheld = [piece.split()[0] for piece in PIECES if piece not in kept]
        assert not [word for word in withheld if word in repr([vars(stream), memory.get_all()])]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_reader_who_leaves_a_chat_is_remembered_with_the_sentences_that_left(
    fixed: LanguageModel, asynchronous: bool
) -> None:
    inner, memory = chat(fixed, "simple", "drop")
    guard = GuardedChatEngine(inner, Policy(threshold=1e9))
    if asynchronous:
        pieces: Any = (await guard.astream_chat("And Rome?")).achat_stream
        assert await anext(pieces)
        await pieces.aclose()
    else:
        pieces = guard.stream_chat("And Rome?").chat_stream
        assert next(pieces)
        pieces.close()
    assert [message.content for message in memory.get_all()] == ["And Rome?", PIECES[0]]


@pytest.mark.parametrize("around", ["query", "chat"])
async def test_a_cancelled_reader_stops_the_model(make_language_model: Any, around: str) -> None:
    model = make_language_model(max_position_embeddings=4096)
    llm = SemGradLLM.from_model(model, max_tokens=3000, temperature=1.0, seed=1, by="sentence")
    reached, steps = held(model)

    async def read() -> None:
        if around == "chat":
            engine = SimpleChatEngine.from_defaults(llm=llm)
            stream: Any = await GuardedChatEngine(engine, Policy(threshold=1e9)).astream_chat(QUERY)
            pieces = stream.async_response_gen()
        else:
            inner = RetrieverQueryEngine.from_args(Passages("Paris."), llm=llm, streaming=True)
            stream = await GuardedQueryEngine(inner, Policy(threshold=1e9)).aquery(QUERY)
            pieces = stream.response_gen
        async for _ in pieces:
            pass

    task = asyncio.ensure_future(read())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await require_stopped(steps, llm)


@pytest.mark.parametrize("mode", [ResponseMode.REFINE, ResponseMode.TREE_SUMMARIZE])
def test_an_earlier_text_of_the_model_does_not_leave(fixed: LanguageModel, mode: ResponseMode) -> None:
    llm = SemGradLLM.from_model(fixed, by="sentence", context_window=1100)
    found = Passages("Paris is in France. " * 90, "Oslo is in Norway. " * 90)
    inner = RetrieverQueryEngine.from_args(found, llm=llm, streaming=True, response_mode=mode)
    response: Any = GuardedQueryEngine(inner, Policy(threshold=1e9)).query(QUERY)
    pieces, record = list(response.response_gen), response.metadata["semgrad_guard"]
    assert "".join(pieces) == TEXT
    assert len(pieces) == (len(record["sentences"]) or 1)


@pytest.mark.parametrize("changed", ["upper", "more", "less"])
def test_a_stream_that_code_of_the_users_changes_leaves_by_no_sentence(fixed: LanguageModel, changed: str) -> None:
    inner = engine(fixed)

    class Own(CustomQueryEngine):
        """Passes a stream on, changed."""

        parts: Any = inner  # which shows its model

        def custom_query(self, query_str: str) -> Any:
            response: Any = inner.query(query_str)

            def pieces() -> Any:
                if changed == "more":
                    yield "Well. "
                for number, piece in enumerate(response.response_gen):
                    if changed != "less" or number:
                        yield piece.upper() if changed == "upper" else piece

            return StreamingResponse(pieces(), response.source_nodes)

    guard = GuardedQueryEngine(Own(), Policy(threshold=1e9))
    assert guard._by_sentence
    response: Any = guard.query(QUERY)
    assert "".join(response.response_gen) == "I don't know."
    assert response.metadata["semgrad_guard"]["status"] == "unscored"


def test_a_target_answers_where_no_sentence_is_left(fixed: LanguageModel) -> None:
    guard = GuardedQueryEngine(engine(fixed), Policy(threshold=0.0), escalate_to=lambda _: "In France.")
    response: Any = guard.query(QUERY)
    assert list(response.response_gen) == ["In France."]
    assert response.metadata["semgrad_guard"]["action"] == "escalate"
    inner, memory = chat(fixed, "simple", "stop")
    stream = GuardedChatEngine(inner, Policy(threshold=0.0), escalate_to=lambda _: "In France.").stream_chat(QUERY)
    assert list(stream.response_gen) == ["In France."]
    assert [message.content for message in memory.get_all()] == [QUERY, "In France."]


# The engine's own thread, which reads the model, raises its error once more where the model is the first to be late.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_late_stream_ends_with_an_abstention(fixed: LanguageModel) -> None:
    before = threading.enumerate()
    inner, _ = chat(fixed, "simple", "stop")
    guard = GuardedChatEngine(inner, Policy(threshold=1e9), timeout=1e-6, on_error="abstain")
    assert list(guard.stream_chat(QUERY).response_gen) == ["I don't know."]
    with pytest.raises(DeadlineExceededError):
        list(GuardedChatEngine(inner, Policy(threshold=1e9), timeout=1e-6).stream_chat(QUERY).response_gen)
    for thread in threading.enumerate():
        if thread not in before and not thread.daemon:
            thread.join()
