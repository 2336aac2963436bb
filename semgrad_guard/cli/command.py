"""Turns a function into a command: signals and errors end it with an exit code, and it is quiet or verbose.

Its options are derived from their declarations in `semgrad_guard.settings`.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_origin

import typer
from pydantic import BaseModel, ValidationError
from rich.traceback import Traceback
from typer.core import TyperCommand

from semgrad_guard.cli import options, terminal, values
from semgrad_guard.cli.terminal import ERR, Loudness, is_verbose, say, speaking
from semgrad_guard.declared import Declared, declared_option, declared_options, first_fault
from semgrad_guard.errors import InputError, SemGradGuardError

Reader = Callable[[Any], Any]


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


def flowing(doc: str | None) -> str:
    """A docstring whose paragraphs are one line each: the terminal decides where they break."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (doc or "").split("\n\n")).strip()


@dataclass(frozen=True)
class Derived:
    """The parameters of a command, with those of a class of options spread out, and the way back."""

    parameters: list[inspect.Parameter]
    groups: Mapping[str, type[Any]]

    def collected(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the function: options of a class are put into one object.

        Raises:
            BadParameter: two options contradict each other.
        """
        for name, group in self.groups.items():
            options = {parameter.name: given.pop(parameter.name) for parameter in parameters_of(group)}
            given[name] = _made(group, {key: value for key, value in options.items() if value is not None})
        return given


def derive(function: Callable[..., Any]) -> Derived:
    """The parameters of a command, as typer reads them."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        kind: Any = parameter.annotation
        if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel)):
            groups[parameter.name] = kind
            parameters += parameters_of(kind)
        else:
            option = declared_option(parameter.name, kind, parameter.default)
            parameters.append(parameter if option is None else parameter.replace(annotation=_annotation(option)))
    return Derived(parameters, groups)


def parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    """The options of a class that the command line has, as parameters of a function."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if declared.option.several else declared.default,
            annotation=_annotation(declared),
        )
        for name, declared in declared_options(group).items()
        if declared.option.panel is not None
    ]


def _annotation(declared: Declared) -> Any:
    option, name = declared.option, declared.name.replace("_", "-")
    usual = f"--{name}/--no-{name}" if declared.default is True else f"--{name}"
    spelled = (option.spelled,) if isinstance(option.spelled, str) else option.spelled or (usual,)
    if declared.kind is bool:
        return Annotated[bool, typer.Option(*spelled, help=option.description, rich_help_panel=option.panel)]
    is_literal = get_origin(declared.kind) is Literal
    completed = option.names or option.completions
    info: Any = typer.Option(
        *spelled,
        metavar=option.metavar,
        parser=None if is_literal else _reader(declared),
        autocompletion=values.completing(completed) if completed else None,
        help=option.description,
        show_default=option.shown or True,
        envvar=option.variable,
        rich_help_panel=option.panel,
    )
    kind: Any = declared.kind if is_literal else str
    if option.several or get_origin(declared.kind) is list:
        kind = list[kind]
    return Annotated[kind | None if declared.default is None or option.several else kind, info]


def _reader(declared: Declared) -> Reader:
    """A parser: what an option's type tells of it, and then the option's own check."""
    option, kind = declared.option, declared.element
    if option.reads is not None:
        read: Reader = getattr(values, option.reads)
    elif kind in (int, float):
        read = values.number(kind, option.bounds)
    elif kind is Path:
        read = values.path
    else:
        read = values.one_of(declared.choices) if declared.choices else values.text

    def checked(value: Any) -> Any:
        try:
            return option.checked(read(value))
        except (InputError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error

    return checked


def _made(group: type[Any], given: dict[str, Any]) -> Any:
    """An object of the class; repeated values are in the container that it declares: a tuple, or a mapping."""
    kinds = {name: get_origin(option.kind) for name, option in declared_options(group).items()}
    given = {name: kinds[name](value) if kinds[name] in (dict, tuple) else value for name, value in given.items()}
    try:
        return group(**given)
    except ValidationError as error:
        raise typer.BadParameter(first_fault(error, place=False)) from error


_LONGEST = 600
"""Letters of a message: an argument may be a whole file."""

# Newer versions of typer bring a click of their own, whose errors are not those of click.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
_CLOSED = "stdout is closed, so nothing could be shown. Send it somewhere, for example to a file or /dev/null."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Command(TyperCommand):
    """Takes an option once, and keeps messages short."""

    def get_help_option(self, ctx: Any) -> Any:
        """`--help` among the options of the output, and not in a group of its own."""
        found: Any = super().get_help_option(ctx)
        if found is not None:
            found.rich_help_panel = options.OUTPUT
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of this command."""
        try:
            if not ctx.resilient_parsing:  # else a shell completes a command line
                parser: Any = self.make_parser(ctx)
                order: list[Any] = parser.parse_args(args=list(args))[2]
                single = [option for option in order if not getattr(option, "multiple", False) and not option.is_eager]
                # Of an option that is given twice one would be lost, and only one was meant.
                if twice := [option for option in single if single.count(option) > 1]:
                    names = " or ".join([*twice[0].opts, *twice[0].secondary_opts])
                    raise _UsageError(f"{names} is given {single.count(twice[0])} times; give it once.")
            return super().parse_args(ctx, args)
        except _UsageError as error:
            # typer's check of values is pydantic's, which puts these words before everything
            text = str(cast("Any", error).message).removeprefix("Value error, ")
            cast("Any", error).message = _short(text)
            raise


