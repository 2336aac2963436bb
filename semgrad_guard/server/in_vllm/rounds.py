"""`Round`: the worker scores together what was handed over in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from semgrad_guard.server.in_vllm.messages import Failed

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
