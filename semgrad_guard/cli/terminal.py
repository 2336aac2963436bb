"""The terminal for every command: exit codes, messages, levels of verbosity, progress, and the signals that end a
command: Ctrl-C, and those of service managers, which end it in the same orderly way.
"""

from __future__ import annotations

import datetime
import errno
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from semgrad_guard.questions.run_record import Answer

_NAMES = ("SIGTERM", "SIGHUP")


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    ERROR = 1
    USAGE = 2
    ABSTAINED = 3
    NO_THRESHOLD = 4
    BROKEN_LINES = 5
    UNSCORED = 6
    GATE = 7
    INTERRUPTED = 130


def code_of_run(*, unscored: object = False, broken: object, otherwise: ExitCode = ExitCode.OK) -> ExitCode:
    """How a run over a file ends: a fault of the model comes before one of the file, and that before any other."""
    return ExitCode.UNSCORED if unscored else ExitCode.BROKEN_LINES if broken else otherwise


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


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, as for every other error; rich would end the program silently."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


OUT = _Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
PROBLEMS_SHOWN = 10
"""So many lines are named one by one, so that a file of the wrong kind fills no screen; `--json` has all."""


class Loudness(IntEnum):
    """How much a command writes to stderr; results on stdout are always there."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


_loudness = Loudness.NORMAL


def speak(loudness: Loudness) -> None:
    """Set the level: every command does when it begins."""
    global _loudness
    _loudness = loudness


def is_verbose() -> bool:
    """Whether libraries may print their own messages."""
    return _loudness == Loudness.VERBOSE


def note(message: str, *, label: str | None = "Note", style: str = "yellow") -> None:
    """`say`, unless the command is quiet: for information that needs no action."""
    if _loudness > Loudness.QUIET:
        say(message, label=label, style=style)


def detail(message: str) -> None:
    """`say`, if the command is verbose."""
    if is_verbose():
        say(message, style="dim")


def status(what: str) -> AbstractContextManager[object]:
    """Show a step for as long as it lasts, on a terminal."""
    return nullcontext() if _loudness == Loudness.QUIET else ERR.status(what)


def say(message: str, *, label: str | None = None, style: str = "yellow") -> None:
    """A line on stderr, never wrapped where it goes into a file or a pipe: errors, warnings, advice."""
    head = Text(f"{label}: " if label else "", style=style)
    ERR.print(head + Text(printable(message)), soft_wrap=not ERR.is_terminal)


def show_line(text: str) -> None:
    """A line of the result on stdout, neither wrapped nor read as markup."""
    OUT.print(text, soft_wrap=True, markup=False)


def say_problems(problems: Sequence[object], *, shown: int = PROBLEMS_SHOWN) -> None:
    """One line for each thing that was wrong with a file, and how many there are beyond these."""
    for line in _shortened(problems, shown):
        say(line, label="Warning")


def say_unscored(answers: Sequence[Answer]) -> None:
    """Which answers of a run nothing could be measured of, and why: the first few, and how many there are."""
    from semgrad_guard.guard.decision import FIRST_SENTENCE, LATER  # numpy comes with it

    found = [(answer, answer.unscored) for answer in answers if answer.unscored not in (None, FIRST_SENTENCE, LATER)]
    say_problems([f"{a.id or a.question[:60]!r} has no score: {reason}." for a, reason in found], shown=5)


def say_cut(answers: Sequence[Answer], max_tokens: int) -> None:
    """How many answers a limit cut off, how many of them within their first sentence, and the option that helps."""
    cut = [answer for answer in answers if answer.is_cut]
    if cut:
        short = sum(answer.judged("unscored") is not answer for answer in cut)
        say(
            f"--max-tokens {max_tokens} cut off {len(cut)} of {len(answers)} answers, {short} of them within their "
            "first sentence: raise --max-tokens, and give your program the same limit.",
            label="Warning",
        )


def note_problems(problems: Sequence[object]) -> None:
    """One line for each thing that is good to know about a file, and how many there are beyond these."""
    for line in _shortened(problems, PROBLEMS_SHOWN):
        note(line)


def _shortened(problems: Sequence[object], shown: int) -> list[str]:
    more = [f"{len(problems) - shown} more like these."] if len(problems) > shown else []
    return [*map(str, problems[:shown]), *more]


def printable(text: str) -> str:
    """A model's or a file's text, safe to show: control characters could drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Teller:
    """How far a piece of work is: `tell(done, total)`. This one shows nothing."""

    reached = 0, 0

    def __call__(self, done: int, total: int) -> None:
        """So many of all are done."""
        self.reached = done, total


class _Bar(Teller):
    """A bar on a terminal."""

    def __init__(self, what: str, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        super().__call__(done, total)
        self._bar.update(self._task, completed=done, total=total)


_EVERY = 10.0
"""Seconds between two lines of progress, at least."""


class _Lines(Teller):
    """Lines for logs: the start, then one every ten seconds at most, with rate and time left."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        super().__call__(done, total)
        if self._first is None:
            self._first = done
            say(f"{self._what}: {done} of {total}")
        elif done > self._first and (now := time.monotonic()) - self._said >= _EVERY:
            self._said = now
            rate = (done - self._first) / (now - self._began)
            left = datetime.timedelta(seconds=round((total - done) / rate))
            say(f"{self._what}: {done} of {total}, {rate:.2g}/s, {left} left")


@contextmanager
def progress(what: str) -> Generator[Teller]:
    """A bar on stderr, or lines now and then where that is no terminal; nothing where the command is quiet."""
    if _loudness == Loudness.QUIET:
        yield Teller()
    elif not ERR.is_terminal:
        yield _Lines(what)
    else:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True)
        with Progress(*columns, console=ERR, transient=True) as bar:
            yield _Bar(what, bar)


@contextmanager
def kept_on_interrupt(what: str, kept: str) -> Generator[Teller]:
    """Progress; Ctrl-C tells how far it is and how to resume."""
    with progress(what) as tell:
        try:
            yield tell
        except KeyboardInterrupt as error:
            done, total = tell.reached
            message = f"{done} of {total} {kept}. Run the same command again to continue."
            say(message, label=in_words(error))
            raise typer.Exit(exit_code(error)) from error
