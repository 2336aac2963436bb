"""Thoughts that a model writes before its answer: by which marks, and where the answer begins behind them.

The marks (`response_templates.py`) are looked for in the model's tokens, and in the template's text after the last
message, which may have opened or closed a thought already. Never in the rest of the prompt: a user may type a mark. One
that the tokenizer knows as one token is that token alone: a model that spells it in others quotes it.

A text is read by the marks of its prompt, else by those of the family whose thought it begins with. An answer with a
mark in it has no score: what follows may be a thought.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from semgrad_guard.engine.prompts.response_templates import CHANNELS, EVERY, GLUED, MARKED, Marks

Span = tuple[int, int]


class Decode(Protocol):
    """Tokens to text."""

    def __call__(self, ids: Sequence[int], *, special: bool = False) -> str: ...


class Codec:
    """Text to the tokens of a tokenizer of transformers, and back."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a piece of text, without the special tokens that the tokenizer would add."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of response tokens, white space as it is; special tokens show only with `special`."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class Parts:
    """Spans [begin, end) of a text: its thoughts, and its answer; None where that had not begun."""

    thoughts: tuple[Span, ...]
    answer: Span | None


@dataclass(frozen=True)
class Reasoning:
    """A model's text before its answer. `ids` are all tokens before those of the answer, marks included.

    The thought itself are the tokens [begin, end) of these, its `span`. `why_unscored` is the reason why no answer can
    be scored given this thought, None where one can.
    """

    text: str
    ids: tuple[int, ...] = ()
    span: Span = (0, 0)
    why_unscored: str | None = None


UNKNOWN = "the answer follows on reasoning whose text is not known, and cannot be scored without it"
"""Why an answer has no score whose author keeps the thought."""
_CUT = "the answer was cut off within its reasoning, before it began; allow more tokens, or turn thinking off"
_ENDED = "the model ended within its reasoning, and wrote no answer; ask again, or turn thinking off"
_UNPLACED = "the answer follows on reasoning, which this model's chat template has no place for after this prompt"
_NESTED = "a mark of reasoning is inside the answer, so that what follows may be a thought, and no answer"


