"""The options that several commands share, and those of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from semgrad_guard.declared import Bounds, Option
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.loading import ESTIMATOR_NAMES
from semgrad_guard.settings import (
    ANSWERS,
    DECISION,
    MODEL,
    UNCERTAINTY,
    AnswerLimit,
    AnswerOptions,
    JudgedBy,
    Seed,
    Stop,
    require_name,
)

# The groups in which `--help` lists options.
CLUSTER = "Cluster"
DATA = "Data and files"
GRADING = "Grading"
OUTPUT = "What is shown"

METHOD_NAMES = (*ESTIMATOR_NAMES, *sorted(NEEDS_LABELS))
GraderName = Literal["contains", "exact-match", "token-f1", "rouge-l"]

DEFAULT_GRADER = "contains; exact-match without a chat template"


def grader_option(description: str) -> Option:
    """The option that names a grader."""
    names = get_args(GraderName)
    return Option(description, GRADING, reads="grader", shown=DEFAULT_GRADER, completions=names)


ProbeFile = Annotated[
    Path | None, Option("Made by `probe`: the token it recommends is used.", MODEL, "FILE", spelled="--probe")
]
By = Annotated[
    Literal["sentence", "clause"] | None,
    Option("Score every sentence or clause of a text by itself, and mark the doubtful ones.", UNCERTAINTY, "UNIT"),
]
CalibrationFile = Annotated[
    Path | None,
    Option(
        "Made by `calibrate`: gives confidence, a threshold and its promise.", DECISION, "FILE", spelled="--calibration"
    ),
]
Labels = Annotated[
    Path | None,
    Option(
        "A sheet of labels, filled in by people: it decides then. It is begun, or extended by the answers that it "
        "lacks, and never overwritten.",
        GRADING,
        "FILE",
        reads="stream",
    ),
]
BatchSize = Annotated[int, Option("Questions answered at once.", ANSWERS, "N", Bounds(1, 1_000_000))]
Since = Annotated[str, Option("From when on: 7d, 12h, 30m, 2w, or 2026-01-31 (UTC).", DATA, "TIME")]
Strict = Annotated[bool, Option("Stop at the first broken line of the data file.", DATA, spelled="--strict")]
AsJson = Annotated[bool, Option("JSON on stdout and nothing else there.", OUTPUT, spelled="--json")]
System = Annotated[
    str | None, Option("A system message before the question; @FILE reads it from a file.", ANSWERS, "TEXT")
]


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How questions are put to the model."""

    system: System = None
    prompt: Annotated[
        str,
        Option(
            "plain, paper (answer in few words), or the user's turn as your program words it, with {question} and "
            "perhaps {context} in it, and other braces doubled; @FILE reads it from a file.",
            ANSWERS,
            "TEXT",
            reads="wording",
            completions=("plain", "paper"),
        ),
    ] = "plain"
    few_shot: Annotated[
        Path | None,
        Option(
            "Examples that go before every question, as turns: questions and answers as in --data.",
            ANSWERS,
            "FILE",
            spelled="--few-shot",
        ),
    ] = None
    shots: Annotated[
        int | None, Option("How many of the examples, from the first on.", ANSWERS, "N", Bounds(1, 1000), shown="all")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Decoding(AnswerOptions):
    """How a command has answers written: a sampled one is repeated by the same command."""

    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where the data has other names than usual."""

    question_field: Annotated[
        str | None,
        Option(
            "The column with the question, if its name is not a usual one (question, query, user_input, ...).", DATA
        ),
    ] = None
    context_field: Annotated[
        str | None,
        Option(
            "The column with the passage to answer from, if its name is not a usual one (context, contexts, ...).",
            DATA,
            reads="passage_field",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AnsweredColumns(Columns):
    """The same, with references."""

    answers_field: Annotated[
        str | None,
        Option(
            "The column with the references, if its name is not a usual one (answers, ground_truth, reference, ...).",
            DATA,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(AnswerLimit):
    """How questions are answered."""

    by: JudgedBy | None = None
    stop: Stop = ()
    batch_size: BatchSize = 8
    ablations: Annotated[bool, Option("Also SemGrad's variants (three more replays an answer).", UNCERTAINTY)] = True
    sampled_questions: Annotated[
        int,
        Option(
            "How many questions of each kind the methods that draw samples take part in, a seeded choice; the "
            "others take all. All of them together draw 55 answers a question.",
            ANSWERS,
            "N",
            Bounds(1, 2**62),
        ),
    ] = 300
    sample_batch: Annotated[
        int | None,
        Option(
            "How many answers the methods that draw samples take at a time. Default: a batch.",
            ANSWERS,
            "N",
            Bounds(1, 1_000_000),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """The methods, and the models that they need."""

    methods: Annotated[
        list[str] | None,
        Option(
            f"A method to compare; repeat the option for several. There are {', '.join(METHOD_NAMES)}.",
            UNCERTAINTY,
            names=METHOD_NAMES,
            shown="all",
        ),
    ] = None
    nli: Annotated[
        str | None,
        Option("An NLI model: what means the same. Else equal words do.", UNCERTAINTY, "MODEL", check=require_name),
    ] = None
    cross_encoder: Annotated[
        str | None,
        Option("A cross-encoder: what matters in an answer (SAR).", UNCERTAINTY, "MODEL", check=require_name),
    ] = None
    seed: Annotated[int, Option("Repeats the samples of methods that sample.", ANSWERS, "N", Bounds(0, 2**31 - 1))] = 0


@dataclass(frozen=True, kw_only=True)
class Loud:
    """How much a command writes to stderr."""

    quiet: Annotated[bool, Option("On stderr errors and warnings only.", OUTPUT, spelled=("--quiet", "-q"))] = False
    verbose: Annotated[
        bool,
        Option(
            "On stderr also what libraries say, times, and where an error began.", OUTPUT, spelled=("--verbose", "-v")
        ),
    ] = False
