"""How chat templates write tool calls, and how answers are read back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semgrad_guard import ToolCall
from semgrad_guard.engine.prompts.tool_format import ToolAnswer, known_format, tool_format
from semgrad_guard.errors import InputError, UnsupportedToolsError

from .chat_templates import FOLDER, template

ADD = ToolCall("add", {"a": 1})
KNOWN = {
    "qwen2.5": "<tool_call>",
    "qwen3": "<tool_call>",
    "mistral-nemo": "[TOOL_CALLS]",
    "mistral-v0.3": "[TOOL_CALLS]",
    "llama-3.1-tools": "bare JSON",
}


def form(name: str) -> Any:
    return known_format(template(name))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_the_form_is_read_off_the_template(path: Path) -> None:
    found = known_format(template(path.stem))
    assert (found.name if found else None) == KNOWN.get(path.stem)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("qwen2.5", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ToolAnswer("", (ADD,))),
        ("qwen2.5", 'Well.\n<tool_call>{"name": "add", "arguments": {"a": 1}}', ToolAnswer("Well.", (ADD,))),
        ("qwen2.5", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ToolAnswer("", (ADD,))),
        ("qwen2.5", '<tool_call>{"name": "wait"}</tool_call>', ToolAnswer("", (ToolCall("wait", {}),))),
        (
            "qwen2.5",
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "ad',
            ToolAnswer("", (ADD,), ('<tool_call>{"name": "ad',)),
        ),
        ("qwen2.5", "<tool_call>3</tool_call>", ToolAnswer("", (), ("<tool_call>3</tool_call>",))),
        ("qwen2.5", '{"name": "add", "arguments": {"a": 1}}\n', ToolAnswer('{"name": "add", "arguments": {"a": 1}}\n')),
        (
            "mistral-nemo",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdef123"}, {"name": "add", "arguments": {}}]',
            ToolAnswer("", (ToolCall("add", {"a": 1}, "abcdef123"), ToolCall("add", {}))),
        ),
        ("mistral-nemo", "[TOOL_CALLS] [{", ToolAnswer("", (), ("[TOOL_CALLS] [{",))),
        ("mistral-nemo", "[1, 2]", ToolAnswer("[1, 2]")),
        ("llama-3.1-tools", '{"name": "add", "parameters": {"a": 1}}', ToolAnswer("", (ADD,))),
        ("llama-3.1-tools", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ToolAnswer("", (ADD,))),
        (
            "llama-3.1-tools",
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
            ToolAnswer("", (ADD, ADD)),
        ),
        ("llama-3.1-tools", '{"name": 3, "parameters": {}}', ToolAnswer('{"name": 3, "parameters": {}}')),
        ("llama-3.1-tools", '{"answer": 3}', ToolAnswer('{"answer": 3}')),
        ("llama-3.1-tools", "Three.", ToolAnswer("Three.")),
    ],
)
def test_answers_are_taken_apart(name: str, text: str, expected: ToolAnswer) -> None:
    assert form(name).parse(text, "") == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        (" \n", ""),
        ("Let me see", "Let me see"),
        ("Let me see.\n", "Let me see."),
        ("Is 1 <", "Is 1"),
        ("Is 1 < 2?", "Is 1 < 2?"),
        ("Well.\n<tool_c", "Well."),
        ('Well. <tool_call>{"name"', "Well."),
        ('{"name"', ""),
        (" [", ""),
    ],
)
def test_a_stream_shows_what_cannot_be_a_call(text: str, shown: str) -> None:
    assert text[: form("qwen2.5").shown(text)] == shown


def test_a_tokenizers_own_parser_reads_the_rest() -> None:
    def parse_response(text: str, *, prefix: str) -> dict[str, Any]:
        assert prefix == "the prompt"
        if text == "bad":
            raise ValueError(text)
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        return {"content": "Well.", "tool_calls": [call] if "call" in text else []}

    tokenizer = SimpleNamespace(response_template={}, parse_response=parse_response)
    own = tool_format(tokenizer, "{{ tools }} <odd>")
    assert own.parse("a call", "the prompt") == ToolAnswer("Well.", (ADD,))
    assert own.parse("bad", "the prompt") == ToolAnswer("", (), ("bad",))
    assert own.parse("text", "the prompt") == ToolAnswer("text")
    assert own.shown("Anything") == 0, "special tokens are not seen in a stream"
    with pytest.raises(InputError, match="forced"):
        own.rule([], {})


MISTRAL_SMALL = "{{ tools }} [TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}"
DEEPSEEK = "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "{{ tools }}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{}<|tool_call_end|>"
GRANITE = "{{ tools }} write <|tool_call|> and a list"


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (MISTRAL_SMALL, '[TOOL_CALLS]add[ARGS]{"a": 1}', ToolAnswer("", (ADD,))),
        (MISTRAL_SMALL, 'Well. [TOOL_CALLS]add[CALL_ID]x9[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', [ADD, ADD]),
        (MISTRAL_SMALL, '[TOOL_CALLS]add[ARGS]{"a": "[TOOL_CALLS]pay[ARGS]{}"}', "one call"),
        (MISTRAL_SMALL, '[TOOL_CALLS]add[ARGS]{"a": ', "broken"),
        (MISTRAL_SMALL, "[TOOL_CALLS]add[ARGS]3", "broken"),
        (MISTRAL_SMALL, "[TOOL_CALLS]add[ARGS]{} and more", "broken"),
        (
            DEEPSEEK,
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [ADD, ADD],
        ),
        (
            KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            [ADD],
        ),
        (GRANITE, 'Well. <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]', [ADD]),
        (GRANITE, "<|tool_call|>[{", "broken"),
        (GRANITE, "Three.", ToolAnswer("Three.")),
        (KIMI, "Three.", ToolAnswer("Three.")),
    ],
)
def test_further_families_are_taken_apart(source: str, text: str, expected: Any) -> None:
    found = known_format(source)
    assert found is not None
    answer = found.parse(text, "")
    if expected == "broken":
        assert answer.broken
    elif expected == "one call":
        assert [call.name for call in answer.calls] == ["add"]
    elif isinstance(expected, list):
        assert list(answer.calls) == expected
        assert not answer.broken
    else:
        assert answer == expected


def test_templates_that_cannot_be_used_are_named() -> None:
    bare = SimpleNamespace(response_template=None)
    for unusable in (None, "{{ messages }}", "{{ messages }} <tool_call>"):
        with pytest.raises(UnsupportedToolsError, match="knows no tools"):
            tool_format(bare, unusable)
    gpt_oss = "{{ tools }}<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>"
    deepseek_v3 = "{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json"
    for relative in ("<tool_call><function={{ tools }}>", gpt_oss, deepseek_v3):
        with pytest.raises(UnsupportedToolsError, match="response_template"):
            tool_format(bare, relative)
