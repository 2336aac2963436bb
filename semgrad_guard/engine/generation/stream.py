"""Text as it is generated, on the caller's thread, with the whole generation at the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from semgrad_guard.engine import model_threads
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.interruption import Stop, Stops, current_stop, stopping
from semgrad_guard.engine.prompts.reasoning import AnswerTokens, Decode, Thinking, answer_tokens
from semgrad_guard.errors import AnswerCancelledError, AnswerInterruptedError

_END = object()
_TAIL = 32
"""Tokens in which a mark is looked for, where a thought is long: all of it would be read again for each token."""


class TextStream(Iterator[str]):
    """Pieces of an answer; joined, they are exactly `generation.text`.

    Text is held back while it might turn out to be the start of a stop string or half a character. Generation runs in
    a thread of its own (grad mode and locks are per thread) under the stops that count where the stream is opened and
    where its first piece is taken; an error there is raised here. Leaving the stream early, dropping it, or `close()`
    stops the model at its next layer; the stream then ends, and there is no generation.
    """

    def __init__(
        self,
        work: Callable[[BaseStreamer], Generation],
        certain: CertainText,
    ) -> None:
        # The thread and the iterator hold the worker and not the stream: else a stream without a holder
        # would live until its answer is complete.
        self._worker = _Worker(work)
        self._pieces = _pieces(self._worker, certain)

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop the model; harmless at any time."""
        self._worker.closed.cancel()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The whole answer. Consumes the rest of the stream.

        Raises:
            AnswerCancelledError: the stream was closed before its answer was complete.
        """
        for _ in self._pieces:
            pass
        result = self._worker.result
        if isinstance(result, Generation):
            return result
        if result is None or isinstance(result, AnswerCancelledError):
            raise AnswerCancelledError("the stream was closed before its answer was complete") from result
        raise result


class _Worker:
    """Generates in a thread of its own: token after token arrives in a queue, and at last the whole."""

    def __init__(self, work: Callable[[BaseStreamer], Generation]) -> None:
        self.closed = Stop()
        self.tokens: queue.Queue[Any] = queue.Queue()
        self.result: Generation | BaseException | None = None
        self._work = work
        self._opened_under: Stops = current_stop()

    def start(self) -> threading.Thread:
        """Begin, with the context variables of the calling thread."""
        return model_threads.start(
            self._generate,
            name="semgrad-guard-stream",
            stop=self.closed,
            context=copy_context(),
            only_runs_the_model=True,
        )

    def _generate(self) -> None:
        try:
            with stopping(self._opened_under):
                self.result = self._work(_Tokens(self.tokens))
        except AnswerInterruptedError as error:
            self.result = error.with_traceback(None)  # its frames hold the states of the model
        except BaseException as error:  # noqa: BLE001 - carried to the consumer's thread and raised there
            self.result = error
        finally:
            self.tokens.put(_END)


def _pieces(worker: _Worker, certain: CertainText) -> Iterator[str]:
    """The text of a worker's tokens as soon as it is certain."""
    if worker.closed.cancelled:
        return
    thread = worker.start()
    while (token := worker.tokens.get()) is not _END:
        if piece := certain.add(token):
            yield piece
    thread.join()
    result = worker.result
    if isinstance(result, Generation):
        if rest := certain.rest(result.text):
            yield rest
    elif result is not None and not (worker.closed.cancelled and isinstance(result, AnswerCancelledError)):
        raise result


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


class _Tokens(BaseStreamer):
    """Puts each new token of a one-row generation into a queue; the first call brings the prompt, which is skipped."""

    def __init__(self, tokens: queue.Queue[Any]) -> None:
        self._tokens, self._prompt_seen = tokens, False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            for token in value.reshape(-1).tolist():
                self._tokens.put(token)
        self._prompt_seen = True

    def end(self) -> None:
        """The worker itself ends the queue."""


class Heard(BaseStreamer):
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
