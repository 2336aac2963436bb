"""The options that several commands share, each the type of a parameter, and the readers of what they are given."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from semgrad_guard.errors import InputError
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.loading import ESTIMATOR_NAMES
from semgrad_guard.named import did_you_mean
from semgrad_guard.settings import LOG_VARIABLE, REPORTED, DtypeName, JudgedBy
from semgrad_guard.settings import OnCut as CutRule
from semgrad_guard.settings import OnDoubt as Doubt
from semgrad_guard.settings import OnNoThreshold as NoThreshold

# The groups in which `--help` lists options.
DATA = "Data and files"
MODEL = "Model"
DECISION = "Decision"
ANSWERS = "Answers"
GRADING = "Grading"
OUTPUT = "What is shown"

MODEL_HELP = (
    '"pocket" (the embedded model), "smollm2" (SmolLM2-135M-Instruct in four bits, once fetched), a folder with '
    "safetensors, a GGUF file, or a Hugging Face hub id"
)
METHOD_NAMES = (*ESTIMATOR_NAMES, *sorted(NEEDS_LABELS))
GRADER_NAMES = ("contains", "exact-match", "token-f1", "rouge-l")

Reader = Callable[[Any], Any]


def option(text: str, panel: str, metavar: str, *spelled: str, reads: Reader | None = None, **more: Any) -> Any:
    """An option of a command. `reads` makes a value of a text; the `text` itself names a default that is None."""
    return typer.Option(*spelled, help=text, rich_help_panel=panel, metavar=metavar, parser=reads, **more)


def grader_option(text: str) -> Any:
    """The option that names a grader."""
    return option(text, GRADING, "NAME", reads=grader, autocompletion=one_of(GRADER_NAMES)["autocompletion"])


def flag(text: str, panel: str, *spelled: str) -> Any:
    """An option without a value."""
    return typer.Option(*spelled, help=text, rich_help_panel=panel, metavar="", show_default=False)


# Readers. A wrong value is wrong usage: exit code 2, with advice.

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


def one_of(names: Sequence[str]) -> dict[str, Any]:
    """For an option that takes one of these names: a reader, and a shell's completions."""

    def read(value: str) -> str:
        if value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}.{did_you_mean(value, names)}")
        return value

    def completed(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return {"reads": read, "autocompletion": completed}


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


def column(value: str) -> str:
    """What a column holds, and its name."""
    held, _, name = value.partition("=")
    if held not in ("question", "answers", "context") or not name:
        raise typer.BadParameter("write what the column holds, and its name: question=NAME, answers=NAME, context=NAME")
    return value


def template_option(value: str) -> str:
    """An option of the chat template and its value in JSON; a text needs no quotes."""
    name, _, given = value.partition("=")
    try:
        json.loads(given)
    except (ValueError, RecursionError):
        if given in ("True", "False", "None") or given[:1] in ("", "{", "[", '"'):
            raise typer.BadParameter("give a name and a value in JSON: enable_thinking=false") from None
    if not name.isidentifier():
        raise typer.BadParameter("give a name and a value in JSON: enable_thinking=false")
    return value


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


def one_from_stdin(**given: object) -> None:
    """Refuse options of which two would read standard input, which can be read once."""
    named = [
        f"--{name.replace('_', '-')}" for name, value in given.items() if str(value) in (_STANDARD, f"@{_STANDARD}")
    ]
    if len(named) > 1:
        raise typer.BadParameter(f"stdin can be read once: only one of {' and '.join(named)} can be -")


# The options.

Questions = Annotated[
    Path,
    option(
        'A file or folder of JSON Lines, JSON, CSV or Parquet with "question" and "answers"; - is stdin, and pocket '
        "are questions about the world of the embedded model.",
        DATA,
        "FILE",
        reads=stream,
    ),
]
Columns = Annotated[
    list[str] | None,
    option(
        "A column with another name than usual: question=NAME, answers=NAME or context=NAME. Repeat the option for "
        "several.",
        DATA,
        "WHAT=NAME",
        "--column",
        reads=column,
    ),
]
Model = Annotated[str, option(f"{MODEL_HELP}.", MODEL, "NAME", reads=some_text)]
Dtype = Annotated[
    DtypeName | None,
    option(
        "The number format of the weights: float32, bfloat16 or float16. Default: that of the checkpoint. Scores and "
        "calibrations belong to it.",
        MODEL,
        "NAME",
    ),
]
Device = Annotated[
    str | None, option("Where the model goes: cpu, cuda, cuda:1. Default: cpu.", MODEL, "NAME", reads=some_text)
]
Template = Annotated[
    list[str] | None,
    option(
        "An option of the chat template, with its value in JSON; thinking=off has a model answer without reasoning "
        "first. Repeat the option for several.",
        MODEL,
        "NAME=VALUE",
        "--template-option",
        reads=template_option,
    ),
]
LocalEngine = Annotated[
    str,
    option(
        "What writes the answers of a model here: transformers or vllm (also with arguments of vllm.LLM: vllm={...}).",
        MODEL,
        "ENGINE",
        reads=engine,
    ),
]
Engine = Annotated[
    str,
    option(
        "What writes the answers: transformers, vllm (also with arguments of vllm.LLM: vllm={...}), or the URL of a "
        "server with OpenAI's protocol; --model is then its name for the model.",
        MODEL,
        "ENGINE",
        reads=engine,
    ),
]


def _estimator(names: Sequence[str], more: str, default: str) -> Any:
    text = f"The score that measures uncertainty: {', '.join(ESTIMATOR_NAMES)}{more}. Default: {default}."
    return option(text, DECISION, "NAME", **one_of(tuple(dict.fromkeys(names))))


_REPORTED = ", ".join(REPORTED)
_CALIBRATED = "that of the calibration, or hybridgrad"
Estimator = Annotated[str | None, _estimator(ESTIMATOR_NAMES, "", _CALIBRATED)]
LearnedEstimator = Annotated[
    str | None,
    _estimator(
        (*METHOD_NAMES, "auto", *REPORTED),
        "; states, which is fitted on a part of the graded answers; or auto, the best of eight on that part. Of a "
        f"server's answers {_REPORTED}",
        f"hybridgrad; of a server's answers {REPORTED[0]}",
    ),
]
ServedEstimator = Annotated[
    str | None,
    _estimator((*ESTIMATOR_NAMES, *REPORTED), f"; by a server's log-probabilities {_REPORTED}", _CALIBRATED),
]
CalibrationFile = Annotated[
    Path | None,
    option(
        "Made by calibrate: gives a confidence, a threshold and its promise.",
        DECISION,
        "FILE",
        "--calibration",
        reads=path,
    ),
]
OnNoThreshold = Annotated[
    NoThreshold,
    option(
        "Where no threshold keeps the promise that was asked for: abstain (deliver nothing), or reachable (deliver "
        "under the promise that the labels support).",
        DECISION,
        "ACTION",
    ),
]
By = Annotated[
    JudgedBy | None,
    option(
        "What is judged: the whole answer, or every sentence of it by itself. Default: as a calibration, if one is "
        "given; else answer.",
        DECISION,
        "answer|sentence",
    ),
]
OnDoubt = Annotated[
    Doubt | None,
    option(
        "By sentence, at one that is not let through: stop (end the answer before it), or drop (leave it out, with "
        "those that lean on it). Default: as a calibration, if one is given; else stop.",
        DECISION,
        "stop|drop",
    ),
]
RATE = number(float, 0.0001, 0.9999)
Alpha = Annotated[float, option("The error rate to promise among the answers let through.", DECISION, "X", reads=RATE)]
Delta = Annotated[
    float, option("How likely the promise may fail.", DECISION, "X", reads=number(float, 0.000001, 0.9999))
]
Prompt = Annotated[
    str,
    option(
        "The user's turn: plain (the question), paper (answer in few words), or your program's own, with {question} "
        "and perhaps {context} in it, and other braces doubled; @FILE reads it from a file.",
        ANSWERS,
        "TEXT",
        reads=wording,
    ),
]
System = Annotated[
    str | None, option("A system message before the question; @FILE reads it from a file.", ANSWERS, "TEXT")
]
OnCut = Annotated[
    CutRule,
    option(
        "Which answers that --max-tokens cut off have no score, and are withheld: unscored (those that end within "
        "their first sentence), abstain (all), or score (none).",
        DECISION,
        "unscored|abstain|score",
    ),
]
MaxTokens = Annotated[int, option("The longest answer, in tokens.", ANSWERS, "N", reads=number(int, 1, 2**31))]
Labels = Annotated[
    Path | None,
    option(
        "A sheet of labels, filled in by people: it decides then. It is begun, or extended by the answers that it "
        "lacks, and never overwritten.",
        GRADING,
        "FILE",
        reads=stream,
    ),
]
LogAddress = Annotated[
    str | None,
    option(
        "The decision log: a file (SQLite), or a URL such as postgresql+psycopg://user@host/name. Default: "
        "semgrad-guard/decisions.db in your state folder.",
        DATA,
        "FILE",
        reads=some_text,
        envvar=LOG_VARIABLE,
    ),
]
Since = Annotated[str, option("From when on: 7d, 12h, 30m, 2w, or 2026-01-31 (UTC).", DATA, "TIME")]
AsJson = Annotated[bool, flag("JSON on stdout and nothing else there.", OUTPUT, "--json")]
Quiet = Annotated[bool, flag("On stderr errors and warnings only.", OUTPUT, "--quiet", "-q")]
Verbose = Annotated[
    bool, flag("On stderr also what libraries say, times, and where an error began.", OUTPUT, "--verbose", "-v")
]
