"""A withheld draft is nowhere: not in what returns, nor in what a handler, trace, memory, error or log holds.

Each way out (`ways.py`) x each mode; the drafts are scripted, everything else is LlamaIndex's and ours.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest

from llama_index_semgrad_guard import LowConfidenceError, guarded
from semgrad_guard import LanguageModel, ToolCall

from .scripted import CANARY, WITHHELD, Scripted, scripted, verdict_of
from .ways import AGENTS, CHAT_WAYS, CHATS, ENGINES, LLM_WAYS, MEMORIES, QUERY_WAYS, Ears, debugged, in_question

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
@pytest.mark.parametrize("way", LLM_WAYS)
def test_an_llm(way: str, mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    llm = scripted(wide, doubtful, **MODES[mode])
    _, error, found = observed(llm, lambda _: LLM_WAYS[way](llm), caplog)
    assert CANARY not in found
    if mode == "raise":
        assert isinstance(error, LowConfidenceError)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [doubtful, last_doubtful])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_guarded_query_engine(
    engine: str, script: Any, mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    for way, ask in QUERY_WAYS.items():
        llm = scripted(wide, script, **MODES[mode])
        subject = guarded(ENGINES[engine](llm), llm.router)
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
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_engines_without_a_question(
    engine: str, mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call decides for itself; what the engine makes of the words in a draft's place is the engine's affair."""
    llm = scripted(wide, last_doubtful, **MODES[mode])
    _, _, found = observed(llm, lambda _: ENGINES[engine](llm).query("Where is it?"), caplog)
    assert CANARY not in found


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("engine", CHATS)
def test_a_guarded_chat_engine(engine: str, memory: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    for way, ask in CHAT_WAYS.items():
        held = MEMORIES[memory]()
        llm = scripted(wide, doubtful)
        subject = guarded(CHATS[engine](llm, held), llm.router)
        response, _, found = observed(llm, lambda _, subject=subject, ask=ask: ask(subject), caplog)
        assert str(response) == WITHHELD, way
        messages = [message.content for message in held.get_all()]
        assert messages == ["Where is it?", WITHHELD]
        assert CANARY not in found + repr(held)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_with_the_guarded_llm(
    agent: str, mode: str, wide: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    llm = scripted(wide, doubtful, calls_functions=True, **MODES[mode])

    def run(ears: Ears) -> Any:
        return in_question(llm, lambda: AGENTS[agent](llm, ears))

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
    answer, _, found = observed(llm, lambda ears: in_question(llm, lambda: AGENTS["function"](llm, ears)), caplog)
    assert (answer, CANARY in found) == (WITHHELD, False)


def test_the_instrument_hears_what_is_let_through(wide: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    """The ears work: a sure answer is in events, spans and callbacks."""
    llm = scripted(wide, lambda _: (f"It is {CANARY}", 0.01))
    _, _, found = observed(llm, lambda _: guarded(ENGINES["compact"](llm), llm.router).query("Where is it?"), caplog)
    assert found.count(CANARY) > 5
