"""The commands of the program: how each option is read, and how a command ends.

A command is a function of plain values; `described` makes an option of typer's of each of its parameters. The texts of
the options, and the ends of the help pages, are in `help.toml`. A wrong value is wrong usage: exit code 2, with advice.
Signals and errors end a command with an exit code, and it is quiet or verbose.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.traceback import Traceback
from typer.core import TyperCommand

from semgrad_guard.cli import terminal
from semgrad_guard.cli.terminal import ERR, Loudness, is_verbose, say, speak
from semgrad_guard.decision_log.entries import Price
from semgrad_guard.errors import InputError, SemGradGuardError
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.files import table_of
from semgrad_guard.loading import ESTIMATOR_NAMES
from semgrad_guard.named import FETCHABLE, NAMES, did_you_mean
from semgrad_guard.questions.data_files import require_writable
from semgrad_guard.settings import REPORTED

PAGES: dict[str, Any] = table_of("semgrad_guard.cli", "help.toml")
OUTPUT = "What is shown"
"""The group of options in which `--help` stands."""
METHOD_NAMES = (*ESTIMATOR_NAMES, *sorted(NEEDS_LABELS))
GRADER_NAMES = ("contains", "exact-match", "token-f1", "rouge-l")

Reader = Callable[[Any], Any]

_STANDARD = "-"
_NO_FILES = (_STANDARD, "pocket")
"""Names of other sources of data; with ./ before it, each is a file."""


def path(value: str | Path) -> Path:
    """A path that names something on disk: "./-" is the file of that name, and "-" is none."""
    found = stream(value)
    if str(found) == _STANDARD:
        raise typer.BadParameter("it takes no stdin or stdout; name a file (./- is the file with that name)")
    return found


def stream(value: str | Path) -> Path:
    """A path as `path` reads it, or "-", which is standard input or output."""
    found = Path(value)
    if not str(value).strip():
        raise typer.BadParameter("the path is empty; name a file or a folder")
    return Path.cwd() / found if str(found) in _NO_FILES and str(found) != str(value) else found


def number(kind: type[int] | type[float], low: float, high: float) -> Reader:
    """Reads a finite number of this kind, from low to high."""

    def read(value: Any) -> float:
        try:
            found = kind(value)
        except (ValueError, OverflowError):
            named = "a whole number" if kind is int else "a number"
            raise typer.BadParameter(f"{str(value)[:40]!r} is not {named}") from None
        if not low <= found <= high or not math.isfinite(found):
            shown = f"{found:g}" if isinstance(found, float) else str(found)[:40]
            raise typer.BadParameter(f"{shown} is out of range: it is at least {low:g} and at most {high:,}")
        return found

    return read


def one_of(names: Sequence[str]) -> Reader:
    """Reads one of these names."""

    def read(value: str) -> str:
        if value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}.{did_you_mean(value, names)}")
        return value

    return read


def some_text(value: str) -> str:
    """A text; a name that is empty is none."""
    if not value.strip():
        raise typer.BadParameter("it is empty")
    return value


def grader(value: str) -> str:
    """The name of a grader, perhaps with a model."""
    from semgrad_guard.grading.by_name import require_kind

    try:
        return require_kind(value)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


def wording(value: str) -> str:
    """A name of a wording, a template with places in it, or @FILE with one."""
    if value not in ("plain", "paper") and not value.startswith("@") and "{" not in value:
        raise typer.BadParameter(f"{value[:60]!r} is neither plain, paper, nor a template with {{question}} in it")
    return value


def column(value: str) -> tuple[str, str]:
    """What a column holds, and its name."""
    held, _, name = value.partition("=")
    if held not in ("question", "answers", "context") or not name:
        raise typer.BadParameter("write what the column holds, and its name: question=NAME, answers=NAME, context=NAME")
    return held, name


def template_option(value: str) -> tuple[str, Any]:
    """An option of the chat template and its value in JSON; a text needs no quotes."""
    name, _, given = value.partition("=")
    is_text = given[:1] not in ("", "{", "[", '"') and given not in ("True", "False", "None")
    try:
        if name.isidentifier():
            return name, json.loads(given)
    except (ValueError, RecursionError):
        if is_text:
            return name, given
    raise typer.BadParameter("give a name and a value in JSON: enable_thinking=false")


def writer(value: str) -> str:
    """The model itself, or the URL of a server and its model's name."""
    url, _, name = value.partition("#")
    if value == "itself" or (name and url.startswith(("http://", "https://"))):
        return value
    raise typer.BadParameter("give itself, or a server's URL and its model: http://localhost:8080/v1#large")


