"""How families of models mark their thoughts and write their calls of tools, as data.

`responses.py` reads thoughts by it, and `tool_calls.py` calls, in every text: the model's own and those from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TAG = re.compile(r"[<\[◁][^<>\[\]\s]+[>\]▷]")


@dataclass(frozen=True)
class Marks:
    """The marks that open and close a thought.

    `answer` opens an answer, in families where it does not just follow the thought, and `turn` leads from a thought to
    it. `wrap` may enclose an answer. `unopened`: the template nowhere writes the opening mark: the model may leave it
    out. `gaps` are the white space behind the opening mark, and around the closing one, as the family writes them.
    """

    open: str
    close: str
    answer: str | None = None
    turn: str = ""
    wrap: tuple[str, str] | None = None
    unopened: bool = False
    gaps: tuple[str, str, str] = ("", "", "")

    @property
    def closing(self) -> str:
        """The text between a thought and its answer."""
        if self.answer:
            return self.close + self.turn + self.answer
        return f"{self.gaps[1]}{self.close}{self.gaps[2]}{self.wrap[0] if self.wrap else ''}"

    @property
    def first(self) -> str:
        """What a text with such marks begins with: channels open parts of other kinds as well."""
        tag = TAG.match(self.open) if self.answer else None
        return tag[0] if tag else self.open

    @property
    def every(self) -> tuple[str, ...]:
        """All these marks."""
        return tuple(filter(None, (self.open, self.close, self.answer, *(self.wrap or ()))))

    @property
    def pattern(self) -> str:
        """A pattern of those around thoughts, and before the answer of channels."""
        return "|".join(map(re.escape, filter(None, (self.open, self.close, self.answer))))

    @property
    def alone(self) -> str:
        """The mark that tells a thought whose opening mark was left out."""
        return self.answer or self.close


FAMILIES = (
    Marks(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        wrap=("", "[END FINAL RESPONSE]"),
        gaps=("\n", "\n", "\n"),
    ),
    Marks("<think>", "</think>", wrap=("<response>", "</response>"), gaps=("\n", "\n", "\n\n")),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>", wrap=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    Marks("<|channel>thought", "<channel|>", gaps=("\n", "", "")),
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    *(Marks(f"<{name}>", f"</{name}>") for name in ("thought", "thinking", "reasoning")),
    Marks("<|begin_of_thought|>", "<|end_of_thought|>", wrap=("<|begin_of_solution|>", "<|end_of_solution|>")),
    Marks("Here is my thought process:", "Here is my response:"),
)
CHANNELS = Marks(
    "<|channel|>analysis<|message|>", "<|end|>", answer="<|channel|>final<|message|>", turn="<|start|>assistant"
)
REGIONS = Marks(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    answer="<|open|>response<|sep|>",
    wrap=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
)
EVERY = (*FAMILIES, CHANNELS, REGIONS)

GLUED = re.compile(r"\s*(?:analysis)?(.*?)assistantfinal(.*)|\s*(?:analysis(?=[A-Z])|thought\n)(.*)", re.DOTALL)
"""A thought and the answer by channels whose marks, special tokens all of them, were left out."""
MARKED = re.compile(
    "|".join(re.escape(mark) for marks in EVERY for mark in (marks.first, marks.alone) if TAG.fullmatch(mark))
    + r"|[<◁][/|]{0,2}(?:[\w:.-]*[_:.-])?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)"
    + r"(?:[_:.-][\w:.-]*)?(?:\s[^<>]*)?[|]?[>▷]|assistantfinal",
    re.IGNORECASE,
)
"""A mark of a thought, of these families or of others that are like them."""


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


def _tagged(head: str, tail: str, tag: str) -> Mapping[str, Any]:
    """The response template of calls whose arguments are tags: one that is not closed cannot be read."""
    call = {
        "open_pattern": head,
        "close_pattern": f"(?P<closed>{tail})",
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag},
        "repeats": True,
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}, "closed": "{closed}"},
    }
    return {"start_anchor": "\0", "fields": {"content": {"repeats": True, "join": ""}, "tool_calls": call}}


_CODER = _tagged(
    r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>",
    r"</function>(?:\s*</tool_call>)?",
    r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>",
)
_GLM = _tagged(
    r"<tool_call>\s*(?P<name>[^\s<]+)",
    "</tool_call>",
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
)
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
    CallForm("<function=", parsed=_CODER),
    CallForm("<arg_key>", parsed=_GLM),
    CallForm(
        r"\A(?=.*\"arguments\\?\").*<tool_call>",
        "<tool_call>",
        tail=r"\s*(?:</tool_call>|\Z)",
        close="</tool_call>",
        around=("<tool_call>\n", "\n</tool_call>"),
    ),
    CallForm(r"\"name\\?\": .{0,80}?\"parameters\\?\": ", head=r"\s*(?:<\|python_tag\|>)?\s*", arguments="parameters"),
)
