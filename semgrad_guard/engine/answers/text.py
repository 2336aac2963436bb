"""The visible part of an answer: its text behind reasoning, up to a stop string, and the tokens that carry it.

While an answer is written, `CertainText` shows its text as far as later tokens can no longer change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.prompts.reasoning import (
    AnswerTokens,
    Codec,
    Decode,
    Reasoning,
    Thinking,
    answer_tokens,
    up_to,
)


class TokenizerCodec:
    """The `Codec` of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a piece of text, without the special tokens that the tokenizer would add."""
        encoding: Any = self._tokenizer(text, add_special_tokens=False)
        return tuple(encoding["input_ids"])

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of response tokens, white space as it is; special tokens show only with `special`."""
        text: Any = self._tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text


@dataclass(frozen=True)
class Visible:
    """The delivered part of the tokens that were produced.

    `ids` carry `text` and nothing beyond it. `cut`: the stop string that ended the text; `retokenized`: it did so
    inside a token, so that `ids` are not the first tokens produced but the delivered text's own. `preceding` are the
    tokens produced before them: a thought and its marks. `reasoning` is that thought, None where it is empty.
    """

    text: str
    ids: tuple[int, ...]
    cut: str | None = None
    retokenized: bool = False
    preceding: tuple[int, ...] = ()
    reasoning: Reasoning | None = None

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The tokens that are scored; none where the reasoning rules a score out."""
        return () if self.reasoning and self.reasoning.why_unscored else self.ids


def answered(
    ids: Sequence[int], stop: Sequence[str], codec: Codec, thinking: Thinking | None, *, cut: bool = False
) -> Visible:
    """The answer among the tokens produced, up to the first stop string, and the reasoning before it.

    `cut`: a limit ended the tokens.
    """
    if thinking is None:
        return visible(ids, stop, codec)
    whole = codec.decode(ids, special=True)
    seen = thinking.seen(ids, whole, codec.decode)
    parts = thinking.parts(seen, cut=cut)
    reasoning = thinking.reasoning(whole, seen, parts, cut=cut)
    if parts.answer == (0, len(whole)):
        return replace(visible(ids, stop, codec), reasoning=reasoning)
    tokens = answer_tokens(ids, whole, parts.answer or (len(whole), len(whole)), codec.decode)
    before = tuple(ids[: tokens.begin])
    if reasoning is not None:
        ends = [place for span in parts.thoughts if whole[slice(*span)].strip() for place in span] or [0, 0]
        begin, end = (up_to(place, before, codec.decode) for place in (ends[0], ends[-1]))
        reasoning = replace(reasoning, ids=before, span=(begin, end))
    if parts.answer is None:
        return Visible("", (), preceding=before, reasoning=reasoning)
    found = visible(ids[tokens.begin : tokens.end], stop, codec)
    return replace(found, text=tokens.clean(found.text), preceding=before, reasoning=reasoning)


def visible(ids: Sequence[int], stop: Sequence[str], codec: Codec) -> Visible:
    """The text before the first stop string, and the tokens that carry it; none where the text is blank."""
    text = codec.decode(ids)
    ends = [(text.find(string), string) for string in stop if string in text]
    if not ends:
        return Visible(text, tuple(ids) if text.strip() else ())
    end, cut = min(ends)
    delivered = text[:end]
    if not delivered.strip():
        return Visible(delivered, (), cut=cut)
    count = next(n for n in range(len(ids) + 1) if codec.decode(ids[:n]).startswith(delivered))
    kept = codec.decode(ids[:count])
    if kept == delivered:
        return Visible(delivered, tuple(ids[:count]), cut=cut)
    raw = codec.decode(ids[:count], special=True)  # marks of tool calls must not get lost
    own = codec.encode(raw[: len(raw) - (len(kept) - len(delivered))])
    return Visible(delivered, own, cut=cut, retokenized=True)


class StopStrings:
    """Whether the text of an answer holds one of these strings, whatever its thought holds.

    transformers' search in the tokens' own spelling comes first, since it costs little. It also finds strings that the
    text does not hold: with the space before a first word, or with a beginning in the prompt. So the text decides.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], *, codec: Codec, thinking: Thinking | None
    ) -> None:
        self._strings = [string for string in strings if _can_be_spelled(tokenizer, string)]
        self._spelled: Any = StopStringCriteria(tokenizer, self._strings) if self._strings else None
        self._codec, self._thinking = codec, thinking

    def end(self, ids: Sequence[int]) -> bool:
        """Whether an answer ends with these tokens."""
        if self._spelled is None or not bool(self._spelled(torch.tensor([list(ids)]), None).all()):
            return False
        return answered(ids, self._strings, self._codec, self._thinking, cut=True).cut is not None