@dataclass(frozen=True)
class Thinking:
    """How a text tells thoughts from its answer: by which marks, and the last of them that its prompt wrote."""

    marks: Marks
    header: Literal["none", "open", "closed", "answer"] = "none"
    tokens: tuple[tuple[str, int], ...] = ()
    """Marks, or parts of them, that the tokenizer knows as one token."""

    @classmethod
    def behind(cls, header: str, marks: Marks, known: Mapping[str, int]) -> Thinking:
        """How a model thinks behind a prompt that ends in `header`; `known` are the tokens added to its vocabulary."""
        places = {header.rfind(marks.open): "open", header.rfind(marks.close): "closed"}
        if marks.answer:
            places[header.rfind(marks.answer)] = "answer"
        last: Any = places[max(places)] if max(places) >= 0 else "none"
        every = " ".join((marks.open, marks.close, marks.answer or "", *(marks.wrap or ())))
        return cls(marks, last, tuple((mark, own) for mark, own in known.items() if mark in every and mark.strip()))

    def seen(self, ids: Sequence[int], text: str, decode: Decode) -> str:
        """The text of tokens, with the marks blanked out that are spelled in other tokens than their own."""
        for mark, own in self.tokens:
            if text.count(mark) == ids.count(own):
                continue
            places = {len(decode(ids[:at], special=True)) for at, token in enumerate(ids) if token == own}
            for place in {one.start() for one in re.finditer(re.escape(mark), text)} - places:
                text = text[:place] + "\0" * len(mark) + text[place + len(mark) :]
        return text

    def written(self, thought: str, answer: str) -> str | None:
        """A thought and its answer as the model writes them; None where the prompt has closed its thought."""
        if self.settled:
            return None
        before = "" if self.header == "open" else self.marks.open + self.marks.gaps[0]
        return before + thought + self.marks.closing + answer

    def parts(self, text: str, *, cut: bool = False) -> Parts:
        """The parts of a written text, special tokens shown; `cut`: a limit ended it."""
        marks, (thoughts, at) = self.marks, self._thoughts(text)
        if at is None:
            return Parts(thoughts, None)
        opened, end = marks.wrap or ("", "")
        if not at and self.header != "answer" and not (opened and text.lstrip().startswith(opened)):
            begins = marks.unopened or (text.strip() and marks.first.startswith(text.strip()))
            is_thought = cut and begins and not self.settled
            return Parts(((0, len(text)),), None) if is_thought else Parts((), (0, len(text)))
        begin = _next_word(text, at)
        if marks.answer:
            (end,) = self.ends
        elif text.startswith(opened, begin):
            begin = _next_word(text, begin + len(opened))
        else:
            end = ""
        place = text.find(end, begin) if end else -1
        return Parts(thoughts, (begin, len(text) if place < 0 else place))

    def _thoughts(self, text: str) -> tuple[tuple[Span, ...], int | None]:
        """The thoughts in a text, and where they have ended; None: they have not, or another part has begun.

        A thought begins the text, or follows on another one; in channels it is in any part before the answer's.
        """
        if self.header == "answer":
            return (), 0
        marks, thoughts, at = self.marks, list[Span](), 0
        begun = 0 if self.header == "open" else None  # where the thought begins that has not ended
        for mark in re.finditer(marks.pattern, text):
            here, before = mark.start(), text[begun or at : mark.start()].strip()
            if mark[0] == marks.answer:
                if begun is not None or (not thoughts and before not in ("", marks.turn)):  # or a part of another kind
                    end = text.find(marks.close, begun or 0, here)
                    thoughts.append((begun or 0, here if end < 0 else end))
                return tuple(thoughts), mark.end()
            if begun is not None and mark[0] == marks.close:
                thoughts.append((begun, here))
                begun, at = None, mark.end()
            elif mark[0] == marks.open and (not before or (begun is None and marks.answer)):
                begun = mark.end()  # some write it although the prompt has opened a thought
            elif begun is None and not marks.answer:
                if mark[0] == marks.open or thoughts or self.header == "closed":
                    break
                thoughts, at = [(0, here)], mark.end()  # the opening mark was left out
        if begun is not None:
            return (*thoughts, (begun, len(text))), None
        return tuple(thoughts), None if marks.answer and (thoughts or marks.first in text) else at

    @property
    def settled(self) -> bool:
        """Whether the prompt ends behind a thought, or in an answer: the answer begins at once."""
        return self.header in ("closed", "answer")

    def is_open(self, seen: str) -> bool:
        """Whether a text that is being written ends within a thought."""
        parts = self.parts(seen)
        return parts.answer is None and bool(parts.thoughts) and parts.thoughts[-1][1] == len(seen)

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks that may close an answer."""
        return self.marks.wrap[1:] if self.marks.wrap else (self.marks.close,) if self.marks.answer else ()


def read(text: str, own: Thinking | None, *, cut: bool = False, foreign: bool = False) -> tuple[Thinking | None, Parts]:
    """The parts of a text, and by which marks: those of its prompt, `own`, else those of the family that it shows.

    `cut`: a limit ended it. In a `foreign` text a closing mark alone tells a thought, too; a text of the model itself
    may have been shown by then.
    """
    whole = (0, len(text))
    found = Parts((), whole) if own is None else own.parts(text, cut=cut)
    is_own = own is not None and (found.answer != whole or (own.settled and not foreign))
    if is_own and not (foreign and _is_left_out(text, own, found)):
        return own, found
    marks = opening(text) or (_closing(text) if foreign else None)
    if marks is None and cut and text.strip()[:1] in ("<", "[", "◁"):
        marks = next((marks for marks in EVERY if marks.first.startswith(text.strip())), None)
    if marks is None:
        return own, found
    return (by := Thinking(marks)), by.parts(text, cut=cut)


def reasoning_of(text: str, seen: str, parts: Parts, known: Iterable[Any], *, cut: bool) -> Reasoning | None:
    """The thought in a text; None where it is empty, and an answer without marks follows.

    `seen` is the text for looking for marks, the `known` ones and all that are like those of a family. `cut`: a limit
    ended it.
    """
    thought = joined(text[begin:end] for begin, end in parts.thoughts)
    if parts.answer is None:
        return Reasoning(thought, why_unscored=_CUT if cut else _ENDED)
    answer = seen[slice(*parts.answer)]
    marks = (mark for by in known if by for mark in (by.marks.open, by.marks.close))
    nested = MARKED.search(answer) or any(mark in answer for mark in marks)
    return Reasoning(thought, why_unscored=_NESTED if nested else None) if thought or nested else None


def opening(text: str) -> Marks | None:
    """The family with whose first mark a text begins."""
    begun = text.lstrip().removeprefix(CHANNELS.turn)
    return next((marks for marks in EVERY if begun.startswith(marks.first)), None)


def may_open(text: str) -> bool:
    """Whether a text that grows may turn out to begin with the first mark of a family."""
    begun = text.lstrip()
    return any(first.startswith(begun) for first in _FIRST)


_FIRST = (*(marks.first for marks in EVERY), CHANNELS.turn, "analysis", "thought\n")


def _closing(text: str) -> Marks | None:
    """The family whose mark comes first in a text that lacks the opening one."""
    return min((marks for marks in EVERY if marks.alone in text), key=lambda one: text.find(one.alone), default=None)


def _is_left_out(text: str, own: Thinking | None, found: Parts) -> bool:
    """Whether the author of a text has left out the thought that the prompt opens."""
    return own is not None and own.header == "open" and found.answer is None and own.marks.open not in text


class HeldText:
    """A text that comes in pieces from elsewhere, held back while it begins like a thought."""

    def __init__(self) -> None:
        self._text = ""
        self.held = True

    def add(self, piece: str) -> str:
        """As much of the text as may be shown with one more piece."""
        if not self.held:
            return piece
        self._text += piece
        self.held = may_open(self._text) or bool(opening(self._text) or GLUED.match(self._text))
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
    def of(cls, text: str, own: Thinking | None, *, cut: bool = False, thought: str | None = None) -> Foreign:
        """`own` is how this model thinks behind the prompt, and `cut`: a limit ended the text. `thought` is its
        author's reasoning where the text does not hold it, "" where that is not known, None where there was none.

        Where the prompt opens a thought that the text does not close, its author has left the thought out.
        """
        if glued := GLUED.match(text):
            inside, answer = (glued[3], None) if glued[1] is None else (glued[1], glued[2])
            return cls._placed(own, inside.strip(), answer, cut=cut)
        by, parts = read(text, own, cut=cut, foreign=True)
        if by is own and _is_left_out(text, own, parts):
            return cls._placed(own, thought or "", text, cut=cut)
        first = text[slice(*parts.thoughts[0])] if parts.thoughts and parts.answer is not None else ""
        if by is not None and first.count("`") % 2 and not text.lstrip().startswith(by.marks.first):
            return cls(text, Reasoning("", why_unscored=_NESTED), None)  # its end alone, in code: it may be quoted
        answer, reasoning = text[slice(*(parts.answer or (0, 0)))], reasoning_of(text, text, parts, (own, by), cut=cut)
        if thought is not None and parts.answer is not None and not (reasoning and reasoning.text):
            return cls._placed(own, thought, answer, cut=cut)
        if reasoning is not None and reasoning.why_unscored:
            return cls(answer, reasoning, None)
        if by is own:
            return cls(answer, reasoning, text)
        if reasoning is None:  # an empty thought, or none
            return cls(answer, None, own.written("", answer) if own is not None and own.header == "open" else answer)
        return cls._placed(own, reasoning.text, answer, cut=cut)

    @classmethod
    def _placed(cls, own: Thinking | None, thought: str, answer: str | None, *, cut: bool) -> Foreign:
        """A thought and an answer without marks of their own."""
        if answer is None:
            return cls("", Reasoning(thought, why_unscored=_CUT if cut else _ENDED), None)
        written = own.written(thought, answer) if own is not None and thought else None
        reason = _NESTED if MARKED.search(answer) else None if written else _UNPLACED if thought else UNKNOWN
        return cls(answer, Reasoning(thought, why_unscored=reason), None if reason else written)


def doubted_from(text: str) -> int | None:
    """The place in a text from elsewhere from which on it may be a thought; None where all of it is an answer."""
    found, mark = Foreign.of(text, None), MARKED.search(text)
    if found.answer != text or (found.reasoning and not mark):
        return 0
    return mark.start() if mark else None


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
    return bisect_right(range(1, len(ids) + 1), place, key=lambda count: len(decode(ids[:count], special=True)))


def joined(thoughts: Iterable[str]) -> str:
    """Thoughts as one text."""
    return "\n\n".join(filter(None, (thought.strip() for thought in thoughts)))


def held(text: str, marks: Iterable[str]) -> int:
    """How much of a text that grows cannot become a part of these marks."""
    overlaps = (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    return len(text) - max(overlaps, default=0)


def _next_word(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())
