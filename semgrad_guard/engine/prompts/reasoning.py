"""Thoughts that a model writes before its answer: by which marks, and where the answer begins behind them.

The marks are those of the tokenizer's `response_template`, else those that the chat template's text names. They are
looked for in the model's text, and in the template's text after the last message, which may have opened or
closed a thought already. Never in the rest of the prompt: a user may type a mark, and it becomes the same token.

A thought counts where it begins the model's text. A mark inside an answer is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

Span = tuple[int, int]

_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""How response templates call the field of a thought."""


class Decode(Protocol):
    """Tokens to text."""

    def __call__(self, ids: Sequence[int], *, special: bool = False) -> str: ...


@dataclass(frozen=True)
class Marks:
    """The marks that open and close a thought.

    `answer` opens an answer, in families where it does not just follow the thought; `region` then opens any part,
    calls of tools among them. `wrap` may enclose an answer. `unopened`: the template nowhere writes the
    opening mark: the model may leave it out.
    """

    open: str
    close: str
    answer: str | None = None
    region: str = ""
    wrap: tuple[str, str] | None = None
    unopened: bool = False


_RESPONSE = ("<response>", "</response>")
_PAIRS = (
    Marks("<think>", "</think>", wrap=_RESPONSE),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|channel>thought", "<channel|>"),
    Marks("<thought>", "</thought>"),
    Marks("<thinking>", "</thinking>"),
    Marks("<reasoning>", "</reasoning>"),
    Marks("<|begin_of_thought|>", "<|end_of_thought|>", wrap=("<|begin_of_solution|>", "<|end_of_solution|>")),
    Marks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", wrap=("", "[END FINAL RESPONSE]")),
    Marks("Here is my thought process:", "Here is my response:"),
)
_CHANNELS = Marks(
    "<|channel|>analysis<|message|>", "<|end|>", answer="<|channel|>final<|message|>", region="<|channel|>"
)

_GLUED = re.compile(r"analysis(?=[A-Z])(.*?)(?:assistantfinal(.*)|\Z)", re.DOTALL)
"""The text of channels whose marks, special tokens all of them, were left out."""

_SWITCH = "enable_thinking"


@dataclass(frozen=True)
class Parts:
    """Spans [begin, end) of a text: its thoughts, and its answer; None where that had not begun."""

    thoughts: tuple[Span, ...]
    answer: Span | None


@dataclass(frozen=True)
class Reasoning:
    """A model's text before its answer. `ids` are all tokens before those of the answer, marks included.

    `finished` is False where the answer had not begun. `switch`: the chat template can turn thinking off.
    """

    text: str
    ids: tuple[int, ...] = ()
    finished: bool = True
    switch: bool = False

    @property
    def why_unscored(self) -> str:
        """Why an answer after a thought has no score, with advice."""
        return why_unscored(finished=self.finished, switch=self.switch)


def why_unscored(*, finished: bool = True, switch: bool = False) -> str:
    """Why an answer after reasoning has no score, with advice, in words."""
    reason = "the answer follows on reasoning, which is no part of its text, and such answers are not scored yet"
    if not finished:
        reason = "the answer was cut off within its reasoning, before it began; allow more tokens"
    if switch:
        return (
            f'{reason}; turn thinking off: template_options={{"{_SWITCH}": False}}, --template-option {_SWITCH}=false'
        )
    return f"{reason}; turn thinking off where the model has a switch for it, or use one that does not think"


