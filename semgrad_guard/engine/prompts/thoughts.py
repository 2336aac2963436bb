"""Thoughts that a model writes before its answer: by which marks, and where the answer begins behind them.

The marks of families of models are data, by which every text is read. Those of a model are those of its tokenizer's
`response_template`, else those that its chat template writes around the thought of an earlier turn, else those of a
family that the template's text names. They are looked for in the model's tokens, and in the template's text after the
last message, which may have opened or closed a thought already. Never in the rest of the prompt: a user may type one.
A mark that the tokenizer knows as one token is that token alone: a model that spells it in others quotes it.

A text is read by the marks of its prompt, else by those of the family whose thought it begins with. An answer with a
mark in it has no score: what follows may be a thought.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from semgrad_guard.errors import InputError

Span = tuple[int, int]

TAGS = {f"<{name}>": f"</{name}>" for name in ("answer", "response", "final_answer", "solution")}
"""Tags that many models write around the answer behind a thought."""
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
        """All marks around a thought, and around the answer behind it."""
        return tuple(filter(None, (self.open, self.close, self.answer, *(self.wrap or ()), *TAGS)))

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
_PLAIN = Marks("<analysis>", "</analysis>")
"""Marks that are found at a text's begin alone: elsewhere they may be a word of the answer."""
EVERY = (*FAMILIES, CHANNELS, REGIONS, _PLAIN)

_GLUED = r"(?:analysis|commentary)(?=[A-Z][a-z']*,? [A-Za-z])|(?:analysis|thought)[ \t]*\n(?=\s*\S)"
GLUED = re.compile(rf"\s*(?:analysis)?(.*?)assistantfinal(.*)|\s*(?:{_GLUED})(.*)", re.DOTALL)
"""A thought and the answer by channels whose marks, special tokens all of them, were left out."""
_WORDS = "think(?:ing)?|thoughts?|reasoning|reflection|scratchpad|monologue|cot"
_HEADING = r"[\s>*_#]*(?:thinking|thoughts?|reasoning|(?:thought|reasoning)[ ]process|chain[ -]of[ -]thought)"
_PART = r"\|?(?:analysis|(?:final_)?answer|response|solution)\|?"
_ALONE = (mark for marks in (*FAMILIES, CHANNELS, REGIONS) for mark in (marks.first, marks.alone) if mark[0] in "<[◁")
_SIGNS = (
    *map(re.escape, (*_ALONE, "<|begin_of_solution|>", "<|message|>")),
    # Tags that are like those of a family, also in HTML or in wide characters.
    rf"(?:[<◁＜《]|&lt;)[/|｜]{{0,2}}(?:[\w:.-]*[_:.-]|ant)?(?:{_WORDS})"
    r"(?:[_:.-][\w:.-]*)?(?:\s[^<>]*)?[|｜]?(?:[>▷＞》]|&gt;)",
    rf"[\[{{]/(?:{_WORDS})[\]}}]|\A\s*[\[{{](?:{_WORDS})[\]}}](?!\()|<!--\s*(?:{_WORDS})\b",
    # Thoughts that are folded, fenced or quoted, as programs show them.
    rf"<details\b[^<>]{{0,200}}(?:\breasoning\b|>\s*<summary>[^<]{{0,200}}\b(?:{_WORDS})\b)",
    rf"^(?:```|~~~)(?:{_WORDS})\s*$",
    rf"\A{_HEADING}(?: for [^\n]{{1,30}}?)?[.…:*_ \t]*\n\s*>|\A\s*[(\[*_]+thinking\s*(?:\.\.\.|…|:)",
    # Channels without their marks.
    rf"assistant(?:final|analysis|commentary)|\A\s*(?-i:{_GLUED})",
    # The parts of an answer, where one of them is marked alone: at its end, or up to there.
    rf"\A\s*<(?=analysis>)|\A\s*\S(?s:.*?)(?:\n[ \t]*|(?<=[.!?…。！？])[ \t]*|(?<=\w))"
    rf"<(?P<part>{_PART})>(?s:(?!</?(?P=part)>).)*(?:</(?P=part)>)?\s*\Z",
    rf"\A(?s:(?!<{_PART}>).)*?(?<=[^\s`\"'(\[«“<>])</{_PART}>",
)
MARKED = re.compile("|".join(_SIGNS), re.IGNORECASE | re.MULTILINE)
"""A sign of a thought in a text that should be an answer: it is no answer from there on, or from its begin on."""


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
    """Spans [begin, end) of a text: its thoughts, and its answer; None where that had not begun.

    `end` is the mark that closes this answer, "" where none does.
    """

    thoughts: tuple[Span, ...]
    answer: Span | None
    end: str = ""


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
            end = end or marks.close
        else:
            wraps = {opened: end, **TAGS} if opened else TAGS
            tag = next((tag for tag in wraps if text.startswith(tag, begin)), "")
            begin, end = _next_word(text, begin + len(tag)), wraps.get(tag, "" if opened else end)
        place = text.find(end, begin) if end else -1
        return Parts(thoughts, (begin, len(text) if place < 0 else place), end)

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
    marks = opening(text)
    if marks is None and foreign:  # the family whose mark comes first in a text that lacks the opening one
        left = (marks for marks in EVERY if marks is not _PLAIN and marks.alone in text)
        marks = min(left, key=lambda one: text.find(one.alone), default=None)
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
    return any(first.startswith(begun.lower()) for first in _FIRST) or _BEGUN.match(begun) is not None


