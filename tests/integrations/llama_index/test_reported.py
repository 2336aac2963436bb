"""Engines over an LLM whose server reports log-probabilities, without a copy of its model."""

from __future__ import annotations

from collections.abc import Iterator
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
        def pieces() -> Iterator[ChatResponse]:
            for number, word in enumerate(self.words):
                message = ChatMessage(role=MessageRole.ASSISTANT, content="".join(self.words[: number + 1]))
                yield ChatResponse(message=message, delta=word, raw=self._raw(number, number + 1))

        return pieces()

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
