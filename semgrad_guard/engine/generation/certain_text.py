"""Text as it is generated, as far as later tokens can no longer change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.generation.streamers import BaseStreamer

from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.prompts.reasoning import AnswerTokens, Decode, Thinking, answer_tokens

_TAIL = 32
"""Tokens in which a mark is looked for, where a thought is long: all of it would be read again for each token."""


class CertainText:
    """An answer's text as its tokens come, without reasoning, as far as later tokens can no longer change it."""

    def __init__(self, decode: Decode, options: GenerationOptions, thinking: Thinking | None) -> None:
        self._decode, self._stop = decode, options.stop
        self._thinking = None if options.grammar else thinking
        self._ids: list[int] = []
        self._answer: AnswerTokens | None = None
        self._sent = 0

    def add(self, token: int) -> str:
        """The text that has become certain with one more token."""
        self._ids.append(token)
        if self._thinking is None:
            text = self._decode(self._ids)
            return self._send(text, _safe_length(text, self._stop))
        self._answer = answer = self._answer or self._found(self._thinking)
        if answer is None:
            return ""
        text = self._decode(self._ids[answer.begin :])
        text = answer.clean(text) if answer.begin else text
        return self._send(text, _safe_length(text, (*self._stop, *self._thinking.ends)))

    def rest(self, text: str) -> str:
        """The rest of the whole text."""
        return self._send(text, len(text))

    def _found(self, thinking: Thinking) -> AnswerTokens | None:
        """The tokens with which the answer begins, once that is certain; later than at first, only behind a mark."""
        latest = self._decode(self._ids[-_TAIL:], special=True)
        if len(self._ids) > 2 * _TAIL and not any(mark in latest for mark in thinking.borders):
            return None
        whole = self._decode(self._ids, special=True)
        start = thinking.begins(whole)
        return None if start is None else answer_tokens(self._ids, whole, (start, len(whole)), self._decode)

    def _send(self, text: str, end: int) -> str:
        piece, self._sent = text[self._sent : end], max(self._sent, end)
        return piece


def _safe_length(text: str, stops: Sequence[str]) -> int:
    """How much of `text` later tokens can no longer change."""
    limits = [len(text.rstrip("\ufffd"))]
    for stop in stops:
        at = text.find(stop)
        if at < 0:  # the longest end of the text that is a start of the stop string
            overlaps = (n for n in range(min(len(text), len(stop)), 0, -1) if stop.startswith(text[-n:]))
            at = len(text) - next(overlaps, 0)
        limits.append(at)
    return min(limits)


class PieceStreamer(BaseStreamer):
    """Hands on the pieces of a one-row generation as soon as they are certain."""

    def __init__(self, certain: CertainText, on_piece: Callable[[str], None]) -> None:
        self._certain, self._on_piece, self._prompt_seen = certain, on_piece, False

    def put(self, value: torch.Tensor) -> None:
        """Take in new tokens; the first call brings the prompt, which is skipped."""
        for token in value.reshape(-1).tolist() if self._prompt_seen else ():
            if piece := self._certain.add(token):
                self._on_piece(piece)
        self._prompt_seen = True

    def end(self) -> None:
        """The rest is known with the whole text (`finish`)."""

    def finish(self, text: str) -> None:
        """Hand on the rest of the whole text."""
        if rest := self._certain.rest(text):
            self._on_piece(rest)
