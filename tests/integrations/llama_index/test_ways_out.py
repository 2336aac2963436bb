"""A withheld draft is nowhere: not in what returns, nor in what a handler, trace, memory, error or log holds.

Each way out (`ways.py`) x each mode; the drafts are scripted, everything else is LlamaIndex's and ours.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer

from llama_index_semgrad_guard import (
    LowConfidenceError,
    SemGradLLM,
    UncertaintyEvaluator,
    UncertaintyRouterCallback,
    asking,
    guarded,
)
from semgrad_guard import LanguageModel, Policy, ToolCall
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel

from . import ways
from .ways import CANARY, WITHHELD, Ears, Scripted, debugged, drained, in_question, reading, scripted, verdict_of

MODES: dict[str, dict[str, Any]] = {
    "enforce": {},
    "raise": {"mode": "raise"},
    "escalate": {"escalate_to": lambda _question: "the target's words"},
    "failing target": {"escalate_to": lambda _question: 1 / 0},
    "abstain on errors": {"on_error": "abstain"},
}


def doubtful(_prompt: str) -> tuple[str, float]:
    return f"Thought: I know.\nAnswer: It is {CANARY}", 0.9


def last_doubtful(prompt: str) -> tuple[str, float]:
    """Sure of helpers' work in forms that LlamaIndex's parsers read, and doubtful of the answer itself."""
    if "sub question" in prompt.lower() and "Tools" in prompt:
        return '```json\n{"items": [{"sub_question": "who?", "tool_name": "t"}]}\n```', 0.01
    if "choices" in prompt.lower():
        return '[{"choice": 1, "reason": "fits"}]', 0.01
    if "Relevance" in prompt or "relevance" in prompt:
        return "Doc: 1, Relevance: 9", 0.01
    return f"It is {CANARY}", 0.9


def observed(llm: Scripted, run: Callable[[Ears], Any], caplog: pytest.LogCaptureFixture) -> tuple[Any, Any, str]:
    """The result, the error, and everything that handlers got of them."""
    ears, printed, debug = Ears(), io.StringIO(), debugged(llm)
    result: Any = None
    failure: Exception | None = None
    with caplog.at_level(logging.DEBUG), ears.listening(), redirect_stdout(printed):
        try:
            result = run(ears)
        except Exception as error:  # noqa: BLE001 - whatever LlamaIndex makes of a refusal
            failure = error
    ears.add(result, getattr(result, "metadata", None), getattr(result, "source_nodes", None))
    ears.add_error(failure)
    for pair in debug.get_event_pairs():
        ears.add(*(event.payload for event in pair))
    ears.add(printed.getvalue(), caplog.text, [record.__dict__ for record in caplog.records])
    return result, failure, "\n".join(ears.heard)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ways.LLM_WAYS)
def test_an_llm(way: str, mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    llm = scripted(wide, doubtful, **MODES[mode])
    _, error, found = observed(llm, lambda _: ways.LLM_WAYS[way](llm), caplog)
    assert CANARY not in found
    if mode == "raise":
        assert isinstance(error, LowConfidenceError)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [doubtful, last_doubtful])
@pytest.mark.parametrize("engine", ways.ENGINES)
def test_a_guarded_query_engine(
    engine: str, script: Any, mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    for way, ask in ways.QUERY_WAYS.items():
        llm = scripted(wide, script, **MODES[mode])
        subject = guarded(ways.ENGINES[engine](llm), llm.router)
        response, error, found = observed(llm, lambda _, subject=subject, ask=ask: ask(subject), caplog)
        assert CANARY not in found, way
        if mode == "raise":
            assert isinstance(error, LowConfidenceError)
        elif mode == "failing target":
            assert isinstance(error, ZeroDivisionError)
        else:
            assert str(response) == ("the target's words" if mode == "escalate" else WITHHELD)
            assert not response.source_nodes
            verdict = verdict_of(response)
            assert verdict.action == ("escalate" if mode == "escalate" else "abstain")


@pytest.mark.parametrize("mode", ["enforce", "escalate"])
@pytest.mark.parametrize("engine", ways.ENGINES)
def test_the_same_engines_without_a_question(
    engine: str, mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call decides for itself; what the engine makes of the words in a draft's place is the engine's affair."""
    llm = scripted(wide, last_doubtful, **MODES[mode])
    _, _, found = observed(llm, lambda _: ways.ENGINES[engine](llm).query("Where is it?"), caplog)
    assert CANARY not in found


