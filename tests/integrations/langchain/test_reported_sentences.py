"""`GuardedChatModel(..., by="sentence")` over another provider's log-probabilities: every path, and live streams."""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import GuardedChatModel, get_verdict
from langchain_semgrad_guard.messages import stage_verdict as decided_verdict
from semgrad_guard import Policy
from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard.reported import ReportedScorer, prompt_of
from semgrad_guard.records import Message
from semgrad_guard.settings import CLOSING_LINE

from .test_reported import Reporting

SENTENCES = ("Paris is old. ", "Rome is new. ", "Oslo is cold.")
WORDS = ("Paris", " is", " old", ".", " Rome", " is", " new", ".", " Oslo", " is", " cold", ".")
SURE, UNSURE = (-0.1,) * 4, (-2.0,) * 4
DOUBT = (*SURE, *UNSURE, *SURE)
POLICY = Policy(threshold=0.5)
PATHS = ("invoke", "ainvoke", "stream", "astream", "batch", "abatch", "events")


def model(values: tuple[Any, ...] = DOUBT, **given: Any) -> Reporting:
    return Reporting(words=WORDS, values=values, **given)


async def answered(guard: GuardedChatModel, path: str) -> AIMessage:
    if path in ("invoke", "batch"):
        return guard.invoke("q") if path == "invoke" else guard.batch(["q"])[0]
    if path in ("ainvoke", "abatch"):
        return await guard.ainvoke("q") if path == "ainvoke" else (await guard.abatch(["q"]))[0]
    if path == "events":
        events: list[Any] = [event async for event in guard.astream_events("q", version="v2")]
        shown = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
        return reduce(add, shown)
    return reduce(add, guard.stream("q") if path == "stream" else [chunk async for chunk in guard.astream("q")])


