"""Tool calls as chat templates write them: read from answers, and described for answers that must be one.

Which form a model uses is read off its template's text, by the table `_FORMATS`. A tokenizer that brings a
`response_template` of its own is read by transformers' parser instead, where the table knows no better.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from semgrad_guard.engine.prompts.grammar import json_rule, text_rule
from semgrad_guard.errors import InputError, UnsupportedToolsError
from semgrad_guard.records import ToolCall

Tool = Mapping[str, Any]
"""A tool as transformers and OpenAI describe it: {"type": "function", "function": {"name", "parameters", ...}}."""


@dataclass(frozen=True)
class ToolAnswer:
    """An answer taken apart: its text, its calls, and calls that cannot be parsed, as they were written."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """How one family of templates writes calls. `parse` takes the answer, special tokens and all, and its prompt.

    `around` is the text before and after a call's JSON, None where an answer cannot be made to be a call. `listed`:
    that JSON is a list of calls. `between`: the name is written before this text, and the JSON holds the arguments
    alone. `reads_thoughts`: `parse` takes the thoughts before the answer as well.
    """

    name: str
    parse: Callable[[str, str], ToolAnswer]
    around: tuple[str, str] | None
    arguments: str = "arguments"
    listed: bool = False
    between: str | None = None
    reads_thoughts: bool = False

    def rule(self, tools: Sequence[Tool], special_tokens: Mapping[str, int]) -> str:
        """The grammar rule of an answer that is exactly one call of one of these tools.

        Raises:
            InputError: answers in this form cannot be constrained.
        """
        if self.around is None:
            raise InputError(f"a tool call cannot be forced in the form {self.name!r}; leave tool_choice out").about(
                "tool_choice"
            )
        if self.between is not None:
            before, after = self.around
            heads = [text_rule(f"{before}{tool['function']['name']}{self.between}", special_tokens) for tool in tools]
            bodies = [json_rule(tool["function"].get("parameters") or _NO_PARAMETERS) for tool in tools]
            end = text_rule(after, special_tokens)
            return "(" + " | ".join(f"{head} {body} {end}" for head, body in zip(heads, bodies, strict=True)) + ")"
        place = "#/items/anyOf" if self.listed else "#/anyOf"
        calls: list[dict[str, Any]] = []
        for number, tool in enumerate(tools):
            function = tool["function"]
            parameters = function.get("parameters") or _NO_PARAMETERS
            moved = _moved(parameters, f"{place}/{number}/properties/{self.arguments}")
            properties = {"name": {"const": function["name"]}, self.arguments: moved}
            calls.append({"type": "object", "properties": properties, "required": list(properties)})
        schema: dict[str, Any] = {"anyOf": calls}
        if self.listed:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
        before, after = (text_rule(text, special_tokens) for text in self.around)
        return f"({before} {json_rule(schema)} {after})"

    def shown(self, text: str) -> int:
        """How much of a growing answer cannot be part of a call, so that a stream may show it already.

        Special tokens are not in this text, so an answer that begins like JSON may be a call in any form. Where a name
        comes first, any text may be one.
        """
        if self.around is None or self.between is not None or not text.strip() or text.lstrip()[0] in "[{":
            return 0
        mark = self.around[0].strip() or "<tool_call>"
        at = text.find(mark)
        if at < 0:
            at = len(text) - next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
        return len(text[:at].rstrip())


_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def _moved(schema: Any, place: str) -> Any:
    """A schema as a part of a larger one: its references begin at its place there."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    parts = {key: _moved(value, place) for key, value in cast("Mapping[str, Any]", schema).items()}
    reference = parts.get("$ref")
    return {**parts, "$ref": place + reference[1:]} if isinstance(reference, str) and reference[:1] == "#" else parts


def known_format(template: str) -> ToolFormat | None:
    """The form in which a template writes calls, None if the table does not hold it."""
    if not re.search(r"\btools\b", template):
        return None
    return next((form for pattern, form in _FORMATS if re.search(pattern, template, re.DOTALL)), None)


