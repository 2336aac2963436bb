"""The options of the program: how each is read, and the files, models, prompts, data and policies that they name.

A command is a function of plain values; `described` makes an option of typer's of each of its parameters. The texts of
the options, and the ends of the help pages, are in `help.toml`. A wrong value is wrong usage: exit code 2, with advice.
torch is imported when a model is loaded.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from semgrad_guard import loading
from semgrad_guard.cli.terminal import detail, is_verbose, note, note_problems, say, say_problems, status
from semgrad_guard.decision_log.entries import Price
from semgrad_guard.errors import InputError, SemGradGuardError
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.files import STDIN, require_writable, table_of
from semgrad_guard.loading import ESTIMATOR_NAMES, ModelSource
from semgrad_guard.named import FETCHABLE, NAMES, did_you_mean
from semgrad_guard.questions.data import Need, Phrasing, QuestionFile, read_questions
from semgrad_guard.questions.data_files import read_text
from semgrad_guard.settings import REPORTED, OnNoThreshold

if TYPE_CHECKING:
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.guard import Policy

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
            found = kind(value if str(value).isascii() else "")  # Python reads the digits of every script
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
    if (parts := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)/([0-9]+(?:\.[0-9]+)?)", value.strip())) is None:
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


# Files that a command writes.


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


# Models, prompts, data and policies.

Pairs = list[Any]
"""(name, value) of an option that is given several times."""
BATCH = 16
"""Answers that are requested together; where the memory is short, the engine writes fewer at a time."""


def engine_arguments(engine: str) -> dict[str, Any] | None:
    """The arguments of `vllm.LLM`; None where transformers or a server writes the answers."""
    name, _, arguments = engine.partition("=")
    return cast("dict[str, Any]", json.loads(arguments or "{}")) if name == "vllm" else None


def server_of(engine: str) -> str | None:
    """The URL of the server that writes the answers, if one does."""
    return engine if engine.startswith(("http://", "https://")) else None


def source_of(
    model: str, *, dtype: Any, device: str | None, template_option: Pairs | None, engine: str = "transformers"
) -> ModelSource:
    """The model of the options.

    Raises:
        BadParameter: two of them contradict each other.
    """
    source = ModelSource(
        model=model,
        dtype=dtype,
        device=device,
        template_option=dict(template_option or ()) or None,
        engine=engine_arguments(engine),
    )
    if source.clash is not None:
        raise typer.BadParameter(source.clash)
    if server_of(engine) is not None and source != ModelSource(model=model):
        raise typer.BadParameter(
            "--dtype, --device and --template-option are for a model here, and a server writes the answers"
        )
    return source


def load(source: ModelSource) -> LanguageModel:
    """The model, while the terminal shows its name."""
    began = time.monotonic()
    with status(f"Loading {source.model} …"):
        model = source.load(verbose=is_verbose())
    for doubt in model.doubts:
        note(doubt, label="Warning")
    if (slow := model.slow_dtype) is not None:
        note(
            f"This processor has no instructions for {slow}: prompts and batches take several times as long as with "
            "--dtype float32. A calibration belongs to one dtype."
        )
    if is_verbose():
        identity = model.identity
        detail(
            f"{identity.name} is loaded in {time.monotonic() - began:.1f} s: {model.n_layers} layers, "
            f"{identity.dtype}, fingerprint {identity.fingerprint}, "
            f"chat template {identity.template}, window {model.context_window}"
        )
    return model


@contextmanager
def quietly(what: str) -> Generator[None]:
    """Show a status, and keep the libraries quiet that would show their own."""
    with status(what):
        if not is_verbose():
            loading.silence_libraries()
        yield


def text_or_file(given: str) -> tuple[str, list[Path]]:
    """A text, and the file that it was read from ("@FILE"), if it was."""
    if not given.startswith("@"):
        return given, []
    file = path(given[1:]) if given != f"@{STDIN}" else STDIN
    return read_text(file).removesuffix("\n"), [file]


def phrasing(prompt: str, system: str | None) -> tuple[Phrasing, list[Path]]:
    """How questions are put to the model, and the files that the options read it from."""
    system, files = (None, []) if system is None else text_or_file(system)
    if prompt == "plain" or prompt == "paper":
        return Phrasing(system, prompt), files
    template, read = text_or_file(prompt)
    return Phrasing(system, "plain", template), [*files, *read]


def read_data(
    data: str | Path,
    columns: Pairs | None = None,
    *,
    needs: Need = "answers",
    strict: bool = False,
    keeps: bool = False,
) -> QuestionFile:
    """The questions of a source. Repeated lines that are left out are named, unless the caller keeps them."""
    with status(f"Reading {data} …"):
        found = read_questions(data, needs=needs, strict=strict, columns=dict(columns or ()))
    say_problems(found.problems)
    note_problems([*(() if keeps else found.duplicates), *found.shared_ids])
    if found.unread:
        names = ", ".join(f'"{name}"' for name in found.unread)
        note(f"columns that are not read: {names}.")
    if needs == "answers" and (nowhere := sum(not row.answers for row in found.rows)):
        note(f"{nowhere} of {len(found.rows)} questions have no right answer: every claim is wrong there.")
    return found


def load_policy(calibration: Path | None, on_no_threshold: OnNoThreshold) -> Policy | None:
    """The policy of a calibration, if there is one, with a word where its promise is another than the requested one."""
    policy = loading.load_policy(calibration, loading.PolicyOptions(on_no_threshold=on_no_threshold))
    made = None if policy is None else policy.calibration
    if made is not None and (made.requested is not None or made.reachable is not None):
        from semgrad_guard.calibration.calibration_record import offer, promise

        text = promise(made) if made.reachable is None else f"The calibration has no threshold. {offer(made)}"
        say(text, label="Promise")
    return policy