def engine(value: str) -> str:
    """vLLM, with its arguments as JSON perhaps, or the URL of a server."""
    name, given, arguments = value.partition("=")
    if value.startswith(("http://", "https://")) or value in ("transformers", "vllm"):
        return value
    try:
        if name == "vllm" and given and isinstance(json.loads(arguments), dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise typer.BadParameter(
        'give transformers, vllm, vllm with arguments (vllm={"max_model_len": 4096}), or the URL of a server'
    )


def price(value: str) -> Price:
    """A price for a million prompt tokens, and one for a million of answers."""
    if (parts := re.fullmatch(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", value.strip())) is None:
        raise typer.BadParameter(f"{value[:40]!r} is no price; write 2.5/10, for a million prompt and answer tokens")
    return Price(float(parts[1]), float(parts[2]))


def one_from_stdin(**given: object) -> None:
    """Refuse options of which two would read standard input, which can be read once."""
    named = [
        f"--{name.replace('_', '-')}" for name, value in given.items() if str(value) in (_STANDARD, f"@{_STANDARD}")
    ]
    if len(named) > 1:
        raise typer.BadParameter(f"stdin can be read once: only one of {' and '.join(named)} can be -")


_CHOICES: dict[str, Sequence[str]] = {
    "estimator": ESTIMATOR_NAMES,
    "calibrate.estimator": tuple(dict.fromkeys((*METHOD_NAMES, "auto", *REPORTED))),
    "serve.estimator": tuple(dict.fromkeys((*ESTIMATOR_NAMES, *REPORTED))),
    "methods": METHOD_NAMES,
    "fetch.name": tuple(FETCHABLE),
    "demo.model": NAMES,
}
"""The options that take one of some names, by parameter, or by command and parameter."""
_READERS: dict[str, Reader] = {
    **{name: one_of(names) for name, names in _CHOICES.items()},
    **dict.fromkeys(("data", "labels", "file"), stream),
    **dict.fromkeys(("output", "calibration", "answers", "band", "wheel", "api_key_file", "settings"), path),
    **dict.fromkeys(("model", "device", "nli", "host", "log"), some_text),
    **dict.fromkeys(("error", "auroc"), number(float, 0, 1)),
    **dict.fromkeys(("by_hand", "plan.labels", "ray"), number(int, 1, 1_000_000)),
    "serve.calibration": str,  # with several models, NAME=FILE
    "column": column,
    "template_option": template_option,
    "engine": engine,
    "prompt": wording,
    "grader": grader,
    "paraphrases": writer,
    "price": price,
    "alpha": number(float, 0.0001, 0.9999),
    "delta": number(float, 0.000001, 0.9999),
    "threshold": number(float, -1e300, 1e300),
    "timeout": number(float, 0.001, 86_400),
    "max_tokens": number(int, 1, 2**31),
    "limit": number(int, 1, 2**62),
    "size": number(int, 1, 100_000),
    "seed": number(int, 0, 2**31 - 1),
    "port": number(int, 0, 65535),
}
_WORDS = {"<estimators>": ", ".join(ESTIMATOR_NAMES), "<methods>": ", ".join(METHOD_NAMES)}


def described(command: str, parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter of a command with its option, or its argument if it is positional."""
    name, is_flag = parameter.name, parameter.annotation is bool
    text = PAGES[command].get("options", {}).get(name) or PAGES["shared"][name]
    key = f"{command}.{name}" if f"{command}.{name}" in _READERS else name
    offered = GRADER_NAMES if name == "grader" else _CHOICES.get(key, ())

    def completed(incomplete: str) -> list[str]:
        return [one for one in offered if one.startswith(incomplete)]

    shown: dict[str, Any] = {
        "help": re.sub("<[a-z]+>", lambda word: _WORDS[word[0]], flowing(text["help"])),
        "metavar": text.get("metavar", ""),
        "parser": _READERS.get(key),
        "autocompletion": completed if offered else None,
    }
    if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        return parameter.replace(annotation=Annotated[parameter.annotation, typer.Argument(**shown)])
    spelled = text.get("spelled", [f"--{name.replace('_', '-')}"])
    shown |= {"rich_help_panel": text["panel"], "envvar": text.get("envvar"), "show_default": not is_flag}
    return parameter.replace(annotation=Annotated[parameter.annotation, typer.Option(*spelled, **shown)])


def page_end(command: str) -> str:
    """The end of a command's page: examples, a line of the data file with its optional fields, advice, exit codes."""
    page = PAGES[command]
    parts = ["\n".join(["[bold]Examples[/]", *page["examples"]])]
    if "line" in page:
        optional = f" {page['optional']}" if "optional" in page else ""
        parts.append(f"[bold]A line of the file[/]{optional}\n{page['line']}")
    parts += [flowing(page["advice"])] if "advice" in page else []
    return "\n\n".join([*parts, f"[bold]Exit codes[/]\n{flowing(page['exit_codes'])}"])


def flowing(text: str | None) -> str:
    """A text whose paragraphs are one line each: the terminal decides where they break."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n")).strip()


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


_LONGEST = 600
"""Letters of a message: an argument may be a whole file."""

# Newer versions of typer bring a click of their own, whose errors are not those of click.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
_CLOSED = "stdout is closed, so nothing could be shown. Send it somewhere, for example to a file or /dev/null."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Output:
    """A file that a command writes: its path, the name of its kind, and whether an existing file is of this kind.

    The module that writes a kind of file knows how to recognise it; `kind` completes "it is not a ...".
    """

    path: Path
    kind: str
    is_ours: Callable[[Path], bool]


def require_outputs(outputs: Iterable[Output], *, inputs: Iterable[Path]) -> None:
    """`require_writable` for all files of a command, which must be different ones and replace none of another kind.

    An existing file is replaced, or continued, if the command itself writes such files, or if it is empty. Another may
    be the only copy of a user's work: it is refused, and never overwritten.

    Raises:
        InputError: as `require_writable`, two outputs are one file, or an existing file is of another kind.
    """
    found: dict[str, Path] = {}
    read, wanted = list(inputs), list(outputs)
    for path in (output.path for output in wanted):
        require_writable(path, inputs=read)
        # Two names that differ in case only are one file on some systems.
        if (first := found.setdefault(str(path.resolve()).casefold(), path)) is not path:
            raise InputError(f"{first} and {path} are one file, and two outputs cannot share it. Choose another path.")
    for output in wanted:
        path = output.path
        if path.exists() and path.stat().st_size and not output.is_ours(path):
            raise InputError(
                f"{path} is there already, and it is not a {output.kind}, so it is not overwritten. Choose another "
                "path, or remove the file first."
            )


def read_by(read: Callable[[Path], object]) -> Callable[[Path], bool]:
    """Whether a file is one that `read` takes; a function of its path."""

    def is_taken(path: Path) -> bool:
        try:
            read(path)
        except (SemGradGuardError, OSError):
            return False
        return True

    return is_taken


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