@dataclass(frozen=True)
class Thinking:
    """How a model thinks behind one prompt: its marks, and the last of them that the template wrote there."""

    marks: Marks
    header: Literal["none", "open", "closed", "answer"] = "none"
    switch: bool = False

    def parts(self, text: str, *, cut: bool = False) -> Parts:
        """The parts of a written text, special tokens shown; `cut`: a limit ended it."""
        found = self._regions(text) if self.marks.answer else self._pair(text)
        if found.thoughts or found.answer != (0, len(text)) or not cut or self.settled:
            return found
        begun = text.strip()
        if self.marks.unopened or (begun and (self.marks.region or self.marks.open).startswith(begun)):
            return Parts(((0, len(text)),), None)
        return found

    @property
    def settled(self) -> bool:
        """Whether the prompt ends behind a thought, or in an answer: the answer begins at once."""
        return self.header in ("closed", "answer")

    def begins(self, text: str) -> int | None:
        """Where the answer begins in a text that grows; None while that is not certain."""
        found, marks = self.parts(text), self.marks
        if found.answer is None:
            return None
        rest = text[found.answer[0] :].lstrip()
        likely = (marks.open, *(filter(None, marks.wrap or ())))
        if not rest or any(mark.startswith(rest) for mark in likely):
            return None
        settled = bool(found.answer[0]) or self.settled  # else a closing mark may still come
        return found.answer[0] if settled else None

    @property
    def borders(self) -> tuple[str, ...]:
        """The marks behind which an answer may begin."""
        return tuple(filter(None, (self.marks.close, self.marks.answer, *(self.marks.wrap or ()))))

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks that may close an answer."""
        if self.marks.wrap:
            return (self.marks.wrap[1],)
        return (self.marks.close,) if self.marks.answer else ()

    def reasoning(self, text: str, parts: Parts) -> Reasoning | None:
        """The thought in a text; None where it is empty and an answer follows."""
        thought = "\n\n".join(filter(None, (text[begin:end].strip() for begin, end in parts.thoughts)))
        if parts.answer is not None and not thought:
            return None
        return Reasoning(thought, finished=parts.answer is not None, switch=self.switch)

    def _pair(self, text: str) -> Parts:
        marks, at, inside = self.marks, 0, self.header == "open"
        thoughts: list[Span] = []
        while True:
            begun = len(text) - len(text[at:].lstrip())
            if text.startswith(marks.open, begun):  # some write it although the prompt has opened a thought
                inside, at = True, begun + len(marks.open)
            if not inside:
                break
            end = text.find(marks.close, at)
            if end < 0:
                return Parts((*thoughts, (at, len(text))), None)
            thoughts.append((at, end))
            at, inside = end + len(marks.close), False
        if not thoughts and self.header != "closed":
            end = text.find(marks.close)
            if end >= 0 and marks.open not in text[:end]:  # the opening mark was left out
                thoughts, at = [(0, end)], end + len(marks.close)
        return Parts(tuple(thoughts), _unwrapped(text, at, marks.wrap) if thoughts else (0, len(text)))

    def _regions(self, text: str) -> Parts:
        marks = self.marks
        mark, region = marks.answer or "", marks.region or marks.open
        (end,) = self.ends
        if self.header == "answer":
            return Parts((), _until(text, 0, end))
        begin = text.find(mark)
        if begin < 0 and region not in text and self.header != "open":
            return Parts((), (0, len(text)))
        before = text if begin < 0 else text[:begin]
        thoughts: list[Span] = []
        at = 0 if self.header == "open" else _behind(before, marks.open, 0)
        while at is not None:
            thoughts.append(_until(before, at, marks.close))
            at = _behind(before, marks.open, thoughts[-1][1])
        if begin < 0:
            return Parts(tuple(thoughts), None)
        if not thoughts and region in before:  # a call, or a part of another kind
            thoughts = [(0, begin)]
        return Parts(tuple(thoughts), _until(text, _next_word(text, begin + len(mark)), end))


def thinking_of(tokenizer: Any, template: str, header: str) -> Thinking | None:
    """How a model thinks behind a prompt that ends in `header`; None where its marks are not known."""
    marks = _declared(tokenizer) or _named(template)
    if marks is None:
        return None
    places = {header.rfind(marks.open): "open", header.rfind(marks.close): "closed"}
    if marks.answer:
        places[header.rfind(marks.answer)] = "answer"
    last: Any = places[max(places)] if max(places) >= 0 else "none"
    return Thinking(marks, last, _SWITCH in template)


def has_marks(tokenizer: Any, template: str) -> bool:
    """Whether it is known how a model marks its thoughts."""
    return (_declared(tokenizer) or _named(template)) is not None


def _declared(tokenizer: Any) -> Marks | None:
    """The literals of the tokenizer's own response template."""
    fields = (getattr(tokenizer, "response_template", None) or {}).get("fields", {})
    thought = next((fields[name] for name in _FIELDS if name in fields), {})
    if not all(isinstance(thought.get(side), str) for side in ("open", "close")):
        return None
    content = fields.get("content", {})
    answer, end = (content.get(side) if isinstance(content.get(side), str) else None for side in ("open", "close"))
    return Marks(thought["open"], thought["close"], answer, wrap=(answer, end) if answer and end else None)


