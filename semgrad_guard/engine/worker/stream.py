"""Pieces of an answer as it is written, from the model's thread to one reader, and the answer at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.visible import Piece
from semgrad_guard.engine.interruption import Stops, current_stop, stopping
from semgrad_guard.engine.worker.request import Ticket, waited
from semgrad_guard.errors import AnswerCancelledError

P = TypeVar("P")
R = TypeVar("R")


class Pieces(Generic[P]):
    """Pieces from any thread, for one reader in another one or on an event loop."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ready: list[P] = []
        self._has_ended = False
        self._reader: Future[Sequence[P] | None] | None = None

    def put(self, piece: P) -> None:
        """One more piece; waits for nothing."""
        with self._lock:
            self._ready.append(piece)
            self._hand_over()

    def end(self) -> None:
        """There are no more."""
        with self._lock:
            self._has_ended = True
            self._hand_over()

    def next(self) -> Future[Sequence[P] | None]:
        """All pieces that are there, as soon as there is one; None behind the last."""
        with self._lock:
            reader = self._reader = Future()
            self._hand_over()
            return reader

    def _hand_over(self) -> None:
        reader = self._reader
        if reader is None or not (self._ready or self._has_ended):
            return
        self._reader = None
        if reader.set_running_or_notify_cancel():
            pieces, self._ready = self._ready or None, []
            reader.set_result(pieces)


class PieceStream(Generic[R]):
    """The pieces of an answer, and the ticket of its request, whose result may be another than a generation.

    `submit` has the answer written, and the given listener gets the pieces.
    """

    def __init__(self, submit: Callable[[Callable[[Piece], None]], Ticket[R]]) -> None:
        # The worker holds the queue and not the stream: else a stream without a holder would live until its end.
        pieces = self._pieces = Pieces[Piece]()
        self.ticket = submit(pieces.put)
        self.ticket.add_done_callback(lambda _: pieces.end())

    def next(self) -> Future[Sequence[Piece] | None]:
        """The next pieces; None behind the last, or where an error has ended the answer."""
        return self._pieces.next()

    def close(self) -> None:
        """Stop the model; harmless at any time."""
        self.ticket.cancel()

    def __del__(self) -> None:
        if hasattr(self, "ticket"):
            self.close()


class TextStream(Iterator[str]):
    """Pieces of an answer's text; joined, they are exactly `generation.text`.

    Text is held back while it might turn out to be the start of a stop string or half a character. The model's worker
    writes it from the first piece on, under the stops that count where the stream is opened and where that piece is
    taken; an error there is raised here. Leaving the stream early, dropping it, or `close()` stops the model; the
    stream then ends, and there is no generation.
    """

    def __init__(self, submit: Callable[[Callable[[Piece], None]], Ticket[Generation]]) -> None:
        self._submit, self._opened_under = submit, current_stop()
        self._waiting_under = Stops()
        self._stream: PieceStream[Generation] | None = None
        self._ready: list[str] = []
        self._is_closed = self._has_ended = False

    def begin(self) -> Ticket[Generation]:
        """The ticket of the answer, which is written from now on.

        Raises:
            AnswerCancelledError: the stream was closed.
        """
        if self._is_closed:
            raise AnswerCancelledError("the stream was closed before its answer was complete")
        if self._stream is None:
            with stopping(self._opened_under):
                self._waiting_under = current_stop()
                self._stream = PieceStream(self._submit)
        return self._stream.ticket

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        if not self._ready and not self._has_ended:
            self._read()
        if not self._ready:
            raise StopIteration
        return self._ready.pop(0)

    def _read(self) -> None:
        """Wait for more text, or for the end; a caller under a stop may leave a queue that does not move."""
        if self._stream is None:
            if self._is_closed:
                return
            self.begin()
        while self._stream is not None and not self._ready:
            stops = Stops() if self._is_closed else self._waiting_under
            pieces = waited(self._stream.next(), stops)
            if pieces is None:
                self._has_ended = True
                ticket = self._stream.ticket
                if not self._is_closed or not _was_cancelled(ticket):
                    ticket.result()  # or its error
                return
            self._ready += [piece for piece in pieces if isinstance(piece, str)]

    def close(self) -> None:
        """Stop the model; harmless at any time."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The whole answer. Consumes the rest of the stream.

        Raises:
            AnswerCancelledError: the stream was closed before its answer was complete.
        """
        for _ in self:
            pass
        if self._stream is None or _was_cancelled(self._stream.ticket):
            raise AnswerCancelledError("the stream was closed before its answer was complete")
        return self._stream.ticket.result()


def _was_cancelled(ticket: Ticket[Generation]) -> bool:
    return ticket.cancelled() or isinstance(ticket.exception(), AnswerCancelledError)
