"""Forms of answers: JSON of a schema, and tool calls as chat templates write them.

llguidance tells which tokens may come next in an answer that must have a form. Scores are made from the raw
distribution, as always: a form that the model would not have chosen looks uncertain.

Which form of calls a model uses is read off its template's text, by the table `CALL_FORMS`. A tokenizer that brings a
`response_template` of its own is read by transformers' parser instead, where the table knows no better.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response

from semgrad_guard.engine.prompts.thoughts import held
from semgrad_guard.errors import InputError, UnsupportedToolsError, require_installed
from semgrad_guard.records import ToolCall

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each JSON value: free white space lets a weak model write it forever."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """The grammar rule of a JSON value. Objects hold the schema's properties, unless it explicitly allows more."""
    return f"%json {json.dumps({**closed(schema), 'x-guidance': _STYLE})}"


def text_rule(text: str, special_tokens: Mapping[str, int]) -> str:
    """The rule of a fixed text; a special token in it is that token, not its letters."""
    marks = sorted(filter(None, special_tokens), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    rules = [f"<[{special_tokens[one]}]>" if one in special_tokens else json.dumps(one) for one in pieces if one]
    return " ".join(rules or ['""'])


def one_of(rules: Sequence[str]) -> str:
    """The grammar of an answer that follows one of these rules."""
    return "start: " + " | ".join(rules)


_KNOWN = 16
"""Grammars that are kept compiled: a request's is compiled in its caller's thread, and used in the model's."""


def closed(schema: Any) -> Any:
    """A JSON schema whose objects take no properties but the named ones, unless it allows others."""
    if isinstance(schema, list):
        return [closed(part) for part in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    rules = {key: closed(value) for key, value in cast("Mapping[str, Any]", schema).items()}
    if isinstance(rules.get("properties"), dict) and rules.get("type") == "object":
        rules.setdefault("additionalProperties", False)
    return rules


FORM_FIELDS = ("response_format", "tool_choice", "tools")
"""The options of a request that give its answer a form."""


class GrammarCompiler:
    """Turns grammars into logits processors for one tokenizer.

    Raises:
        MissingExtraError: llguidance is not installed.
        InputError: the tokenizer is a slow one, whose tokens llguidance cannot read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, end_tokens: tuple[int, ...]) -> None:
        require_installed("llguidance", extra="langchain")
        from llguidance.hf import from_tokenizer

        if not tokenizer.is_fast or not end_tokens:
            raise InputError(
                "answers of this model cannot be given a form: that takes a fast tokenizer and an end token. "
                "Leave tool_choice and response_format out."
            ).about(*FORM_FIELDS)
        self.end_tokens = end_tokens
        self._tokenizer: Any = from_tokenizer(cast("Any", tokenizer), eos_token=list(end_tokens))
        self.matcher = lru_cache(maxsize=_KNOWN)(self._matcher)

    def _matcher(self, grammar: str) -> Any:
        """llguidance's form of a grammar, to be copied for each answer.

        Raises:
            InputError: the grammar, which holds the caller's schema, cannot be followed.
        """
        from llguidance import LLMatcher

        matcher: Any = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            message = matcher.get_error().partition("\n")[0]
            raise InputError(f"no answer can be made to follow this schema: {message}").about(*FORM_FIELDS)
        return matcher

    def processor(self, grammar: str, *, width: int) -> GrammarProcessor:
        """A processor for the one answer to a prompt of `width` tokens.

        Raises:
            InputError: the grammar cannot be followed.
        """
        return GrammarProcessor(self.matcher(grammar).deep_copy(), width, self.end_tokens)


class GrammarProcessor(LogitsProcessor):
    """Forbids every token that would leave the grammar, in one row."""

    def __init__(self, matcher: Any, width: int, end_tokens: Sequence[int]) -> None:
        self._matcher, self._seen, self._end_tokens = matcher, width, list(end_tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        for token in input_ids[0, self._seen :].tolist():
            if not self._matcher.consume_token(token):
                # llguidance's own words hold the answer so far, which may be one that must be withheld.
                raise InputError(
                    "this model's tokens cannot follow this schema or call; leave its form to the model"
                ).about(*FORM_FIELDS)
        self._seen = input_ids.shape[1]
        if self._matcher.is_stopped():  # the grammar is complete: only an end may come
            allowed = torch.tensor(self._end_tokens, device=scores.device)
        else:
            bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            allowed = bias[: scores.shape[1]].nonzero().flatten().to(scores.device)
        return torch.full_like(scores, float("-inf")).index_copy(1, allowed, scores[:, allowed])


Tool = Mapping[str, Any]
"""A tool as transformers and OpenAI describe it: {"type": "function", "function": {"name", "parameters", ...}}."""


@dataclass(frozen=True)
class CallForm:
    """How a family of templates writes calls of tools; `template` is a pattern by which its templates are known.

    Each call begins with the text `open`; `head` is the pattern up to its JSON (by default that text), which holds the
    call's `name` where the JSON is that of the arguments alone, and `tail` is the pattern behind it. Without an `open`
    the answer is calls and nothing else, or an answer. `close` ends a call that cannot be read, and `frame` are marks
    around all calls. An answer that must be a call is its JSON `around`, by default behind `open`; `listed`: that JSON
    is a list of calls; `between`: the text between a name and its arguments.

    `parsed` is a response template of transformers, by whose parser calls are read that are written in no JSON; one
    that a tokenizer brings itself `reads_thoughts` as well.
    """

    template: str
    open: str = ""
    head: str = ""
    tail: str = r"\s*\Z"
    close: str = "\0"
    frame: tuple[str, ...] = ()
    around: tuple[str, str] | None = None
    arguments: str = "arguments"
    listed: bool = False
    between: str | None = None
    parsed: Mapping[str, Any] | None = field(default=None, hash=False)
    reads_thoughts: bool = False


def _tagged(template: str, head: str, tail: str, tag: str) -> CallForm:
    """The form of calls whose arguments are tags, which transformers' parser reads."""
    call = {
        "open_pattern": head,
        "close_pattern": tail,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag},
        "repeats": True,
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }
    fields = {"content": {"repeats": True, "join": ""}, "tool_calls": call}
    return CallForm(template, head=head, tail=tail, parsed={"start_anchor": "\0", "fields": fields})


# The most telling mark first. Relatives that write something else inside the same marks (DeepSeek V3 with ```json) are
# left out on purpose; so are gpt-oss's calls, which are channels besides the one of the answer.
CALL_FORMS = (
    CallForm(r"\A(?!.*\[ARGS\]).*\[TOOL_CALLS\]", "[TOOL_CALLS]", listed=True),
    CallForm(
        r"\[TOOL_CALLS\].*\[ARGS\]",
        "[TOOL_CALLS]",
        r"\[TOOL_CALLS\](?P<name>[^\[\]{}]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*",
        r"\s*(?=\[TOOL_CALLS\]|\Z)",
        between="[ARGS]",
    ),
    CallForm(
        r"\A(?!.*```json).*<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>",
        r"<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>\s*",
        r"\s*(?:<｜tool▁call▁end｜>\s*|\Z)",
        frame=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        around=("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        between="<｜tool▁sep｜>",
    ),
    CallForm(
        r"<\|tool_call_argument_begin\|>",
        "<|tool_call_begin|>",
        r"<\|tool_call_begin\|>\s*functions\.(?P<name>[^<:]+):\d+\s*<\|tool_call_argument_begin\|>\s*",
        r"\s*(?:<\|tool_call_end\|>\s*|\Z)",
        frame=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        around=(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        between=":0<|tool_call_argument_begin|>",
    ),
    CallForm(r"<\|tool_call\|>", "<|tool_call|>", tail=r"\s*(?:<\|/tool_call\|>\s*)?\Z", listed=True),
    _tagged(
        "<function=",
        r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>",
        r"</function>(?:\s*</tool_call>)?",
        r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    _tagged(
        "<arg_key>",
        r"<tool_call>\s*(?P<name>[^\s<]+)",
        "</tool_call>",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    CallForm(
        r"\A(?=.*\"arguments\\?\").*<tool_call>",
        "<tool_call>",
        tail=r"\s*(?:</tool_call>|\Z)",
        close="</tool_call>",
        around=("<tool_call>\n", "\n</tool_call>"),
    ),
    CallForm(r"\"name\\?\": .{0,80}?\"parameters\\?\": ", head=r"\s*(?:<\|python_tag\|>)?\s*", arguments="parameters"),
)


@dataclass(frozen=True)
class ToolAnswer:
    """An answer taken apart: its text, its calls, and calls that cannot be parsed, as they were written."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


def known_form(template: str) -> CallForm | None:
    """The form in which a template writes calls, None if the table does not hold it."""
    if not re.search(r"\btools\b", template):
        return None
    return next((form for form in CALL_FORMS if re.search(form.template, template, re.DOTALL)), None)


def call_form(tokenizer: Any, template: str | None) -> CallForm:
    """The form in which a model writes its calls.

    Raises:
        UnsupportedToolsError: its template knows no tools, or writes calls in a form that is not known here.
    """
    form = known_form(template or "")
    if form is not None:
        return form
    if not re.search(r"\btools\b", template or ""):
        raise UnsupportedToolsError("this model's chat template knows no tools").about(
            *UnsupportedToolsError.fields,
            advice="use a model that was trained to call them, or give its template by "
            'template_options={"chat_template": ...}',
        )
    own = getattr(tokenizer, "response_template", None)
    if own is None:
        raise UnsupportedToolsError(
            "this model's chat template writes tool calls in a form that is not known here, and its tokenizer brings "
            "no response_template to read them by"
        ).about(*UnsupportedToolsError.fields, advice="set tokenizer.response_template")
    return CallForm("", parsed=own, reads_thoughts=True)


def calls_in(form: CallForm, text: str, *, prompt: str = "", tools: Sequence[Tool] = ()) -> ToolAnswer:
    """The calls in an answer, special tokens and all.

    With a form that `reads_thoughts` the text includes those before the answer. `prompt` and `tools` are for
    transformers' parser, which gives up an answer as a whole: one that it cannot read is one broken call.
    """
    if form.parsed is not None:
        try:
            begun, ended = (len(re.findall(mark, text)) for mark in (form.head or "\0", form.tail))
            if begun > ended:  # the parser would take what there is of it
                raise ValueError("a call is not closed")
            message = parse_response(text, dict(form.parsed), prefix=prompt, tools=[dict(tool) for tool in tools])
            found = tuple(_as_call(call) for call in message.get("tool_calls") or ())
        except (ValueError, KeyError, TypeError):
            return ToolAnswer("", (), (text,))
        return ToolAnswer(str(message.get("content") or ""), found) if found else ToolAnswer(text)
    texts, calls, broken, at = [""], list[ToolCall](), list[str](), 0
    while at < len(text) and (begin := text.find(form.open, at)) >= 0:
        texts.append(text[at:begin])
        try:
            found, at = _read(form, text, begin)
            calls += found
        except (ValueError, KeyError, TypeError):
            if not form.open:
                return ToolAnswer(text)
            end = text.find(form.close, begin)
            at = len(text) if end < 0 else end + len(form.close)
            broken.append(text[begin:at].strip())
    if not calls and not broken:
        return ToolAnswer(text)
    left = "".join([*texts, text[at:]])
    for mark in form.frame:
        left = left.replace(mark, "")
    return ToolAnswer(left.rstrip(), tuple(calls), tuple(broken))


def _read(form: CallForm, text: str, at: int) -> tuple[list[ToolCall], int]:
    """The calls that begin at a place of a text, and where they end; ValueError, KeyError or TypeError if none do."""
    pattern, decoder, values = form.head or rf"{re.escape(form.open)}\s*", json.JSONDecoder(), list[Any]()
    head = re.compile(pattern).match(text, at)
    if head is None:
        raise ValueError("a call begins otherwise")
    at, name = head.end(), head.groupdict().get("name")
    while not values or (name is None and text[at : at + 1] in ("{", "[")):
        value, at = decoder.raw_decode(text, at)
        values += value if isinstance(value, list) and name is None else [value]
        at = len(text) - len(text[at:].lstrip(";\n\t "))
    tail = re.compile(form.tail).match(text, at)
    if tail is None or not values:
        raise ValueError("a call ends otherwise")
    calls = values if name is None else [{"name": name.strip(), "arguments": values[0]}]
    return [_as_call(call) for call in calls], tail.end()


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


def shown_text(form: CallForm, text: str) -> int:
    """How much of a growing answer cannot be part of a call, so that a stream may show it already.

    Special tokens are not in this text, so an answer that begins like JSON may be a call in any form. Where a name
    comes first, any text may be one.
    """
    if form.parsed is not None or form.between is not None or not text.strip() or text.lstrip()[0] in "[{":
        return 0
    before, mark, _ = text.partition(form.open or "<tool_call>")
    return len((before if mark else text[: held(text, (form.open or "<tool_call>",))]).rstrip())


def call_rule(form: CallForm, tools: Sequence[Tool], special_tokens: Mapping[str, int]) -> str:
    """The grammar rule of an answer that is exactly one call of one of these tools.

    Raises:
        InputError: answers in this form cannot be constrained.
    """
    if form.parsed is not None:
        raise InputError("a tool call cannot be forced in this model's form; leave tool_choice out").about(
            "tool_choice"
        )
    named = [(tool["function"]["name"], tool["function"].get("parameters") or _NO_PARAMETERS) for tool in tools]
    before, after = form.around or (form.open, "")
    end = text_rule(after, special_tokens)
    if form.between is not None:
        rules = (
            f"{text_rule(f'{before}{name}{form.between}', special_tokens)} {json_rule(parameters)} {end}"
            for name, parameters in named
        )
        return f"({' | '.join(rules)})"
    place = "#/items/anyOf" if form.listed else "#/anyOf"
    calls: list[dict[str, Any]] = []
    for number, (name, parameters) in enumerate(named):
        moved = _moved(parameters, f"{place}/{number}/properties/{form.arguments}")
        properties = {"name": {"const": name}, form.arguments: moved}
        calls.append({"type": "object", "properties": properties, "required": list(properties)})
    schema: dict[str, Any] = {"anyOf": calls}
    if form.listed:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    return f"({text_rule(before, special_tokens)} {json_rule(schema)} {end})"


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
