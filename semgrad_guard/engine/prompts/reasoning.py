"""Thoughts that a model writes before its answer: by which marks, and where the answer begins behind them.

The marks (`marks.py`) are looked for in the model's tokens, and in the template's text after the last message, which
may have opened or closed a thought already. Never in the rest of the prompt: a user may type a mark, and it becomes the
same token. A mark that the tokenizer knows as one token is that token alone: a model that spells it in others quotes
it.

A thought counts where it begins the model's text. An answer with a mark in it has no score: what follows may be a
thought.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

from semgrad_guard.engine.prompts.marks import CHANNELS, FAMILIES, Marks
from semgrad_guard.errors import InputError

Span = tuple[int, int]


class Decode(Protocol):
    """Tokens to text."""

    def __call__(self, ids: Sequence[int], *, special: bool = False) -> str: ...


class Codec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text; where it names special tokens, these."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; special ones show only with `special`."""
        ...


_GLUED = re.compile(r"analysis(?=[A-Z])(.*?)(?:assistantfinal(.*)|\Z)", re.DOTALL)
"""The text of channels whose marks, special tokens all of them, were left out."""


_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "thinking_budget": (0, -1),
    "thinking_mode": ("disabled", "enabled"),
    "reasoning_effort": ("no_think", "high"),
}
"""How templates call their switch for thinking, and its values for off and on."""


@dataclass(frozen=True)
class Parts:
    """Spans [begin, end) of a text: its thoughts, and its answer; None where that had not begun."""

    thoughts: tuple[Span, ...]
    answer: Span | None


@dataclass(frozen=True)
class Reasoning:
    """A model's text before its answer. `ids` are all tokens before those of the answer, marks included.

    The thought itself are the tokens [begin, end) of these, its `span`. `why_unscored` is the reason why no answer can
    be scored given this thought, None where one can. `finished` is False where the answer had not begun.
    """

    text: str
    ids: tuple[int, ...] = ()
    span: Span = (0, 0)
    finished: bool = True
    why_unscored: str | None = None


UNKNOWN = "the answer follows on reasoning whose text is not known, and cannot be scored without it"
"""Why an answer has no score whose author keeps the thought."""
_CUT = "the answer was cut off within its reasoning, before it began; allow more tokens, or turn thinking off"
_ENDED = "the model ended within its reasoning, and wrote no answer; ask again, or turn thinking off"
_UNPLACED = "the answer follows on reasoning, which this model's chat template has no place for after this prompt"
_NESTED = "a mark of reasoning is inside the answer, so that what follows may be a thought, and no answer"


@dataclass(frozen=True)
class Thinking:
    """How a model thinks behind one prompt: its marks, and the last of them that the template wrote there."""

    marks: Marks
    header: Literal["none", "open", "closed", "answer"] = "none"
    tokens: tuple[tuple[str, int], ...] = ()
    """Marks, or parts of them, that the tokenizer knows as one token."""

    def seen(self, ids: Sequence[int], text: str, decode: Decode) -> str:
        """The text of tokens, with the marks blanked out that are spelled in other tokens than their own."""
        for mark, own in self.tokens:
            if text.count(mark) == ids.count(own):
                continue
            places = {len(decode(ids[:at], special=True)) for at, token in enumerate(ids) if token == own}
            found = re.split(f"({re.escape(mark)})", text)
            begins = [0, *accumulate(map(len, found))]
            text = "".join(
                "\0" * len(part) if part == mark and begin not in places else part
                for part, begin in zip(found, begins, strict=False)
            )
        return text

    def written(self, thought: str, answer: str) -> str | None:
        """A thought and its answer as the model writes them; None where the prompt has closed its thought."""
        if self.settled:
            return None
        opening = "" if self.header == "open" else f"{self.marks.open}{self.marks.gaps[0]}"
        return f"{opening}{thought}{self.marks.closing}{answer}"

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

    def is_open(self, seen: str) -> bool:
        """Whether a text that is being written ends within a thought."""
        parts = self.parts(seen)
        return parts.answer is None and bool(parts.thoughts) and parts.thoughts[-1][1] == len(seen)

    def begun(self, text: str, seen: str, certain: Callable[[str, Sequence[str]], int]) -> str:
        """The thought in a text that grows, as far as it is certain.

        `certain` tells how much of a text cannot become one of some marks; `seen` is the text for looking for marks.
        """
        spans = self.parts(seen).thoughts
        thoughts = [text[begin:end] for begin, end in spans]
        if self.is_open(seen):
            begin, marks = spans[-1][0], filter(None, (self.marks.close, self.marks.answer))
            thought = text[begin : begin + certain(seen[begin:], tuple(marks))].strip()
            thoughts[-1] = "" if self.marks.open.startswith(thought) else thought  # it may be the mark once more
        return _joined(thoughts)

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
    def ends(self) -> tuple[str, ...]:
        """The marks that may close an answer."""
        if self.marks.wrap:
            return (self.marks.wrap[1],)
        return (self.marks.close,) if self.marks.answer else ()

    def reasoning(self, text: str, seen: str, parts: Parts, *, cut: bool) -> Reasoning | None:
        """The thought in a text; None where it is empty, and an answer without marks follows.

        `seen` is the text for looking for marks. `cut`: a limit ended it.
        """
        thought = _joined(text[begin:end] for begin, end in parts.thoughts)
        if parts.answer is None:
            return Reasoning(thought, finished=False, why_unscored=_CUT if cut else _ENDED)
        answer = seen[slice(*parts.answer)]
        nested = any(mark in answer for mark in (self.marks.open, self.marks.close))
        return Reasoning(thought, why_unscored=_NESTED if nested else None) if thought or nested else None

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
        wrapped = marks.wrap and marks.wrap[0] and text.lstrip().startswith(marks.wrap[0])
        return Parts(tuple(thoughts), _unwrapped(text, at, marks.wrap) if thoughts or wrapped else (0, len(text)))

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


