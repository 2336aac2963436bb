"""How chat templates write tool calls, and how answers are read back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semgrad_guard import ToolCall
from semgrad_guard.engine.prompts.forms import ToolAnswer, call_form, call_rule, calls_in, known_form, shown_text
from semgrad_guard.errors import InputError, UnsupportedToolsError

from .chat_templates import FOLDER, template

ADD = ToolCall("add", {"a": 1})
KNOWN = {
    "qwen2.5": "<tool_call>",
    "qwen3": "<tool_call>",
    "mistral-nemo": "[TOOL_CALLS]",
    "mistral-v0.3": "[TOOL_CALLS]",
    "llama-3.1-tools": "",
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_the_form_is_read_off_the_template(path: Path) -> None:
    found = known_form(template(path.stem))
    assert (found.open if found else None) == KNOWN.get(path.stem)


TABLE: dict[str, Any] = json.loads((FOLDER.parent / "tool_calls.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "text", "expected"), TABLE["answers"])
def test_answers_are_taken_apart(name: str, text: str, expected: Any) -> None:
    """Into text, calls and broken calls; where only calls are given, none is broken."""
    found = known_form(TABLE["templates"].get(name) or template(name))
    assert found is not None
    answer = calls_in(found, text)
    if expected == "broken":
        assert answer.broken
    elif expected == "one call":
        assert [call.name for call in answer.calls] == ["add"]
    else:
        assert [[call.name, call.arguments, call.id] for call in answer.calls] == expected["calls"]
        assert answer.text == expected.get("text", answer.text)
        assert list(answer.broken) == expected.get("broken", [])


@pytest.mark.parametrize(("text", "shown"), TABLE["streams"])
def test_a_stream_shows_what_cannot_be_a_call(text: str, shown: str) -> None:
    found = known_form(template("qwen2.5"))
    assert found is not None
    assert text[: shown_text(found, text)] == shown


def test_a_tokenizers_own_response_template_reads_the_rest() -> None:
    """By transformers' parser, which sees what the prompt has opened."""
    call = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
    fields = {"thinking": {"open": "<t>", "close": "</t>"}, "content": {}, "tool_calls": call}
    tokenizer = SimpleNamespace(response_template={"start_anchor": "<a>", "fields": fields})
    own = call_form(tokenizer, "{{ tools }} <odd>")
    written = 'It is 3.</t>Well.<call>{"name": "add", "arguments": {"a": 1}}</call>'
    assert calls_in(own, written, prompt="<a><t>") == ToolAnswer("Well.", (ADD,))
    assert calls_in(own, "<call>{", prompt="<a>") == ToolAnswer("", (), ("<call>{",))
    assert calls_in(own, "text", prompt="<a>") == ToolAnswer("text")
    assert shown_text(own, "Anything") == 0, "special tokens are not seen in a stream"
    with pytest.raises(InputError, match="forced"):
        call_rule(own, [], {})


CODER = "{{ tools }}<tool_call>\n<function={{ name }}>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "{{ tools }}<tool_call>{{ name }}\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


@pytest.mark.parametrize("source", [CODER, GLM], ids=["Qwen3-Coder", "GLM 4.5"])
def test_calls_that_are_tags_get_the_types_of_their_schema(source: str) -> None:
    text, found = source.removeprefix("{{ tools }}").replace("{{ name }}", "add"), known_form(source)
    assert found is not None
    assert calls_in(found, text, tools=[TOOL]) == ToolAnswer("", (ADD,))
    assert calls_in(found, f"Well.\n{text}\n{text}", tools=[TOOL]) == ToolAnswer("Well.", (ADD, ADD))
    assert calls_in(found, text) == ToolAnswer("", (ToolCall("add", {"a": "1"}),)), "no type is known"
    assert calls_in(found, cut := text[: text.index("</")]).broken == (cut,), "a call that is cut off is none"
    assert calls_in(found, "Three.") == ToolAnswer("Three.")
    assert shown_text(found, "Well.") == 0


def test_templates_that_cannot_be_used_are_named() -> None:
    bare = SimpleNamespace(response_template=None)
    for unusable in (None, "{{ messages }}", "{{ messages }} <tool_call>"):
        with pytest.raises(UnsupportedToolsError, match="knows no tools"):
            call_form(bare, unusable)
    gpt_oss = "{{ tools }}<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>"
    deepseek_v3 = "{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json"
    for relative in (gpt_oss, deepseek_v3):
        with pytest.raises(UnsupportedToolsError, match="response_template"):
            call_form(bare, relative)
