"""Parsers of the options: paths, texts and numbers, refused with advice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import typer

from semgrad_guard.declared import Bounds
from semgrad_guard.named import did_you_mean
from semgrad_guard.questions.data import NO_PASSAGE
from semgrad_guard.questions.data_files import read_text


def path(value: str | Path) -> Path:
    """A path that names something on disk: "./-" is the file of that name, and "-" is none."""
    found = stream(value)
    if str(found) == _STANDARD:
        raise typer.BadParameter("it takes no stdin or stdout; name a file (./- is the file with that name)")
    return found


def stream(value: str | Path) -> Path:
    """A path as `path` reads it, or "-", which is standard input or output."""
    if isinstance(value, Path):
        return value
    if not value.strip() or "\0" in value:
        raise typer.BadParameter("the path is empty; name a file or a folder" if not value.strip() else _NULL)
    found = Path(value)
    return Path.cwd() / found if str(found) in _NO_FILES and str(found) != value else found


def one_from_stdin(**given: object) -> None:
    """Refuse options of which two would read standard input, which can be read once."""
    named = [
        f"--{name.replace('_', '-')}" for name, value in given.items() if str(value) in (_STANDARD, f"@{_STANDARD}")
    ]
    if len(named) > 1:
        raise typer.BadParameter(f"stdin can be read once: only one of {' and '.join(named)} can be -")


def wording(value: str) -> str:
    """A name of a wording, a template with places in it, or @FILE with one."""
    if value not in ("plain", "paper") and not value.startswith("@") and "{" not in value:
        raise typer.BadParameter(f"{value[:60]!r} is neither plain, paper, nor a template with {{question}} in it")
    return text(value)


def text(value: str) -> str:
    """A text that UTF-8 can write: bytes of another encoding arrive as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"the text is not UTF-8 (character {error.start + 1})") from error
    return value


def some_text(value: str) -> str:
    """A text with something in it, where \\n is a line break."""
    if not value:
        raise typer.BadParameter("the text is empty")
    return text(value.replace("\\n", "\n"))


def number(kind: type[int] | type[float], bounds: Bounds) -> Callable[[Any], float]:
    """Reads a finite number of this kind within bounds."""

    def read(value: Any) -> float:
        try:
            found = kind(value)
        except (ValueError, OverflowError):
            named = "a whole number" if kind is int else "a number"
            raise typer.BadParameter(f"{str(value)[:40]!r} is not {named}") from None
        if isinstance(found, float) and not math.isfinite(found):
            raise typer.BadParameter(f"{found} is not a finite number")
        if found not in bounds:
            shown = f"{found:g}" if isinstance(found, float) else str(found)[:40]
            raise typer.BadParameter(f"{shown} is out of range: it is {bounds}")
        return found

    return read


_ID_DIGITS = 16
_STANDARD = "-"
_NO_FILES = (_STANDARD, "pocket")
"""Names of other sources of data; with ./ before it, each is a file."""
_NULL = "it holds a null character, which no name can"


def passage_field(value: str) -> str:
    """The name of a field that can hold a passage."""
    if value in NO_PASSAGE:
        raise typer.BadParameter(f'"{value}" is not a passage to answer from: it means something else in the data')
    return text(value)


def grader(value: str) -> str:
    """The name of a grader, perhaps with a model."""
    from semgrad_guard.grading.by_name import require_kind

    return require_kind(text(value))


def calibration_id(value: str) -> str:
    """The id of a calibration, as `calibrate` shows it: 16 hex digits."""
    if len(value) != _ID_DIGITS or set(value) - set("0123456789abcdef"):
        raise typer.BadParameter(
            f"{value[:40]!r} is not the id of a calibration, which has {_ID_DIGITS} hex digits (0-9, a-f)"
        )
    return value


def quantization(value: str | dict[str, Any]) -> dict[str, Any]:
    """A quantization config as transformers reads it, an object in JSON: typed, or in a file that @ names."""
    if isinstance(value, dict):
        return value
    return _object(text(value)) or {}


def engine(value: str | dict[str, Any]) -> dict[str, Any] | None:
    """Who writes the answers: transformers (None), or vLLM with these arguments of `vllm.LLM`, an object in JSON."""
    if isinstance(value, dict):
        return value
    name, given, arguments = text(value).partition("=")
    if name not in ("transformers", "vllm") or (given and name == "transformers"):
        raise typer.BadParameter('give transformers, vllm, or vllm with arguments: vllm={"max_model_len": 4096}')
    if name == "transformers":
        return None
    found = _object(arguments) if given else {}
    if found is None:
        raise typer.BadParameter('what follows vllm= is an object: vllm={"max_model_len": 4096}')
    return found


def template_option(value: str | tuple[str, Any]) -> tuple[str, Any]:
    """An option of the chat template and its value in JSON; a text needs no quotes."""
    if isinstance(value, tuple):
        return value
    name, given, given_value = text(value).partition("=")
    if not given or not name.isidentifier():
        raise typer.BadParameter("give a name and a value in JSON: enable_thinking=false")
    try:
        return name, json.loads(given_value)
    except (ValueError, RecursionError):
        if given_value in ("True", "False", "None") or given_value[:1] in ("", "{", "[", '"'):
            raise typer.BadParameter(
                f"{given_value[:40]!r} is not a value in JSON, such as true, false, null or 3"
            ) from None
        return name, given_value


def _object(given: str) -> dict[str, Any] | None:
    """An object in JSON, typed, or in a file that @ names; None if it is something else."""
    if given.startswith("@"):
        given = read_text(path(given[1:]))
    try:
        found: Any = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"it is not JSON: {error}; give an object, or @FILE") from error
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A parser that takes one of these names."""

    def parse(value: str) -> str:
        if value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}.{did_you_mean(value, names)}")
        return value

    return parse


def completing(names: Sequence[str]) -> Callable[[str], list[str]]:
    """A shell's completions for an option that takes one of these names."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return offered
