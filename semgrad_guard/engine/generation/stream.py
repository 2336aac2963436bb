"""Text as it is generated, on the caller's thread, with the whole generation at the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from semgrad_guard.engine.generation.generation import Generation

T = TypeVar("T")
_END = object()


class TextStream(Iterator[str]):
    """Pieces of an answer; joined, they are exactly `generation.text`.

    Text is held back while it might turn out to be the start of a stop string or half a character. Generation runs in
    a thread of its own (grad mode and locks are per thread); an error there is raised here. Leaving the stream early,
    or `close()`, stops the generation at its next token.
    """

    def __init__(
        self,
        work: Callable[[tuple[BaseStreamer, StoppingCriteria]], Generation],
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
    ) -> None:
        self._tokens: queue.Queue[Any] = queue.Queue()
        self._closed = threading.Event()
        self._decode, self._stop = decode, stop
        self._work = work
        self._result: Generation | BaseException | None = None
        self._pieces = self._run()

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating; harmless at any time."""
        self._closed.set()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The whole answer. Consumes what is left of the stream."""
        for _ in self._pieces:
            pass
        if not isinstance(self._result, Generation):
            raise RuntimeError("the stream was closed before its answer was complete") from self._result
        return self._result

    def _run(self) -> Iterator[str]:
        worker = threading.Thread(target=self._generate, daemon=True, name="semgrad-guard-stream")
        worker.start()
        ids: list[int] = []
        sent = 0
        while (token := self._tokens.get()) is not _END:
            ids.append(token)
            text = self._decode(ids)
            safe = self._safe_length(text)
            if safe > sent:
                yield text[sent:safe]
                sent = safe
        worker.join()
        if isinstance(self._result, Generation):
            if self._result.text[sent:]:
                yield self._result.text[sent:]
        elif self._result is not None:
            raise self._result

    def _generate(self) -> None:
        try:
            self._result = self._work((_Tokens(self._tokens), _Closed(self._closed)))
        except BaseException as error:  # noqa: BLE001 - carried to the consumer's thread and raised there
            self._result = error
        finally:
            self._tokens.put(_END)

    def _safe_length(self, text: str) -> int:
        """How much of `text` later tokens can no longer change."""
        limits = [len(text.rstrip("\ufffd"))]
        for stop in self._stop:
            at = text.find(stop)
            limits.append(at if at >= 0 else len(text) - _overlap(text, stop))
        return min(limits)


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a start of `stop`."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if stop.startswith(text[-n:])), 0)


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
        """The worker itself says when everything is done."""


class _Closed(StoppingCriteria):
    def __init__(self, closed: threading.Event) -> None:
        self._closed = closed

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._closed.is_set(), dtype=torch.bool, device=input_ids.device)