@lru_cache(maxsize=64)
def _named(template: str) -> Marks | None:
    """The marks that a template's text names."""
    if "<|channel|>" in template and "<|message|>" in template:
        return _CHANNELS
    for marks in _PAIRS:
        if marks.close in template:
            wrap = marks.wrap if marks.wrap and marks.wrap[0] in template else None
            return Marks(marks.open, marks.close, wrap=wrap, unopened=marks.open not in template)
    return None


class HeldText:
    """A text that comes in pieces from elsewhere, held back while it begins with a known mark, or may turn out to."""

    def __init__(self) -> None:
        self._text = ""
        self.held = True

    def add(self, piece: str) -> str:
        """As much of the text as may be shown with one more piece."""
        if not self.held:
            return piece
        self._text += piece
        begun = self._text.lstrip()
        self.held = any(begun.startswith(marks.open) or marks.open.startswith(begun) for marks in _PAIRS)
        return "" if self.held else self._text


def taken_apart(text: str, thinking: Thinking | None, *, cut: bool, reasoned: bool) -> tuple[str, Reasoning | None]:
    """A text from elsewhere as its answer, and the reasoning that the answer follows on.

    `cut`: a limit ended it. `reasoned`: its author wrote reasoning that the text does not hold. Where the
    prompt opens a thought that the text does not close, its author has left the thought out.
    """
    if glued := _GLUED.match(text) if thinking is None or thinking.marks is _CHANNELS else None:
        thought, answer = glued.groups()
        return answer or "", Reasoning(thought.strip(), finished=answer is not None)
    thinking = thinking or _written_out(text)
    if thinking is None:
        return text, Reasoning("") if reasoned else None
    parts = thinking.parts(text, cut=cut)
    if thinking.header == "open" and parts.answer is None and thinking.marks.open not in text:
        return text, Reasoning("", switch=thinking.switch)
    reasoning = thinking.reasoning(text, parts)
    begin, end = parts.answer or (0, 0)
    return text[begin:end], reasoning or (Reasoning("", switch=thinking.switch) if reasoned else None)


def _written_out(text: str) -> Thinking | None:
    """The marks of a whole thought with which a text begins, whatever the scorer's own template names."""
    begun = text.lstrip()
    found = (marks for marks in _PAIRS if begun.startswith(marks.open) and marks.close in begun)
    return next((Thinking(marks) for marks in found), None)


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens [begin, end) that carry an answer. The first of them may begin with `glued`, the end of a mark."""

    begin: int
    end: int
    glued: str = ""

    def clean(self, text: str) -> str:
        """The text of these tokens without the white space, and the piece of a mark, before it."""
        return text.lstrip().removeprefix(self.glued).lstrip()


def answer_tokens(ids: Sequence[int], text: str, answer: Span, decode: Decode) -> AnswerTokens:
    """The tokens of an answer; `text` is that of all `ids`, special tokens shown."""

    def up_to(place: int) -> int:
        """The largest number of tokens whose text ends there or before."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(decode(ids[:middle], special=True)) <= place else (low, middle - 1)
        return low

    begin = up_to(answer[0])
    end = len(ids) if answer[1] >= len(text) else max(begin, up_to(answer[1]))
    return AnswerTokens(begin, end, text[len(decode(ids[:begin], special=True)) : answer[0]].strip())


def _unwrapped(text: str, at: int, wrap: tuple[str, str] | None) -> Span:
    begin = _next_word(text, at)
    if wrap is None or not text.startswith(wrap[0], begin):
        return begin, len(text)
    return _until(text, _next_word(text, begin + len(wrap[0])), wrap[1])


def _next_word(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _until(text: str, begin: int, mark: str) -> Span:
    end = text.find(mark, begin)
    return begin, len(text) if end < 0 else end


def _behind(text: str, mark: str, begin: int) -> int | None:
    place = text.find(mark, begin)
    return None if place < 0 else place + len(mark)
