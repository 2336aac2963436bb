"""Answers that are delivered while they are being written: live ones, and those that leave by sentence."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from llama_index_semgrad_guard.authorship import Delivery
from llama_index_semgrad_guard.calls import ModelCall
from llama_index_semgrad_guard.records import require_text
from llama_index_semgrad_guard.routing import Routing, sealed
from llama_index_semgrad_guard.turn import Turn
from semgrad_guard.guard import Draft, Iterated, Outcome, Steps, Stop, StreamSteps, Work, streamed


class LivePieces(Iterated[str]):
    """An answer that is being written: its pieces as they come, whose calls belong to `turn`, and its draft."""

    def __init__(self, make: Callable[[], Any], amake: Callable[[], Any], turn: Turn, routing: Routing) -> None:
        super().__init__(make, amake)
        self._turn, self._routing = turn, routing
        self._seen = list[str]()

    def next(self) -> Work:
        """As `Live.next`."""
        return Work.of(self._of_the_turn)

    def _of_the_turn(self) -> Steps[list[str] | None]:
        with self._turn.open():  # not while the reader has a piece
            pieces = yield super().next()
        self._seen += map(require_text, pieces or ())
        return pieces

    @property
    def seen(self) -> Delivery:
        """The answer so far, without empty pieces, such as some models' last ones."""
        return Delivery.streamed(self._seen, self._pieces)

    def draft(self) -> Work:
        """The scored draft."""
        return Work(lambda: self._routing.draft(self._turn, self.seen))

    def close(self) -> Work:
        """Stop the model; harmless at any time."""
        self._turn.stop()
        return super().close()


class GuardedPieces(LivePieces):
    """The sentences that leave while the engine's answer is being written, and its draft, in the object of `hold`.

    Behind a sentence that ends the answer the model is left: closing the pieces hangs up.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[str]],
        amake: Callable[[], AsyncIterator[str]],
        turn: Turn,
        routing: Routing,
        *,
        hold: Callable[[str], Any],
    ) -> None:
        super().__init__(make, amake, turn, routing)
        self._hold, self._is_reading = hold, False
        self._ended: ModelCall | None = None

    def next(self) -> Work:
        """As `Live.next`."""
        return self._sealed(self._let_through)

    def _let_through(self) -> Steps[Sequence[Any] | None]:
        if self._ended is not None:
            return None
        self._is_reading = True
        pieces = yield super().next().in_time()
        self._is_reading = False
        leaving = self._turn.leaving
        if pieces is None or leaving is None:
            return pieces
        new, self._ended = leaving.next(self._is_the_answer)
        return new

    def _is_the_answer(self, call: ModelCall) -> bool:
        """Whether the engine has passed on the text of this call, and would deliver it alone if it ended here."""
        ended, seen = copy.copy(self._turn), self.seen
        ended.calls = [*self._turn.calls, call]
        return call.text == seen.text and self._routing.counting.is_alone(ended, seen, call)

    def draft(self) -> Work:
        """The scored draft."""
        return self._sealed(self._held)

    def close(self) -> Work:
        """As `LivePieces.close`; pieces that are late are still being read, and end with their model."""
        return Work.at_once(self._turn.stop) if self._is_reading else super().close()

    def _held(self) -> Steps[Draft[Any]]:
        text = self.seen.text
        if self._ended is not None:
            self._turn.end_with(self._ended)
            text = self._ended.text
        delivery = replace(self.seen, text=text, holder=self._hold(text))
        return (yield Work(lambda: self._routing.draft(self._turn, delivery)))

    def _sealed(self, steps: Callable[[], Steps[Any]]) -> Work:
        return Work.of(lambda: sealed(steps(), self._turn, self._routing.terms))


def live(
    pieces: Generator[str] | AsyncGenerator[str],
    turn: Turn,
    routing: Routing,
    metadata: dict[str, Any],
    *,
    stop: Stop,
) -> StreamSteps[str, None]:
    """The pieces as they come; once they have ended, `metadata` holds the record. Closing them stops the model."""

    def show(step: Any) -> Sequence[str]:
        if not isinstance(step, Outcome):
            return (step,)
        metadata.update(routing.attached({}, step.verdict, turn))
        return ()

    # A live stream is delivered: it is never escalated.
    return streamed(routing.terms, LivePieces(lambda: pieces, lambda: pieces, turn, routing), show=show, stop=stop)
