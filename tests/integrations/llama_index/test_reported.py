"""Engines over an LLM whose server reports log-probabilities, without a copy of its model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, MessageRole
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine, SemGradLLM, calibrate_engine, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.settings import CLOSING_LINE

ALL, NONE = Policy(threshold=1e9), Policy(threshold=-1.0)


class Reporting(CustomLLM):
    """An LLM as `OpenAILike` is: `raw` of a response is what the server sent."""

    model: str = "remote"
    logprobs: bool | None = True
    temperature: float = 0.0
    words: tuple[str, ...] = ("Par", "is")
    values: tuple[Any, ...] = (-0.1, -0.3)
    reason: str | None = "stop"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True, model_name=self.model)

    def _raw(self, begin: int, end: int) -> dict[str, Any]:
        pairs = list(zip(self.words, self.values, strict=True))[begin:end]
        entries = [{"token": word, "logprob": value, "top_logprobs": []} for word, value in pairs]
        reason = self.reason if end == len(self.words) else None
        return {"choices": [{"logprobs": {"content": entries} if self.logprobs else None, "finish_reason": reason}]}

    @llm_chat_callback()
    def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        message = ChatMessage(role=MessageRole.ASSISTANT, content="".join(self.words))
        return ChatResponse(message=message, raw=self._raw(0, len(self.words)))

    @llm_chat_callback()
    def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
        return self.responses()

    def responses(self) -> Iterator[ChatResponse]:
        for number, word in enumerate(self.words):
            message = ChatMessage(role=MessageRole.ASSISTANT, content="".join(self.words[: number + 1]))
            yield ChatResponse(message=message, delta=word, raw=self._raw(number, number + 1))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text="".join(self.words), raw=self._raw(0, len(self.words)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


def engine(llm: Any, **given: Any) -> Any:
    return SummaryIndex.from_documents([Document(text="Paris is in France.")]).as_query_engine(llm=llm, **given)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("policy", "mode", "text"),
    [(ALL, "enforce", "Paris"), (NONE, "enforce", "I don't know."), (NONE, "annotate", "Paris")],
)
async def test_a_query_engine_is_scored_and_enforced(policy: Policy, mode: Any, text: str, streaming: bool) -> None:
    guard = GuardedQueryEngine(engine(Reporting(), streaming=streaming), policy, mode=mode)
    answers = [guard.query("Where?"), await guard.aquery("Where?")] if not streaming else [guard.query("Where?")]
    for answer in answers:
        assert str(answer) == text
        verdict = get_verdict(answer)
        assert verdict is not None
        assert (verdict.status, verdict.model, verdict.estimator) == ("scored", "remote", "max_probability")
        assert (verdict.gnll, verdict.options) == (pytest.approx(0.4), {"temperature": 0.0})


def test_a_chat_engine_is_scored_and_enforced() -> None:
    for policy, text in ((ALL, "Paris"), (NONE, "I don't know.")):
        guard = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=Reporting()), policy)
        assert str(guard.chat("Where?")) == text
        assert "".join(guard.stream_chat("Where?").response_gen) == text


@pytest.mark.parametrize(
    "given",
    [{"values": (-0.1, float("nan"))}, {"values": (-0.1, None)}, {"logprobs": None}, {"values": (0.0, 0.0)}],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_numbers_that_are_missing_are_no_score(given: dict[str, Any], streaming: bool) -> None:
    answer = GuardedQueryEngine(engine(Reporting(**given), streaming=streaming), ALL).query("Where?")
    assert str(answer) == "I don't know."
    verdict = get_verdict(answer)
    assert verdict is not None
    assert (verdict.status, verdict.uncertainty) == ("unscored", None)


SENTENCES = ("Paris is old. ", "Rome is new. ", "Oslo is cold.")
WORDS = ("Paris", " is", " old", ".", " Rome", " is", " new", ".", " Oslo", " is", " cold", ".")
DOUBT = (*(-0.1,) * 4, *(-2.0,) * 4, *(-0.1,) * 4)
HALF = Policy(threshold=0.5)


@pytest.mark.parametrize(
    ("on_doubt", "values", "pieces"),
    [
        ("stop", DOUBT, [SENTENCES[0], CLOSING_LINE]),
        ("drop", DOUBT, [SENTENCES[0], SENTENCES[2]]),
        ("mark", DOUBT, list(SENTENCES)),
        ("stop", (*DOUBT[:4], -0.1, None, *DOUBT[6:]), [SENTENCES[0], CLOSING_LINE]),
        ("drop", (*DOUBT[:4], -0.1, float("nan"), -0.1, -0.1, *DOUBT[8:]), [SENTENCES[0], SENTENCES[2]]),
    ],
)
def test_sentences_leave_while_they_are_written(on_doubt: Any, values: tuple[Any, ...], pieces: list[str]) -> None:
    llm, unit = Reporting(words=WORDS, values=values), {"by": "sentence", "on_doubt": on_doubt}
    whole: Any = GuardedQueryEngine(engine(llm), HALF, **unit).query("Where?")
    assert str(whole) == "".join(pieces)
    stream: Any = GuardedQueryEngine(engine(llm, streaming=True), HALF, **unit).query("Where?")
    assert list(stream.response_gen) == pieces
    chat: Any = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), HALF, **unit)
    assert list(chat.stream_chat("Where?").response_gen) == pieces
    assert on_doubt == "mark" or "Rome" not in str(whole.metadata) + str(stream.metadata) + str(chat.chat_history)


def test_a_token_across_a_border_counts_for_the_later_sentence() -> None:
    """It begins in a doubtful sentence, which it would make surer."""
    llm = Reporting(words=("Paris is old.", " Rome is new", ". Oslo", " is cold."), values=(-0.1, -0.8, -1e-4, -0.1))
    unit: dict[str, Any] = {"by": "sentence", "on_doubt": "stop"}
    whole: Any = GuardedQueryEngine(engine(llm), HALF, **unit).query("Where?")
    stream: Any = GuardedQueryEngine(engine(llm, streaming=True), HALF, **unit).query("Where?")
    assert "".join(stream.response_gen) == str(whole) == f"{SENTENCES[0]}{CLOSING_LINE}"
    assert "Rome" not in str(stream.metadata)


class Watched(Reporting):
    """Notes the pieces that are taken from it, and that its stream is closed."""

    taken: list[str] = []  # noqa: RUF012 - a pydantic field
    closed: list[bool] = []  # noqa: RUF012

    @llm_chat_callback()
    def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
        def pieces() -> Iterator[ChatResponse]:
            try:
                for response in self.responses():
                    time.sleep(0.005)  # a provider takes its time; the engine's writing thread would take all at once
                    self.taken.append(response.delta or "")
                    yield response
            finally:
                self.closed.append(True)

        return pieces()

    @llm_chat_callback()
    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        async def pieces() -> AsyncIterator[ChatResponse]:
            try:
                for response in self.responses():
                    await asyncio.sleep(0)
                    self.taken.append(response.delta or "")
                    yield response
            finally:
                self.closed.append(True)

        return pieces()


async def read(llm: Any, around: str, asynchronous: bool, **unit: Any) -> tuple[list[str], Any]:
    """The pieces of a guarded stream, and the response that holds its record."""
    if around == "query":
        query = GuardedQueryEngine(engine(llm, streaming=True), HALF, **unit)
        response: Any = await query.aquery("Where?") if asynchronous else query.query("Where?")
        pieces = response.response_gen
        return [piece async for piece in pieces] if asynchronous else list(pieces), response
    chat = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), HALF, **unit)
    if asynchronous:
        stream = await chat.astream_chat("Where?")
        return [piece async for piece in stream.async_response_gen()], stream
    stream = chat.stream_chat("Where?")
    return list(stream.response_gen), stream


MANY = ("x ", *(f"y{number} " for number in range(400)))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("around", ["query", "chat"])
@pytest.mark.parametrize(
    ("words", "values", "begin"),
    [
        ((*WORDS, *MANY), (*DOUBT, *(-0.1,) * len(MANY)), [SENTENCES[0]]),
        ((*"".join(WORDS), *MANY), (*(-0.1,) * 14, *(-2.0,) * 26, *(-0.1,) * len(MANY)), [SENTENCES[0]]),
    ],
)
async def test_a_doubtful_sentence_hangs_up(
    around: str, asynchronous: bool, words: tuple[str, ...], values: tuple[Any, ...], begin: list[str]
) -> None:
    llm = Watched(words=words, values=values, taken=[], closed=[])
    pieces, response = await read(llm, around, asynchronous, by="sentence", on_doubt="stop")
    assert pieces == [*begin, CLOSING_LINE]
    record = response.metadata["semgrad_guard"]
    assert [one["action"] for one in record["sentences"]] == ["deliver", "stop"]
    for _ in range(10):
        await asyncio.sleep(0)
    assert llm.closed == [True]
    assert len(llm.taken) < len(words)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("around", ["query", "chat"])
async def test_a_reader_who_leaves_hangs_up(around: str, asynchronous: bool) -> None:
    llm = Watched(words=(*WORDS, *MANY), values=(-0.1,) * (12 + len(MANY)), taken=[], closed=[])
    query, chat = engine(llm, streaming=True), SimpleChatEngine.from_defaults(llm=llm)
    if around == "query":
        guard = GuardedQueryEngine(query, HALF, by="sentence")
        response: Any = await guard.aquery("Where?") if asynchronous else guard.query("Where?")
        pieces = response.response_gen
    else:
        talk = GuardedChatEngine(chat, HALF, by="sentence")
        stream: Any = await talk.astream_chat("Where?") if asynchronous else talk.stream_chat("Where?")
        pieces = stream.achat_stream if asynchronous else stream.chat_stream
    if asynchronous:
        await anext(pieces)
        await pieces.aclose()
    else:
        next(pieces)
        pieces.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert llm.closed == [True]
    assert len(llm.taken) < len(llm.words)


@pytest.mark.parametrize("around", ["query", "chat"])
@pytest.mark.parametrize("on_doubt", ["stop", "drop", "mark"])
async def test_sentences_leave_async_streams(on_doubt: Any, around: str) -> None:
    llm = Watched(words=WORDS, values=DOUBT, taken=[], closed=[])
    expected, response = await read(llm, around, False, by="sentence", on_doubt=on_doubt)
    pieces, later = await read(llm, around, True, by="sentence", on_doubt=on_doubt)
    assert pieces == expected
    assert pieces[0] == SENTENCES[0]
    assert later.metadata["semgrad_guard"]["sentences"] == response.metadata["semgrad_guard"]["sentences"]
    assert on_doubt == "mark" or "Rome" not in str(later.metadata) + str(vars(later))


def test_units_that_are_set_in_the_wrong_place(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="settings of the SemGradLLM"):
        GuardedQueryEngine(engine(SemGradLLM.from_model(language_model)), HALF, by="sentence")
    with pytest.raises(InputError, match="lets a target finish"):
        GuardedQueryEngine(engine(Reporting()), HALF, by="sentence", on_doubt="escalate")


def test_a_calibration_is_bound_and_promised() -> None:
    examples = [(f"Where is number {i}?", ["Paris"]) for i in range(60)]
    made = calibrate_engine(engine(Reporting()), examples, "contains", alpha=0.2, delta=0.1, progress=False)
    assert made.binding is not None
    assert (made.binding.model, made.binding.settings) == ("remote", {"reported": True, "top_logprobs": 5})
    policy = Policy.from_calibration(made)
    for llm, promised in ((Reporting(), True), (Reporting(temperature=0.7), False)):
        verdict = get_verdict(GuardedQueryEngine(engine(llm), policy).query("Where is number 7?"))
        assert verdict is not None
        assert (verdict.action, verdict.promised) == ("answer", promised)
    with pytest.raises(BindingMismatchError, match="model is 'other'"):
        GuardedQueryEngine(engine(Reporting(model="other")), policy).query("Where is number 7?")


def test_an_answer_that_may_have_been_given_up_is_unscored() -> None:
    for streaming in (False, True):
        answer = GuardedQueryEngine(engine(Reporting(reason=None), streaming=streaming), ALL).query("Where?")
        assert str(answer) == "I don't know."
        verdict = get_verdict(answer)
        assert verdict is not None
        assert "no reason why the answer ended" in str(verdict.reason)
