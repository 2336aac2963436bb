"""Signals that end a command: Ctrl-C, and those of service managers, which end it in the same orderly way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

_NAMES = ("SIGTERM", "SIGHUP")


class Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C's: code that tidies up after that one tidies up after this one, too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def orderly_end() -> Generator[None]:
    """For as long as it lasts these signals raise `Ended`, so that locks and half-written files are removed.

    A signal that is ignored (nohup) or handled already stays so.
    """
    taken: list[int] = []
    if threading.current_thread() is threading.main_thread():
        there = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]
        taken = [number for number in there if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: object) -> None:
    raise Ended(number)


def exit_code(error: KeyboardInterrupt) -> int:
    """128 and the signal's number, as shells have it: 130 for Ctrl-C."""
    return 128 + (error.number if isinstance(error, Ended) else signal.SIGINT)


def in_words(error: KeyboardInterrupt) -> str:
    """The signal in words."""
    return f"Ended by {signal.Signals(error.number).name}" if isinstance(error, Ended) else "Interrupted"
