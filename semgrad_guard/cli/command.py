"""What makes a function a command: errors that end it, how much it says, and spellings that options once had."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import typer
from rich.traceback import Traceback
from typer.core import TyperCommand

from semgrad_guard.cli import options
from semgrad_guard.cli.help import ExitCode, flowing
from semgrad_guard.cli.terminal import ERR, Loudness, is_verbose, say, speaking
from semgrad_guard.errors import SemGradGuardError

_RENAMED = {"--max-new-tokens": "--max-tokens"}
_LONGEST = 600
"""Letters of a message: what was typed may be a whole file."""

# Newer versions of typer bring a click of their own, whose errors are no errors of click's.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Command(TyperCommand):
    """Takes an option by its old name, too, for one release, and says so; keeps messages short."""

    def get_help_option(self, ctx: Any) -> Any:
        """`--help` among the options that say what is shown, and not in a group of its own."""
        found: Any = super().get_help_option(ctx)
        if found is not None:
            found.rich_help_panel = options.OUTPUT
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of this command."""
        try:
            return super().parse_args(ctx, [_today(argument) for argument in args])
        except _UsageError as error:
            cast("Any", error).message = _short(cast("Any", error).message)
            raise


def add(app: typer.Typer, function: Callable[..., None], epilog: str) -> None:
    """Make the function a command of the program, with --quiet and --verbose."""
    app.command(cls=Command, help=flowing(function.__doc__), epilog=epilog)(_guarded(function))


def _guarded(function: Callable[..., None]) -> Callable[..., None]:
    """The function with --quiet and --verbose. Our own errors end it with a message and code 1, and so does what the
    system refuses; Ctrl-C with 130. Anything else is a bug, and shows."""

    @functools.wraps(function)
    def wrapped(*, quiet: bool = False, verbose: bool = False, **given: Any) -> None:
        if quiet and verbose:
            raise typer.BadParameter("give --quiet or --verbose, not both")
        with speaking(Loudness.QUIET if quiet else Loudness.VERBOSE if verbose else Loudness.NORMAL):
            try:
                try:
                    function(**given)
                finally:
                    sys.stdout.flush()  # here, where an error has a message, and not when Python ends
            except KeyboardInterrupt as error:
                say("Interrupted.", style="bold yellow")
                raise typer.Exit(ExitCode.INTERRUPTED) from error
            except BrokenPipeError:
                raise  # whoever read our output has seen enough: typer ends quietly
            except (SemGradGuardError, OSError, MemoryError, RuntimeError) as error:
                message = _message(error)
                if message is None:
                    raise
                if is_verbose():
                    ERR.print(Traceback.from_exception(type(error), error, error.__traceback__))
                say(message, label="Error", style="bold red")
                _let_go_of_stdout()
                raise typer.Exit(ExitCode.ERROR) from error

    signature = inspect.signature(function, eval_str=True)
    both = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("quiet", options.Quiet), ("verbose", options.Verbose))
    ]
    parameters = [*signature.parameters.values(), *both]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    cast("Any", wrapped).__signature__ = signature.replace(parameters=parameters)
    return wrapped


def _let_go_of_stdout() -> None:
    """What cannot be written to stdout is dropped: Python would try once more at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: Exception) -> str | None:
    """What to say of an error; None for a bug."""
    if isinstance(error, SemGradGuardError):
        return _short(str(error))
    if isinstance(error, OSError):
        place = f" ({_short(str(error.filename))})" if error.filename else ""
        advice = "Make room, or write elsewhere." if error.errno in _FULL else "Check the place and your rights to it."
        return f"The system refuses: {error.strerror or error}{place}. {advice}"
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        said = str(error).partition("\n")[0] or "nothing more is known."
        return f"Not enough memory: {_short(said)} Try a smaller --batch-size or shorter texts."
    return None


def _today(argument: str) -> str:
    """An option as it is spelled now."""
    name, equals, value = argument.partition("=")
    if name not in _RENAMED:
        return argument
    say(f"{name} is now {_RENAMED[name]}; the old name goes with the next release.", label="Warning")
    return f"{_RENAMED[name]}{equals}{value}"


def _short(message: str) -> str:
    """A message of bearable length, its beginning and its end."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST // 2].rstrip()} … {message[-_LONGEST // 2 :].lstrip()}"
