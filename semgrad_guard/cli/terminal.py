"""What every command does alike: where text goes, how errors end, how long work shows how far it is."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from semgrad_guard.cli.help import ExitCode
from semgrad_guard.errors import SemGradGuardError

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)

P = ParamSpec("P")


def typed_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Our own errors end a command with a message and code 1, Ctrl-C with 130; anything else is a bug, and shows."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except SemGradGuardError as error:
            say(str(error), label="Error", style="bold red")
            raise typer.Exit(ExitCode.ERROR) from error
        except KeyboardInterrupt as error:
            say("Interrupted.", style="bold yellow")
            raise typer.Exit(ExitCode.INTERRUPTED) from error

    return wrapped


def say(message: str, *, label: str | None = None, style: str = "yellow") -> None:
    """A line on stderr, never wrapped where it goes into a file or a pipe."""
    head = Text(f"{label}: " if label else "", style=style)
    ERR.print(head + Text(printable(message)), soft_wrap=not ERR.is_terminal)


def say_problems(problems: Sequence[object], *, label: str = "Warning") -> None:
    """One line for each thing that was wrong with a file."""
    for problem in problems:
        say(str(problem), label=label)


def printable(text: str) -> str:
    """A model's or a file's text, safe to show: control characters could drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


class _Rate(ProgressColumn):
    """Answers per second since the work began or was taken up again."""

    def render(self, task: Task) -> Text:
        speed = task.speed
        return Text("" if speed is None else f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each", style="dim")


@contextmanager
def progress(what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on stderr, or lines now and then where that is no terminal; yields `tell(done, total)`, which moves it."""
    if not ERR.is_terminal:
        yield _Lines(what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Progress for logs: the start, then a line every ten seconds at most, with rate and time left."""

    def __init__(self, what: str, *, every: float = 10.0) -> None:
        self._what, self._every = what, every
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = done
            say(f"{self._what}: {done} of {total}")
        elif now - self._said >= self._every and done > self._first:
            self._said = now
            rate = (done - self._first) / (now - self._began)
            left = datetime.timedelta(seconds=round((total - done) / rate))
            say(f"{self._what}: {done} of {total}, {rate:.2g}/s, {left} left")
