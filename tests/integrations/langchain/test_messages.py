"""LangChain's messages in, verdicts out."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_semgrad_guard import get_verdict
from langchain_semgrad_guard.messages import as_chunk, as_message, to_conversation
from semgrad_guard import Message, ToolCall, Verdict
from semgrad_guard.adapters.calls import short_id
from semgrad_guard.errors import InputError
from semgrad_guard.records import CallVerdict

CALL: Any = {"name": "pay", "args": {"sum": 1}, "id": "1"}


def test_roles_and_text_blocks() -> None:
    conversation = to_conversation(
        [
            SystemMessage("be brief"),
            HumanMessage(["one ", {"type": "text", "text": "two"}, {"text": " three"}]),
            AIMessage("four"),
            AIMessageChunk("five"),
            ToolMessage("six", tool_call_id="1"),
            ChatMessage("seven", role="critic"),
        ]
    )
    assert conversation == (
        Message("system", "be brief"),
        Message("user", "one two three"),
        Message("assistant", "four"),
        Message("assistant", "five"),
        Message("tool", "six", tool_call_id=short_id("1")),
        Message("critic", "seven"),
    )


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]), "image_url"),
        (HumanMessage([{"type": "text", "text": "look:"}, {"type": "audio", "base64": "AA=="}]), "audio"),
        (HumanMessage([{"type": "text"}]), "text"),
        (FunctionMessage("3", name="add"), "function"),
    ],
)
def test_what_a_text_model_cannot_read_is_named(message: BaseMessage, named: str) -> None:
    with pytest.raises(InputError, match=rf"message 2 .*{named}"):
        to_conversation([HumanMessage("first"), message])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "reasoning_content", "reasoning_content": {"text": "hm"}},
        {"type": "non_standard", "value": {"provider": "x"}},
    ],
)
def test_earlier_reasoning_is_no_part_of_the_next_prompt(block: dict[str, Any]) -> None:
    answered = AIMessage([block, {"type": "text", "text": "four"}])
    assert to_conversation([HumanMessage("2 + 2?"), answered]) == (
        Message("user", "2 + 2?"),
        Message("assistant", "four"),
    )
    with pytest.raises(InputError, match=rf"message 1 .*{block['type']}"):
        to_conversation([HumanMessage([block])])


def test_a_picture_that_an_assistant_sent_is_named() -> None:
    with pytest.raises(InputError, match=r"message 1 .*image"):
        to_conversation([AIMessage([{"type": "image", "base64": "AA=="}])])


def test_a_message_without_a_record_has_no_verdict() -> None:
    assert get_verdict(AIMessage("x")) is None
    assert get_verdict(HumanMessage("x", response_metadata={"model_name": "other"})) is None


@pytest.mark.parametrize("record", [{}, {"schema": 1}, "text", 3, {"schema": 2, "status": "scored"}])
def test_a_damaged_record_is_an_error(record: Any) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        get_verdict(AIMessage("x", response_metadata={"semgrad_guard": record}))


@pytest.mark.parametrize("changed", [[], [{"name": "pay", "args": {"sum": 9}, "id": "1"}], [CALL, CALL]])
def test_a_promise_is_one_about_the_calls_as_they_were_written(changed: list[Any]) -> None:
    """A record is not believed to promise calls that another has changed, added or left out."""
    own = ToolCall(CALL["name"], CALL["args"])
    verdict = Verdict.of(
        status="scored",
        action="answer",
        text="Paid.",
        uncertainty=0.1,
        threshold=0.2,
        promised=True,
        estimator="gnll",
        model="m",
        calls=(CallVerdict(digest=own.digest),),
    )
    record = {"semgrad_guard": verdict.metadata()}
    for calls, promised in (([CALL], True), (changed, False)):
        read = get_verdict(AIMessage("Paid.", tool_calls=calls, response_metadata=record))
        assert read is not None
        assert read.promised is promised


def test_a_message_as_a_chunk_keeps_everything() -> None:
    message = AIMessage(
        content=[{"type": "text", "text": "hi"}],
        id="7",
        name="nobody",
        additional_kwargs={"sources": ["a"]},
        response_metadata={"model_name": "m", "semgrad_guard": {"schema": 1}},
        usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
        tool_calls=[{"name": "add", "args": {"a": 1}, "id": "1"}],
    )
    chunk = as_chunk(message)
    assert chunk.chunk_position == "last"
    for field in ("content", "id", "name", "additional_kwargs", "response_metadata", "usage_metadata", "tool_calls"):
        assert getattr(chunk, field) == getattr(message, field)
    assert as_message(chunk).tool_calls == message.tool_calls


def test_what_a_target_may_return() -> None:
    assert as_message("hi") == AIMessage("hi")
    with pytest.raises(InputError, match="HumanMessage"):
        as_message(HumanMessage("hi"))