@pytest.mark.parametrize(
    ("on_doubt", "text"),
    [
        ("stop", f"{SENTENCES[0]}{CLOSING_LINE}"),
        ("drop", f"{SENTENCES[0]}{SENTENCES[2]}"),
        ("mark", "".join(SENTENCES)),
        ("escalate", f"{SENTENCES[0]}\n\nAsk a geographer."),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_every_path_delivers_the_sentences_that_are_let_through(path: str, on_doubt: Any, text: str) -> None:
    target = RunnableLambda(lambda _: "Ask a geographer.") if on_doubt == "escalate" else None
    guard = GuardedChatModel(model(), POLICY, by="sentence", on_doubt=on_doubt, escalate_to=target)
    message = await answered(guard, path)
    assert message.text == text
    verdict = decided_verdict(message)
    assert verdict is not None
    assert [one.action for one in verdict.sentences[:2]] == ["deliver", on_doubt]
    assert verdict.sentences[0].uncertainty == pytest.approx(1 - math.exp(-0.1))
    assert on_doubt == "mark" or "Rome" not in str(message.model_dump())


@pytest.mark.parametrize("path", PATHS)
async def test_a_token_across_a_border_counts_for_the_later_sentence(path: str) -> None:
    """It begins in a doubtful sentence, which it would make surer."""
    inner = Reporting(words=("Paris is old.", " Rome is new", ". Oslo", " is cold."), values=(-0.1, -0.8, -1e-4, -0.1))
    message = await answered(GuardedChatModel(inner, POLICY, by="sentence"), path)
    assert message.text == f"{SENTENCES[0]}{CLOSING_LINE}"


class Counting(Reporting):
    """Counts the pieces that are taken from it."""

    taken: list[str]

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        for chunk in super()._stream(messages, stop, run_manager, **kwargs):
            self.taken.append(str(chunk.message.content))
            yield chunk


@pytest.mark.parametrize("on_doubt", ["stop", "drop"])
def test_a_sentence_leaves_while_the_next_is_written(on_doubt: Any) -> None:
    inner = Counting(words=WORDS, values=DOUBT, taken=[])
    guard = GuardedChatModel(inner, POLICY, by="sentence", on_doubt=on_doubt)
    stream = guard.stream("q")
    first = next(stream)
    assert first.text == SENTENCES[0]
    assert first.response_metadata["semgrad_guard_sentences"][0]["action"] == "deliver"
    assert len(inner.taken) < 7
    assert [chunk.text for chunk in stream if chunk.text] == [CLOSING_LINE if on_doubt == "stop" else SENTENCES[2]]
    assert len(inner.taken) == (10 if on_doubt == "stop" else len(WORDS))  # a doubtful sentence hangs up


NAN = float("nan")
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("stops", {"values": (*SURE, *SURE[:2], *(None,) * 6)}),
    ("nan", {"values": (*SURE, -0.1, NAN, *(-0.1,) * 6)}),
    ("positive", {"values": (*SURE, -0.1, 0.5, *(-0.1,) * 6)}),
    ("missing", {"values": (-0.1,) * 12, "without": frozenset({5})}),
    ("ends", {"values": (-0.1,) * 12, "without": frozenset(range(6, 12))}),
    ("silent", {"values": (0.0,) * 12}),
    ("none", {"values": (-0.1,) * 12, "without": frozenset(range(12))}),
]


class Holed(Reporting):
    """A model whose server leaves out the log-probabilities of some tokens."""

    without: frozenset[int] = frozenset()

    def _reported_info(self, begin: int, end: int) -> dict[str, Any]:
        kept = [number for number in range(begin, end) if number not in self.without]
        ended = {"finish_reason": "stop"} if end == len(WORDS) else {}
        if not self.logprobs or not kept:
            return ended
        entries = [{"token": WORDS[i], "logprob": self.values[i], "top_logprobs": []} for i in kept]
        return {"logprobs": {"content": entries}, **ended}


@pytest.mark.parametrize("on_doubt", ["stop", "drop", "mark"])
@pytest.mark.parametrize("path", ["invoke", "stream", "astream"])
@pytest.mark.parametrize(("kind", "given"), BROKEN)
async def test_no_token_of_an_unscored_sentence_leaves(
    kind: str, given: dict[str, Any], path: str, on_doubt: Any
) -> None:
    inner = Holed(words=WORDS, **given)
    message = await answered(GuardedChatModel(inner, POLICY, by="sentence", on_doubt=on_doubt), path)
    verdict = get_verdict(message)
    assert verdict is not None
    assert "Rome" not in str(message.model_dump())
    assert (verdict.status, verdict.uncertainty) == ("unscored", None)
    if kind in ("silent", "none"):
        assert message.text == "I don't know."
    else:
        assert message.text.startswith(SENTENCES[0])
        assert ("Oslo" in message.text) == (kind in ("nan", "positive") and on_doubt != "stop")


def test_late_log_probabilities_decide_at_the_end() -> None:
    class Late(Reporting):
        def _stream(self, *args: Any, **kwargs: Any) -> Any:
            for word in self.words:
                yield ChatGenerationChunk(message=AIMessageChunk(content=word))
            yield ChatGenerationChunk(
                message=AIMessageChunk(content=""), generation_info=self._reported_info(0, len(self.words))
            )

    guard = GuardedChatModel(Late(words=WORDS, values=DOUBT), POLICY, by="sentence", on_doubt="drop")
    assert [chunk.text for chunk in guard.stream("q") if chunk.text] == [f"{SENTENCES[0]}{SENTENCES[2]}"]


class Tokens(BaseCallbackHandler):
    """What a listener hears."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **_: Any) -> None:
        self.seen += [str(token), str(chunk)]

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.seen.append(str(response))


def test_listeners_and_calls_with_tools() -> None:
    hears = Tokens()
    guard = GuardedChatModel(model(), POLICY, by="sentence")
    list(guard.stream("q", config={"callbacks": [hears]}))
    assert "Paris" in str(hears.seen)
    assert "Rome" not in str(hears.seen)
    whole = [chunk.text for chunk in guard.stream("q", tools=[{"type": "function"}]) if chunk.text]
    assert whole == [f"{SENTENCES[0]}{CLOSING_LINE}"]


def test_a_calibration_by_sentence_brings_its_unit() -> None:
    base = ReportedScorer("remote", by_sentence="drop")
    binding = base.binding.model_copy(update={"options": {"temperature": 0.0}})
    answers = [AnswerSentences(f"q{i}", "".join(SENTENCES), [0.1] * 3, (True,) * 3, (None,) * 3) for i in range(60)]
    forms = [prompt_of([Message("user", f"Where is number {i}?")]) for i in range(60)]
    made = calibrate_sentences(
        answers, on_doubt="drop", alpha=0.2, delta=0.2, binding=binding, copies="keep", prompts=forms
    )
    policy = Policy.from_calibration(made)
    verdict = get_verdict(GuardedChatModel(model((-0.1,) * 12), policy).invoke("Where is number 7?"))
    assert verdict is not None
    assert ([one.promised for one in verdict.sentences], verdict.calibration_id) == ([True] * 3, made.id)
    with pytest.raises(BindingMismatchError, match="judged as"):
        GuardedChatModel(model(), policy, by="answer").invoke("Where is number 7?")
    with pytest.raises(InputError, match="about sentences"):
        GuardedChatModel(model(), POLICY, on_doubt="drop").invoke("q")


@pytest.mark.parametrize("path", PATHS)
async def test_the_last_sentence_of_an_answer_that_may_have_been_given_up_stays(path: str) -> None:
    guard = GuardedChatModel(model(SURE * 3, reason=None), POLICY, by="sentence")
    assert (await answered(guard, path)).text == f"{SENTENCES[0]}{SENTENCES[1]}{CLOSING_LINE}"