@pytest.mark.parametrize("memory", ways.MEMORIES)
@pytest.mark.parametrize("engine", ways.CHATS)
def test_a_guarded_chat_engine(engine: str, memory: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    for way, ask in ways.CHAT_WAYS.items():
        held = ways.MEMORIES[memory]()
        llm = scripted(wide, doubtful)
        subject = guarded(ways.CHATS[engine](llm, held), llm.router)
        response, _, found = observed(llm, lambda _, subject=subject, ask=ask: ask(subject), caplog)
        assert str(response) == WITHHELD, way
        messages = [message.content for message in held.get_all()]
        assert messages == ["Where is it?", WITHHELD]
        assert CANARY not in found + repr(held)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("agent", ways.AGENTS)
def test_an_agent_with_the_guarded_llm(
    agent: str, mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    llm = scripted(wide, doubtful, calls_functions=True, **MODES[mode])

    def run(ears: Ears) -> Any:
        return in_question(llm, lambda: ways.AGENTS[agent](llm, ears))

    answer, error, found = observed(llm, run, caplog)
    assert CANARY not in found
    assert error is None
    assert answer == WITHHELD


@pytest.mark.parametrize("mode", ["enforce", "raise"])
def test_a_doubtful_call_of_a_tool_does_not_run(
    mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    call = ToolCall("look", {"what": CANARY}, "123456789")
    llm = scripted(wide, lambda _: ("", 0.9, [call]), calls_functions=True, **MODES[mode])
    answer, _, found = observed(llm, lambda ears: in_question(llm, lambda: ways.AGENTS["function"](llm, ears)), caplog)
    assert (answer, CANARY in found) == (WITHHELD, False)


@pytest.mark.parametrize("caller", ["llm", "engine", "chat engine"])
async def test_a_cancelled_task_and_a_failing_log_hold_no_draft(caller: str, wide: LanguageModel) -> None:
    ears = Ears()

    def write(verdict: Any, **_: Any) -> Any:
        raise OSError("the disk is full")

    async def target(_question: Any) -> None:
        task.cancel()
        await asyncio.sleep(60)

    log = SimpleNamespace(write=write)
    for options, kind in (({"escalate_to": target}, asyncio.CancelledError), ({"log": log}, OSError)):
        llm = scripted(wide, doubtful, **options)
        asks: dict[str, Callable[[], Any]] = {
            "llm": lambda llm=llm: llm.achat([ChatMessage("q")]),
            "engine": lambda llm=llm: guarded(reading(llm), llm.router).aquery("q"),
            "chat engine": lambda llm=llm: guarded(SimpleChatEngine.from_defaults(llm=llm), llm.router).achat("q"),
        }
        with ears.listening():
            task = asyncio.ensure_future(asks[caller]())
            with pytest.raises(kind) as caught:
                await task
        ears.add_error(caught.value)
    assert CANARY not in "\n".join(ears.heard)


def test_the_instrument_hears_what_is_let_through(wide: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    """The ears work: a sure answer is in events, spans and callbacks."""
    llm = scripted(wide, lambda _: (f"It is {CANARY}", 0.01))
    _, _, found = observed(
        llm, lambda _: guarded(ways.ENGINES["compact"](llm), llm.router).query("Where is it?"), caplog
    )
    assert found.count(CANARY) > 5


# By sentence.

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