def tool_format(tokenizer: Any, template: str | None) -> ToolFormat:
    """The form in which a model writes its calls.

    Raises:
        UnsupportedToolsError: its template knows no tools, or writes calls in a form that is not known here.
    """
    form = known_format(template or "")
    if form is not None:
        return form
    if not re.search(r"\btools\b", template or ""):
        raise UnsupportedToolsError("this model's chat template knows no tools").about(
            *UnsupportedToolsError.fields,
            advice="use a model that was trained to call them, or give its template by "
            'template_options={"chat_template": ...}',
        )
    if getattr(tokenizer, "response_template", None) is None:
        raise UnsupportedToolsError(
            "this model's chat template writes tool calls in a form that is not known here, and its tokenizer brings "
            "no response_template to read them by"
        ).about(*UnsupportedToolsError.fields, advice="set tokenizer.response_template")
    return ToolFormat("response_template", partial(_parse_by_template, tokenizer), None, reads_thoughts=True)


def _parse_tagged(text: str, prompt: str) -> ToolAnswer:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them (Hermes, Qwen)."""
    pattern = r"<tool_call>(.*?)(?:</tool_call>|\Z)"
    calls: list[ToolCall] = []
    broken: list[str] = []
    for match in re.finditer(pattern, text, re.DOTALL):
        inside = _calls_in(match.group(1))
        calls.extend(inside or ())
        if not inside:
            broken.append(match.group())
    before = re.sub(pattern, "", text, flags=re.DOTALL)
    return ToolAnswer(before.rstrip(), tuple(calls), tuple(broken)) if calls or broken else ToolAnswer(text)


def _parse_after(mark: str, text: str, prompt: str) -> ToolAnswer:
    """A list of calls, or several, behind one mark: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] (Mistral)."""
    before, found, rest = text.partition(mark)
    if not found:
        return ToolAnswer(text)
    calls = _calls_in(rest.strip().removesuffix("<|/tool_call|>"))
    return ToolAnswer(before.rstrip(), calls) if calls else ToolAnswer(before.rstrip(), (), (found + rest,))


def _parse_named(opening: str, head: str, tail: str, text: str, prompt: str) -> ToolAnswer:
    """Calls that write the name before the JSON of the arguments: `head` holds it, and `tail` ends a call."""
    at = text.find(opening)
    if at < 0:
        return ToolAnswer(text)
    before, calls, decoder = text[:at].rstrip(), list[ToolCall](), json.JSONDecoder()
    while text[at:].strip():
        begin = re.compile(head).match(text, at)
        try:
            arguments, end = decoder.raw_decode(text, begin.end() if begin else len(text))
        except ValueError:
            return ToolAnswer(before, tuple(calls), (text[at:].strip(),))
        if begin is None or not isinstance(arguments, dict):
            return ToolAnswer(before, tuple(calls), (text[at:].strip(),))
        calls.append(ToolCall(begin["name"].strip(), arguments))
        ended = re.compile(tail).match(text, end)
        at = ended.end() if ended else end
    return ToolAnswer(before, tuple(calls))


def _parse_bare(text: str, prompt: str) -> ToolAnswer:
    """{"name": ..., "parameters": {...}} as the whole answer (Llama 3); other JSON is an answer like any other."""
    calls = _calls_in(text.strip().removeprefix("<|python_tag|>"))
    return ToolAnswer("", calls) if calls else ToolAnswer(text)


def _parse_by_template(tokenizer: Any, text: str, prompt: str) -> ToolAnswer:
    """By transformers' parser, which gives up an answer as a whole: an unreadable one is one broken call."""
    try:
        message: dict[str, Any] = tokenizer.parse_response(text, prefix=prompt)
        calls = tuple(_as_call(call) for call in message.get("tool_calls") or ())
    except (ValueError, KeyError, TypeError):
        return ToolAnswer("", (), (text,))
    return ToolAnswer(str(message.get("content") or ""), calls) if calls else ToolAnswer(text)