_HEADINGS = ("thinking", "thoughts", "thought\n", "reasoning", "chain of thought", "chain-of-thought", "analysis\n")
_FIRST = tuple(first.lower() for first in (*(marks.first for marks in EVERY), CHANNELS.turn, *_HEADINGS, "commentary"))
_BEGUN = re.compile(
    rf"""
    (?:analysis|commentary)(?:[A-Z][a-z']*,?[ ]?)?\Z  # a channel's word
    | (?:[<＜◁《]|&l?\Z|&lt)[^\n>＞▷》]{{0,60}}[>＞▷》]?\Z | [{{\[][^\s}}\]]{{0,40}}[}}\]]?\Z | <!--\s*\w*\Z  # a tag
    | <details(?s:(?!</summary>).){{0,200}}\Z | (?:`{{1,3}}|~{{1,3}})\w*\s*\Z  # a folded text, or a fenced one
    | [(\[>*_#][\s(\[>*_#]*[\w\ -]{{0,20}}[.…:]*\Z  # a title in Markdown
    | (?i:{_HEADING}(?:[ ]for[ ][^\n]{{0,30}})?[.…:*_\ \t]*(?:\n\s*)?\Z)
    """,
    re.VERBOSE,
)
"""Texts that may turn out to begin like a thought in no family's marks."""


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
        self.held = may_open(self._text) or bool(opening(self._text) or MARKED.match(self._text.lstrip()))
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


def joined(thoughts: Iterable[str]) -> str:
    """Thoughts as one text."""
    return "\n\n".join(filter(None, (thought.strip() for thought in thoughts)))


def held(text: str, marks: Iterable[str]) -> int:
    """How much of a text that grows cannot become a part of these marks."""
    overlaps = (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    return len(text) - max(overlaps, default=0)


def _next_word(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


# Marks and switches of chat templates.

# An ArithmeticError is a range that Jinja's sandbox finds too long.
_REFUSALS = (TemplateError, ValueError, TypeError, LookupError, AttributeError)
TEMPLATE_FAILURES = (*_REFUSALS, ArithmeticError, RecursionError, MemoryError)
"""How the rendering of a chat template may fail."""
_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""How templates call the field of a thought."""


@lru_cache(maxsize=64)
def marks_of(template: str, response: str) -> Marks | None:
    """The marks of a model's thoughts; None where they are not known. `response` is its response template as JSON."""
    fields = (json.loads(response) or {}).get("fields", {})
    thought = next((fields[name] for name in _FIELDS if name in fields), {})
    if all(isinstance(thought.get(side), str) for side in ("open", "close")):  # literals, not patterns
        content = fields.get("content", {})
        answer, end = (own if isinstance(own := content.get(side), str) else None for side in ("open", "close"))
        return Marks(thought["open"], thought["close"], answer, wrap=(answer, end) if answer and end else None)
    # Families whose marks also open calls and parts of other kinds; some put them together by macros.
    if "<|channel|>" in template and "<|message|>" in template:
        return CHANNELS
    if "<|open|>" in template and "<|sep|>" in template:
        return REGIONS
    named = next((marks for marks in FAMILIES if marks.close in template), None)
    if named is not None:
        wrap = named.wrap if named.wrap and named.wrap[0] in template else None
        named = replace(named, wrap=wrap, unopened=named.open not in template)
    return _shown(template) or named


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