def add(app: typer.Typer, function: Callable[..., None], epilog: str, *, continues: bool) -> None:
    """Make the function a command of the program, with --quiet and --verbose.

    `continues` tells that a run which was stopped resumes when the same command is run again.
    """
    app.command(cls=Command, help=flowing(function.__doc__), epilog=epilog)(_guarded(function, continues))


def _guarded(function: Callable[..., None], continues: bool) -> Callable[..., None]:
    """The function with --quiet and --verbose. Our own errors end it with a message and code 1, and so do those of the
    system; Ctrl-C with 130, other signals alike. Anything else is a bug, and shows."""
    derived = derive(function)
    how_to_go_on = "Run the same command again to continue." if continues else "Nothing is kept."

    @functools.wraps(function)
    def wrapped(*, quiet: bool = False, verbose: bool = False, **given: Any) -> None:
        if quiet and verbose:
            raise typer.BadParameter("give --quiet or --verbose, not both")
        if cast("Any", sys.stdout) is None:
            say(_CLOSED, label="Error", style="bold red")
            raise typer.Exit(ExitCode.ERROR)
        with (
            terminal.orderly_end(),
            speaking(Loudness.QUIET if quiet else Loudness.VERBOSE if verbose else Loudness.NORMAL),
        ):
            try:
                try:
                    function(**derived.collected(given))
                finally:
                    sys.stdout.flush()  # here, where an error has a message, and not when Python ends
            except KeyboardInterrupt as error:
                say(f"{terminal.in_words(error)}. {how_to_go_on}", style="bold yellow")
                raise typer.Exit(terminal.exit_code(error)) from error
            except BrokenPipeError as error:
                say("The reader of stdout closed it before everything was written.", label="Error", style="bold red")
                _let_go_of_stdout()
                raise typer.Exit(ExitCode.ERROR) from error
            except (SemGradGuardError, OSError, MemoryError, RuntimeError) as error:
                message = _message(error)
                if message is None:
                    raise
                if is_verbose():
                    ERR.print(Traceback.from_exception(type(error), error, error.__traceback__))
                say(message, label="Error", style="bold red")
                _let_go_of_stdout()
                raise typer.Exit(ExitCode.ERROR) from error

    parameters = [*derived.parameters, *parameters_of(options.Loud)]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    cast("Any", wrapped).__signature__ = inspect.Signature(parameters)
    return wrapped


def _let_go_of_stdout() -> None:
    """Drop the rest of stdout: Python would try to write it once more at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: Exception) -> str | None:
    if isinstance(error, SemGradGuardError):
        return _short(str(error))
    if isinstance(error, OSError):
        place = f" ({_short(str(error.filename))})" if error.filename else ""
        advice = "Make room, or write elsewhere." if error.errno in _FULL else "Check the place and your rights to it."
        return f"The system refuses: {error.strerror or error}{place}. {advice}"
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        text = str(error).partition("\n")[0] or "nothing more is known."
        return f"Not enough memory: {_short(text)} Try a smaller --batch-size or shorter texts."
    return None


def _short(message: str) -> str:
    """A message of bearable length, its beginning and its end."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST // 2].rstrip()} … {message[-_LONGEST // 2 :].lstrip()}"
