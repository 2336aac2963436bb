"""Text as it is generated, in the caller's thread or on its event loop, with the whole generation at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.interruption import SLICE, Stops, current_stop, stopping
from semgrad_guard.engine.worker.request import Ticket
from semgrad_guard.errors import AnswerCancelledError

Submit = Callable[[Callable[[str], None]], Ticket[Generation]]
"""Has an answer written whose pieces the given listener gets."""


class TextStream(Iterator[str]):
    """Pieces of an answer; joined, they are exactly `generation.text`.

    Text is held back while it might turn out to be the start of a stop string or half a character. The model's worker
    writes it from the first piece on, under the stops that count where the stream is opened and where that piece is
    taken; an error there is raised here. Leaving the stream early, dropping it, or `close()` stops the model; the
    stream then ends, and there is no generation.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit, self._opened_under = submit, current_stop()
        self._waiting_under = Stops()
        # The worker holds the queue and not the stream: else a stream without a holder would live until its end.
        self._pieces: SimpleQueue[str | None] = SimpleQueue()
        self._ticket: Ticket[Generation] | None = None
        self._closed = self._ended = False

    def begin(self, on_piece: Callable[[str], None] | None = None) -> Ticket[Generation]:
        """The ticket of the answer, which is written from now on. Where there is a listener, it gets the pieces.

        Raises:
            AnswerCancelledError: the stream was closed.
        """
        if self._closed:
            raise AnswerCancelledError("the stream was closed before its answer was complete")
        if self._ticket is None:
            with stopping(self._opened_under):
                self._waiting_under = current_stop()
                self._ticket = self._submit(on_piece or self._pieces.put)
            pieces = self._pieces
            self._ticket.add_done_callback(lambda _: pieces.put(None))
        return self._ticket

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        if self._ended or (self._closed and self._ticket is None):
            raise StopIteration
        ticket = self.begin() if self._ticket is None else self._ticket
        if (piece := self._next()) is not None:
            return piece
        self._ended = True
        if self._closed and (ticket.cancelled() or isinstance(ticket.exception(), AnswerCancelledError)):
            raise StopIteration
        ticket.result()  # or its error
        raise StopIteration

    def _next(self) -> str | None:
        """The next piece, None at the end; a caller under a stop may leave a queue that does not move."""
        stops = self._waiting_under
        while stops and not self._closed:
            try:
                return self._pieces.get(timeout=SLICE)
            except Empty:
                stops.check()
        return self._pieces.get()

    def close(self) -> None:
        """Stop the model; harmless at any time."""
        self._closed = True
        if self._ticket is not None:
            self._ticket.cancel()

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
        for _ in self:
            pass
        if self._ticket is None or self._ticket.cancelled():
            raise AnswerCancelledError("the stream was closed before its answer was complete")
        error = self._ticket.exception()
        if isinstance(error, AnswerCancelledError):
            raise AnswerCancelledError("the stream was closed before its answer was complete") from error
        return self._ticket.result()