def _calls_in(text: str) -> tuple[ToolCall, ...]:
    """The calls of which a text consists, one after the other or in a list; none if it holds anything else."""
    text, decoder = text.strip(), json.JSONDecoder()
    values, at = list[Any](), 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            while at < len(text) and (text[at].isspace() or text[at] == ";"):
                at += 1
        return tuple(_as_call(call) for value in values for call in (value if isinstance(value, list) else [value]))
    except (ValueError, KeyError, TypeError):
        return ()


def _as_call(value: Any) -> ToolCall:
    """A call from its JSON, whatever its parts are called; ValueError, KeyError or TypeError if it is none."""
    function = value.get("function", value) if isinstance(value, dict) else {}
    arguments = function["parameters"] if "parameters" in function else function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(function["name"], str) or not isinstance(arguments, dict):
        raise TypeError("a call is a name and an object of arguments")
    made: Any = cast("dict[str, Any]", value).get("id") or function.get("id")
    return ToolCall(function["name"], arguments, made if isinstance(made, str) else None)


_MISTRAL = ToolFormat("[TOOL_CALLS]", partial(_parse_after, "[TOOL_CALLS]"), ("[TOOL_CALLS]", ""), listed=True)
_HERMES = ToolFormat("<tool_call>", _parse_tagged, ("<tool_call>\n", "\n</tool_call>"))
_LLAMA = ToolFormat("bare JSON", _parse_bare, ("", ""), arguments="parameters")

_GRANITE = ToolFormat("<|tool_call|>", partial(_parse_after, "<|tool_call|>"), ("<|tool_call|>", ""), listed=True)
_MISTRAL_NAMED = ToolFormat(
    "[TOOL_CALLS]...[ARGS]",
    partial(
        _parse_named, "[TOOL_CALLS]", r"\s*\[TOOL_CALLS\](?P<name>[^\[\]{}]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*", r"\s*"
    ),
    ("[TOOL_CALLS]", ""),
    between="[ARGS]",
)
_DEEPSEEK = ToolFormat(
    "<｜tool▁sep｜>",
    partial(
        _parse_named,
        "<｜tool▁calls▁begin｜>",
        r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>\s*",
        r"\s*<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>\s*)?",
    ),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    between="<｜tool▁sep｜>",
)
_KIMI = ToolFormat(
    "<|tool_call_argument_begin|>",
    partial(
        _parse_named,
        "<|tool_calls_section_begin|>",
        r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*functions\.(?P<name>[^<:]+):\d+\s*"
        r"<\|tool_call_argument_begin\|>\s*",
        r"\s*<\|tool_call_end\|>\s*(?:<\|tool_calls_section_end\|>\s*)?",
    ),
    ("<|tool_calls_section_begin|><|tool_call_begin|>functions.", "<|tool_call_end|><|tool_calls_section_end|>"),
    between=":0<|tool_call_argument_begin|>",
)

# Patterns of templates' texts, the most telling mark first. Relatives that write something else inside the same
# marks (<tool_call><function=...>, DeepSeek V3 with ```json) are left out on purpose; so are gpt-oss's calls, which are
# channels besides the one of the answer.
_FORMATS: tuple[tuple[str, ToolFormat], ...] = (
    (r"\A(?!.*\[ARGS\]).*\[TOOL_CALLS\]", _MISTRAL),
    (r"\[TOOL_CALLS\].*\[ARGS\]", _MISTRAL_NAMED),
    (r"\A(?!.*```json).*<｜tool▁call▁begin｜>", _DEEPSEEK),
    (r"<\|tool_call_argument_begin\|>", _KIMI),
    (r"<\|tool_call\|>", _GRANITE),
    (r"\A(?=.*\"arguments\\?\").*<tool_call>", _HERMES),
    (r"\"name\\?\": .{0,80}?\"parameters\\?\": ", _LLAMA),
)
