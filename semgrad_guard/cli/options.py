"""The options that several commands share, with `--estimator` and `--by sentence`, and those of `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args

import typer

from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.loading import ESTIMATOR_NAMES, EstimatorChoice, load_estimator
from semgrad_guard.settings import (
    ANSWERS,
    DECISION,
    MODEL,
    REPORTED,
    UNCERTAINTY,
    AnswerLimit,
    AnswerOptions,
    JudgedBy,
    OnDoubt,
    ScoringOptions,
    Seed,
    SentenceForm,
    Stop,
    require_name,
)

if TYPE_CHECKING:
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.guard import Policy


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
    Literal["sentence"] | None,
    Option("Score every sentence of a text by itself, and mark the doubtful ones.", UNCERTAINTY, "UNIT"),
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


E = TypeVar("E", bound="Estimator")


@dataclass(frozen=True, kw_only=True)
class EstimatorSpec(EstimatorChoice, ScoringOptions):
    """The options; None leaves a setting to the calibration, or to the estimator's own default."""

    def make(self, policy: Policy | None = None) -> Estimator:
        """The estimator of that name, or the policy's own without one, with the settings that were given.

        Raises:
            BadParameter: it takes no such setting.
            InputError: a setting is out of its range.
            CalibrationError: the policy's own estimator cannot be made again from its calibration.
        """
        return self.set_on(load_estimator(self.estimator, policy))

    def set_on(self, estimator: E) -> E:
        """The estimator with the settings that were given.

        Raises:
            BadParameter: it takes no such setting; the message names those that do.
        """
        for name in self._given:
            if name not in _settings_of(estimator):
                from semgrad_guard.estimators import KIND_OF

                takers = ", ".join(taker for taker, kind in KIND_OF.items() if name in _settings_of(kind))
                raise typer.BadParameter(f"{estimator.name} takes no --{name.replace('_', '-')}: it is for {takers}")
        return self.set_where_taken(estimator)

    def set_where_taken(self, estimator: E) -> E:
        """The estimator with those of the given settings that it takes: for many at once."""
        taken = {name: value for name, value in self._given.items() if name in _settings_of(estimator)}
        return cast("E", replace(cast(Any, estimator), **taken))

    @property
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "estimator" and value is not None}


@dataclass(frozen=True, kw_only=True)
class LearnedEstimatorSpec(EstimatorSpec):
    """The same, with estimators that are fitted on a part of the answers."""

    estimator: Annotated[
        str,
        Option(
            f"How uncertainty is measured: {', '.join(ESTIMATOR_NAMES)}; states, which is fitted on a part of the "
            "answers; or auto, the best of seven of these on that part.",
            UNCERTAINTY,
            names=tuple(dict.fromkeys((*METHOD_NAMES, "auto", *REPORTED))),
        ),
    ] = "hybridgrad"


def _settings_of(estimator: Any) -> set[str]:
    return {field.name for field in fields(estimator)}


def estimators_for(spec: EstimatorSpec) -> Sequence[Estimator]:
    """The estimators behind an `--estimator`: with it the scores that generating computes anyway, one of which takes
    the place of a learned one where there are too few labels. They share one replay unless a setting that only some of
    them take tells them apart."""
    from semgrad_guard.estimators import FusedStates
    from semgrad_guard.grading.candidates import FREE

    own: list[Estimator] = candidates_for(spec) if spec.estimator == "auto" else []
    if not own:
        own = [spec.set_on(FusedStates()) if spec.estimator in NEEDS_LABELS else spec.make()]
    return [*own, *(free for free in FREE if free.name not in [one.name for one in own])]


def candidates_for(spec: EstimatorSpec) -> list[Estimator]:
    """The estimators that `auto` compares."""
    from semgrad_guard.grading.candidates import CANDIDATES

    return [spec.set_where_taken(candidate) for candidate in CANDIDATES]


def learns(spec: EstimatorSpec) -> bool:
    """Whether the estimator is fitted, or chosen, on labels."""
    return spec.estimator == "auto" or spec.estimator in NEEDS_LABELS


Promise = Literal["sentence", "answer"]


@dataclass(frozen=True)
class Sentences:
    """The promise by sentence: the action at a doubtful one, and what is promised."""

    on_doubt: OnDoubt
    promise: Promise


@dataclass(frozen=True, kw_only=True)
class PromisedSentences(SentenceForm):
    """How answers are judged, and what is promised about their sentences."""

    promise: Annotated[
        Promise | None,
        Option(
            "By sentence: at most alpha of the cases in which one delivered sentence of an answer, drawn at random, is "
            "wrong (sentence), or of the answers that deliver a wrong one (answer).",
            DECISION,
            "sentence|answer",
            shown="sentence",
        ),
    ] = None

    def form(self) -> Sentences | None:
        """The promise; None: whole answers are judged.

        Raises:
            InputError: an option is about the other unit.
        """
        from semgrad_guard.guard.familiarity import judged_by

        on_doubt = judged_by(None, self.by, self.on_doubt)
        if on_doubt is None:
            if self.promise is not None:
                raise InputError("--promise is about sentences: give --by sentence, or leave it out")
            return None
        return Sentences(on_doubt, self.promise or "sentence")
