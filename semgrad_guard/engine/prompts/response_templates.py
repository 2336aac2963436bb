"""How families of models mark their thoughts, as data by which `responses.py` reads every text; which of them a chat
template writes, and the option that turns thinking on or off.

Its marks are those of the tokenizer's `response_template`, else those that the template writes around the thought of an
earlier turn, else those of a known family that its text names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from semgrad_guard.errors import InputError

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
_ALONE = [*(mark for marks in EVERY for mark in (marks.first, marks.alone)), "<|begin_of_solution|>", "<|message|>"]
MARKED = re.compile(
    "|".join(re.escape(mark) for mark in _ALONE if mark[0] in "<[◁")
    + r"|(?:[<◁＜]|&lt;)[/|｜]{0,2}(?:[\w:.-]*[_:.-])?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)"
    + r"(?:[_:.-][\w:.-]*)?(?:\s[^<>]*)?[|｜]?(?:[>▷＞]|&gt;)|assistantfinal",
    re.IGNORECASE,
)
"""A mark of a thought, of these families or of others that are like them, also in HTML or in wide characters."""

# An ArithmeticError is a range that Jinja's sandbox finds too long.
_REFUSALS = (TemplateError, ValueError, TypeError, LookupError, AttributeError)
TEMPLATE_FAILURES = (*_REFUSALS, ArithmeticError, RecursionError, MemoryError)
"""How the rendering of a chat template may fail."""
_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""How templates call the field of a thought."""


@lru_cache(maxsize=64)
def marks_of(template: str, response: str) -> Marks | None:
    """The marks of a model's thoughts; None where they are not known. `response` is its response template as JSON."""
    if declared := _declared(json.loads(response)):
        return declared
    # Families whose marks also open calls and parts of other kinds; some put them together by macros.
    if "<|channel|>" in template and "<|message|>" in template:
        return CHANNELS
    if "<|open|>" in template and "<|sep|>" in template:
        return REGIONS
    return _shown(template) or _named(template)


def _declared(response: Any) -> Marks | None:
    """The literals of the tokenizer's own response template."""
    fields = (response or {}).get("fields", {})
    thought = next((fields[name] for name in _FIELDS if name in fields), {})
    if not all(isinstance(thought.get(side), str) for side in ("open", "close")):
        return None
    content = fields.get("content", {})
    answer, end = (content.get(side) if isinstance(content.get(side), str) else None for side in ("open", "close"))
    return Marks(thought["open"], thought["close"], answer, wrap=(answer, end) if answer and end else None)


def _named(template: str) -> Marks | None:
    """The marks of a family that a template's text names."""
    for marks in FAMILIES:
        if marks.close in template:
            wrap = marks.wrap if marks.wrap and marks.wrap[0] in template else None
            return replace(marks, wrap=wrap, unopened=marks.open not in template)
    return None


_THOUGHT, _ANSWER = "A thought that no template holds.", "An answer that no template holds."


def _shown(template: str) -> Marks | None:
    """The marks that a template writes around the thought of an earlier turn; None where it writes none."""
    if not any(field in template for field in _FIELDS):
        return None
    asking = {"role": "user", "content": "Hi"}
    answer_turn = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(_FIELDS, _THOUGHT)}
    try:
        (prompt,), _ = render_jinja_template([[asking]], chat_template=template, add_generation_prompt=True)
        (history,), _ = render_jinja_template([[asking, answer_turn]], chat_template=template)
    except TEMPLATE_FAILURES:
        return None  # it takes no such message, or needs more
    before, _, rest = history.partition(_THOUGHT)
    between, answered, after = rest.partition(_ANSWER)
    closing = TAG.match(between.strip())
    if not answered or not closing:
        return None
    shared = next((at for at, pair in enumerate(zip(prompt, before, strict=False)) if len({*pair}) > 1), len(prompt))
    opening = before[shared:].rstrip()
    if not _last_mark(opening):  # the prompt has opened the thought, or an empty one
        opening = _last_mark(before) if before == prompt or prompt.rstrip().endswith(closing[0]) else ""
    if not opening:
        return None
    behind = between.strip()[closing.end() :].strip()
    if not behind:
        left, right = between.split(closing[0], 1)
        return Marks(opening.lstrip(), closing[0], gaps=(before[len(before.rstrip()) :], left, right))
    turn = next((behind[:size] for size in range(len(behind), 0, -1) if prompt.endswith(behind[:size])), "")
    answer, end = behind.removeprefix(turn), TAG.match(after.strip())
    return Marks(opening, closing[0], answer, turn=turn, wrap=(answer, end[0]) if end else None)


def _last_mark(text: str) -> str:
    """The mark with which a text ends; "" if there is none."""
    found = re.search(rf"{TAG.pattern}\s*\Z", text)
    return found[0].strip() if found else ""


_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "thinking_budget": (0, -1),
    "thinking_mode": ("disabled", "enabled"),
    "reasoning_effort": ("no_think", "high"),
}
"""How templates call their switch for thinking, and its values for off and on."""


def switch_of(template: str, render: Callable[..., str], *, on: bool, thinks: bool) -> dict[str, Any]:
    """The option by which a chat template turns thinking on or off; none where its model thinks in any case.

    `render` makes a prompt with the template's options; `thinks`: its marks of thoughts are known.

    Raises:
        InputError: the template has no such option.
    """
    for name, values in _SWITCHES.items():
        named = all(value in template for value in values if isinstance(value, str))
        if named and has_option(render, name, values):
            return {name: values[on]}
    if on and thinks:
        return {}
    raise InputError(f"this model's chat template has no switch that turns thinking {'on' if on else 'off'}").about(
        "chat_template_kwargs",
        "reasoning_effort",
        advice="leave thinking at auto, or name the template's own option: --template-option, template_options={...}",
    )


def has_option(render: Callable[..., str], name: str, values: tuple[Any, Any]) -> bool:
    """Whether an option changes prompts: a template may use its name for something else."""
    return len({render(**{name: value}) for value in values}) == 2
