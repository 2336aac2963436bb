"""The options of the commands: how each is read. Their texts, and the ends of the help pages, are in `help.toml`.

A command is a function of plain values; `described` makes an option of typer's of each of its parameters. A wrong value
is wrong usage: exit code 2, with advice.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from semgrad_guard.decision_log.savings import Price
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.files import table_of
from semgrad_guard.loading import ESTIMATOR_NAMES
from semgrad_guard.named import FETCHABLE, NAMES, did_you_mean
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