def _can_be_spelled(tokenizer: PreTrainedTokenizerBase, string: str) -> bool:
    """Whether transformers can look for it; where it cannot, the text is cut there after the generation."""
    try:
        StopStringCriteria(tokenizer, [string])
    except ValueError:  # no token of the vocabulary matches a part of it
        return False
    return True


@dataclass(frozen=True)
class ThoughtPiece:
    """A piece of the reasoning before an answer that is being written."""

    text: str


Piece = str | ThoughtPiece
"""A part of an answer that is being written: of its text, or of the thought before it."""
_CONTEXT = 8
"""Tokens that are decoded again before new ones, whose text may depend on them."""


class CertainText:
    """An answer's text and its thought as the tokens come, as far as later tokens can no longer change them."""

    def __init__(self, decode: Decode, options: GenerationOptions, thinking: Thinking | None) -> None:
        self._decode, self._stop = decode, options.stop
        self._thinking = None if options.grammar else thinking
        self._ids: list[int] = []
        self._whole, self._at = "", 0
        self._answer: AnswerTokens | None = None
        self._sent, self._thought = 0, ""

    def add(self, token: int) -> list[Piece]:
        """The pieces that have become certain with one more token."""
        self._ids.append(token)
        if self._thinking is None:
            text = self._decode(self._ids)
            return self._pieces("", text, safe_length(text, self._stop))
        thought = ""
        if self._answer is None:
            thought, self._answer = self._begun(self._thinking)
        if (answer := self._answer) is None:
            return self._pieces(thought, "", 0)
        own = self._ids[answer.begin :]
        if self._thinking.ends:  # marks that may hold control tokens, which the text does not show
            shown = self._decode(own, special=True)
            end = safe_length(shown, self._thinking.ends)
            own = own if end == len(shown) else own[: up_to(end, own, self._decode)]
        text = self._decode(own)
        text = answer.clean(text) if answer.begin else text
        return self._pieces(thought, text, safe_length(text, self._stop))

    def rest(self, text: str, reasoning: Reasoning | None = None) -> list[Piece]:
        """The rest of the whole text, and of the thought before it."""
        return self._pieces("" if reasoning is None else reasoning.text, text, len(text))

    def _begun(self, thinking: Thinking) -> tuple[str, AnswerTokens | None]:
        """The thought as far as it is certain, and the tokens with which the answer begins, once that is."""
        begin = max(0, self._at - _CONTEXT)  # only the last tokens are decoded again
        known = self._decode(self._ids[begin : self._at], special=True)
        whole = self._whole + self._decode(self._ids[begin:], special=True)[len(known) :]
        if not whole.endswith("\ufffd"):
            self._whole, self._at = whole, len(self._ids)
        seen = thinking.seen(self._ids, whole, self._decode)
        thought, start = thinking.begun(whole, seen, safe_length), thinking.begins(seen)
        answer = None if start is None else answer_tokens(self._ids, whole, (start, len(whole)), self._decode)
        return thought, answer

    def _pieces(self, thought: str, text: str, end: int) -> list[Piece]:
        pieces: list[Piece] = []
        if len(thought) > len(self._thought) and thought.startswith(self._thought):
            pieces.append(ThoughtPiece(thought[len(self._thought) :]))
            self._thought = thought
        if end > self._sent:
            pieces.append(text[self._sent : end])
            self._sent = end
        return pieces


def safe_length(text: str, stops: Sequence[str]) -> int:
    """How much of `text` later tokens can no longer change."""
    limits = [len(text.rstrip("\ufffd"))]
    for stop in stops:
        at = text.find(stop)
        if at < 0:  # the longest end of the text that is a start of the stop string
            overlaps = (n for n in range(min(len(text), len(stop)), 0, -1) if stop.startswith(text[-n:]))
            at = len(text) - next(overlaps, 0)
        limits.append(at)
    return min(limits)