def thinking_of(tokenizer: Any, marks: Marks, header: str) -> Thinking:
    """How a model thinks behind a prompt that ends in `header`."""
    places = {header.rfind(marks.open): "open", header.rfind(marks.close): "closed"}
    if marks.answer:
        places[header.rfind(marks.answer)] = "answer"
    last: Any = places[max(places)] if max(places) >= 0 else "none"
    every = " ".join((marks.open, marks.close, marks.answer or "", *(marks.wrap or ())))
    known: dict[str, int] = tokenizer.get_added_vocab()
    return Thinking(marks, last, tuple((mark, own) for mark, own in known.items() if mark in every and mark.strip()))


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
        self.held = any(begun.startswith(marks.open) or marks.open.startswith(begun) for marks in FAMILIES)
        return "" if self.held else self._text


@dataclass(frozen=True)
class Foreign:
    """A text from elsewhere: its answer, its thought, and both as this model would have written them.

    `written` is None where the answer cannot be scored; the thought then has the reason.
    """

    answer: str
    reasoning: Reasoning | None
    written: str | None

    @classmethod
    def of(cls, text: str, thinking: Thinking | None, *, cut: bool = False, thought: str | None = None) -> Foreign:
        """`cut`: a limit ended the text. `thought` is its author's reasoning where the text does not hold it, "" where
        that is not known, None where there was none.

        Where the prompt opens a thought that the text does not close, its author has left the thought out.
        """
        if glued := _GLUED.match(text) if thinking is None or thinking.marks is CHANNELS else None:
            return cls._placed(thinking, glued[1].strip(), glued[2], cut=cut)
        if thinking is None:
            begun = text.lstrip()
            families = (marks for marks in FAMILIES if begun.startswith(marks.open) and marks.close in begun)
            if marks := next(families, None):  # of a whole thought, whatever the scorer's own template names
                (begin, end), *_ = (parts := Thinking(marks).parts(text)).thoughts
                return cls._placed(None, text[begin:end].strip(), text[slice(*(parts.answer or (0, 0)))], cut=cut)
        else:
            parts = thinking.parts(text, cut=cut)
            left_out = thinking.header == "open" and parts.answer is None and thinking.marks.open not in text
            reasoning = None if left_out else thinking.reasoning(text, text, parts, cut=cut)
            if reasoning is not None or (thought is None and not left_out):
                begin, end = parts.answer or (0, 0)
                unscored = reasoning is not None and reasoning.why_unscored
                return cls(text[begin:end], reasoning, None if unscored else text)
            thought = thought or ""
        return cls(text, None, text) if thought is None else cls._placed(thinking, thought, text, cut=cut)

    @classmethod
    def _placed(cls, thinking: Thinking | None, thought: str, answer: str | None, *, cut: bool) -> Foreign:
        """A thought and an answer without marks of their own."""
        if answer is None:
            return cls("", Reasoning(thought, finished=False, why_unscored=_CUT if cut else _ENDED), None)
        written = thinking.written(thought, answer) if thinking is not None and thought else None
        reason = None if written else _UNPLACED if thought else UNKNOWN
        return cls(answer, Reasoning(thought, why_unscored=reason), written)


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
    begin = up_to(answer[0], ids, decode)
    end = len(ids) if answer[1] >= len(text) else max(begin, up_to(answer[1], ids, decode))
    return AnswerTokens(begin, end, text[len(decode(ids[:begin], special=True)) : answer[0]].strip())


def up_to(place: int, ids: Sequence[int], decode: Decode) -> int:
    """The largest number of tokens whose text ends at a place or before it."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(decode(ids[:middle], special=True)) <= place else (low, middle - 1)
    return low


def _joined(thoughts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, (thought.strip() for thought in thoughts)))


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
