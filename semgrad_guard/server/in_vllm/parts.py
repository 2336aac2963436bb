"""`Round`: the worker scores together the answers that came in the meantime. `Part`: sentences of an answer leave while
vLLM writes it; the server's terms decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.sentences import OpenSentences
from semgrad_guard.engine.answers.text import CertainText, Piece
from semgrad_guard.engine.prompts.responses import Codec
from semgrad_guard.guard import LetThrough
from semgrad_guard.server.in_vllm.messages import Begun, Failed, Read, ScoredPart

A = TypeVar("A")
R = TypeVar("R")


class Round(Generic[A, R]):
    """Answers that the worker scores together with others that were handed over meanwhile."""

    def __init__(self, score: Callable[[list[A]], Awaitable[Sequence[R | Failed]]]) -> None:
        self._score = score
        self._waiting: list[tuple[A, asyncio.Future[R | Failed]]] = []
        self._scoring: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def result(self, sent: A) -> R:
        """The result for one of them.

        Raises:
            SemGradGuardError: it cannot be scored.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((sent, future))
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(self._score_all())
        result = await future
        if isinstance(result, Failed):
            raise result.error()
        return result

    async def _score_all(self) -> None:
        """Score the answers that wait, until there are none; those that come meanwhile wait for the next round."""
        while self._waiting:
            await asyncio.sleep(0)  # those that are done in the same step of the engine
            taken, self._waiting = [one for one in self._waiting if not one[1].done()], []  # a caller may have left
            try:
                results = list(await self._score([sent for sent, _ in taken])) if taken else []
                if len(results) != len(taken):
                    raise ValueError(f"{len(results)} results for {len(taken)} answers")
            except Exception as error:  # noqa: BLE001 - raised by the callers
                results = [Failed.of(error)] * len(taken)
            for (_, future), result in zip(taken, results, strict=True):
                if not future.done():
                    future.set_result(result)
        self._scoring = None


class BegunAnswer:
    """The tokens of an answer that vLLM writes; `listener` gets its pieces as soon as they are certain."""

    def __init__(
        self, codec: Codec, read: Read, options: GenerationOptions, listener: Callable[[Piece], None] | None
    ) -> None:
        self.ids = list[int]()
        self._certain, self._end_tokens = CertainText(codec.decode, options, read.thinking), read.end_tokens
        self._listener = listener

    def add(self, tokens: Sequence[int]) -> None:
        """Some tokens more."""
        for token in tokens:
            self.ids.append(token)
            if self._listener is not None and token not in self._end_tokens:
                for piece in self._certain.add(token):
                    self._listener(piece)

    @property
    def spelled(self) -> tuple[int, ...]:
        """The tokens without the one that ended the answer."""
        return tuple(self.ids[:-1] if self.ids and self.ids[-1] in self._end_tokens else self.ids)


class Part:
    """The sentences that have ended in the answer of this name, and leave as far as they are let through (`let`).

    With so many `tokens` the answer ends, behind a sentence that ends it; None: none does.
    """

    def __init__(self, name: str, let: LetThrough, scores: Round[Begun, ScoredPart | None]) -> None:
        self.open, self.let = OpenSentences(), let
        self.tokens: int | None = None
        self._name, self._scores = name, scores
        self._scoring: asyncio.Task[None] | None = None

    def goes_on(self, answer: BegunAnswer) -> bool:
        """After each step of vLLM's: have sentences scored that have ended; whether it shall write more.

        Raises:
            SemGradGuardError: they cannot be scored, or the caller has left.
        """
        if self._scoring is not None and self._scoring.done():
            self._scoring.result()
            self._scoring = None
        if self._scoring is None and self.open.is_due and self.tokens is None:
            self._scoring = asyncio.ensure_future(self._score(answer))
        return self.tokens is None

    async def end(self) -> None:
        """Wait for what is being scored; sentences behind it are scored with the whole answer.

        Raises:
            SemGradGuardError: as above.
        """
        if self._scoring is not None:
            await self._scoring

    async def close(self) -> None:
        """Hand on nothing more; harmless at any time."""
        if self._scoring is not None:
            self._scoring.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._scoring

    async def _score(self, answer: BegunAnswer) -> None:
        begun = Begun(name=self._name, tokens=answer.spelled, spans=tuple(self.open.spans), known=self.let.known)
        scored = await self._scores.result(begun)
        self.open.hand_over(self.open.known if scored is None else len(begun.spans))
        if scored is not None and not self.let.add(scored.draft):
            self.tokens = scored.tokens
