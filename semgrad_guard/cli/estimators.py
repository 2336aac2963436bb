"""`--estimator` and its settings, the estimators that they mean, and the way from answers to a calibration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from semgrad_guard.cli.grading import Grades
from semgrad_guard.cli.options import METHOD_NAMES
from semgrad_guard.declared import Option
from semgrad_guard.loading import ESTIMATOR_NAMES, EstimatorChoice, load_estimator
from semgrad_guard.settings import REPORTED, UNCERTAINTY, ScoringOptions

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding, EngineAnswers, EngineIdentity
    from semgrad_guard.calibration.calibration_set import Copies
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.evaluation.calibrating import Outcome
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.runs.answers import Answer
    from semgrad_guard.guard import Policy
    from semgrad_guard.records import PromptForm

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
            f"How uncertainty is measured: {', '.join(ESTIMATOR_NAMES)}; states or fused, which are fitted on a part "
            "of the answers (states needs no gradients); or auto, the best of eight of these on that part.",
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
    from semgrad_guard.evaluation.calibrating import FREE, LEARNED

    own: list[Estimator] = candidates_for(spec) if spec.estimator == "auto" else []
    if not own:
        own = [spec.set_on(LEARNED[str(spec.estimator)]) if spec.estimator in LEARNED else spec.make()]
    return [*own, *(free for free in FREE if free.name not in [one.name for one in own])]


def candidates_for(spec: EstimatorSpec) -> list[Estimator]:
    """The estimators that `auto` compares."""
    from semgrad_guard.evaluation.calibrating import CANDIDATES

    return [spec.set_where_taken(candidate) for candidate in CANDIDATES]


def learns(spec: EstimatorSpec) -> bool:
    """Whether the estimator is fitted, or chosen, on labels."""
    from semgrad_guard.evaluation.calibrating import LEARNED

    return spec.estimator == "auto" or spec.estimator in LEARNED


@dataclass(frozen=True)
class GradedOther:
    """The answers of another engine, and their grades."""

    run: OtherRun
    grades: Grades

    def answered(self, estimator: str, like: Binding) -> EngineAnswers:
        """Their part in a calibration; `like` is the binding of the first engine."""
        from semgrad_guard.calibration import EngineAnswers

        answers = [self.run.answers[i] for i in self.grades.rows]
        return EngineAnswers(
            [answer.uncertainty(estimator) for answer in answers],
            self.grades.correct,
            [answer.key for answer in answers],
            like.in_engine(self.run.engine).model_copy(update={"grader": self.grades.grader}),
        )


@dataclass(frozen=True)
class Graded:
    """Answered questions with their grades, their grader, and the forms of the prompts; all in one order.

    `also` are the answers of other engines to the same questions. An answer that was not to be graded has
    None. By sentence, `sentences` are the grades of each answer's.
    """

    rows: Sequence[Question]
    answers: Sequence[Answer]
    correct: Sequence[bool | None]
    grader: str
    prompts: Sequence[PromptForm | None] | None
    also: Sequence[GradedOther] = ()
    copies: Copies | None = None
    kinds: Sequence[str] | None = None
    sentences: Sequence[Sequence[bool]] | None = None

    def labels(self) -> str:
        """A digest of the answers and their grades."""
        grades = self.correct if self.sentences is None else map(list, self.sentences)
        rows = [[answer.key, right] for answer, right in zip(self.answers, grades, strict=True)]
        others = [[other.run.engine.fingerprint, *other.grades.correct] for other in self.also]
        return hashlib.sha256(json.dumps([rows, others]).encode()).hexdigest()[:16]


def outcome_of(
    spec: EstimatorSpec,
    graded: Graded,
    bind: Callable[[Estimator], Binding],
    *,
    named: str | None = None,
    **how: Any,
) -> Outcome:
    """Calibrate on graded answers; for a learned estimator and "auto", learn on a part of them first.

    `named` takes the scores of that name instead, which no model here has made. `how` are options of `calibrate`
    (alpha, delta, robust ...).
    """
    from semgrad_guard.evaluation.calibrating import (
        LEARNED,
        LearningSet,
        calibrate_best,
        calibrate_by_hand,
        calibrate_learned,
        calibrate_scored,
    )

    how = {"copies": graded.copies, **how}
    if "by_hand" in how:
        binding = cast("Any", bind)(None) if named is not None else bind(spec.make())
        scores = [answer.uncertainty(named or spec.make().name) for answer in graded.answers]
        how |= {"groups": [row.key for row in graded.rows], "binding": binding, "prompts": graded.prompts}
        return calibrate_by_hand(scores, graded.correct, **how)
    correct = [right is True for right in graded.correct]
    same = {
        "prompts": graded.prompts,
        "copies": graded.copies,
        "kinds": graded.kinds,
        "sentences": graded.sentences,
    }
    known = LearningSet.of(graded.rows, graded.answers, correct, **cast("dict[str, Any]", same))
    if named is not None:
        return calibrate_scored(known, named, binding=cast("Any", bind)(None), **how)
    if spec.estimator == "auto":
        return calibrate_best(known, candidates_for(spec), bind=bind, **how)
    if spec.estimator in LEARNED:
        return calibrate_learned(known, spec.set_on(LEARNED[str(spec.estimator)]), bind=bind, **how)
    estimator = spec.make()
    binding = bind(estimator)
    also = [other.answered(estimator.name, binding) for other in graded.also]
    return calibrate_scored(known, estimator, binding=binding, also=also, **how)


_OF_ENGINES = frozenset({"fingerprint", "dtype"})
"""Settings of a run in which engines and number formats differ."""


@dataclass(frozen=True)
class OtherRun:
    """The answers to the same questions, in their order, and the engine that gave them."""

    engine: EngineIdentity
    answers: Sequence[Answer]


def read_other(path: Path, rows: Sequence[Question], settings: Mapping[str, Any]) -> OtherRun:
    """The answers that a run left at `path`, for a calibration whose own run has these `settings`.

    Raises:
        BindingMismatchError: prompts or scoring differ, or they are of this very engine.
        DataFileError: a line is broken.
        InputError: it is not a record of answers, or questions have no answer there.
    """
    from semgrad_guard.calibration import EngineIdentity
    from semgrad_guard.errors import BindingMismatchError, InputError
    from semgrad_guard.evaluation.job_record import differing, read_record
    from semgrad_guard.evaluation.runs.answers import Answer

    theirs, kept = read_record(path, Answer)
    mine: dict[str, Any] = json.loads(json.dumps(settings))
    changed = differing(theirs, mine)
    if foreign := [text for name, text in changed.items() if name not in _OF_ENGINES]:
        raise BindingMismatchError(
            f"The answers in {path} come from a run that differs in more than its engine: {'; '.join(foreign)}. "
            "Answer the questions there with the settings of this command."
        )
    if not changed:
        raise BindingMismatchError(
            f"The answers in {path} are this engine's own: the fingerprint is {mine['fingerprint']!r} in both. "
            "--also takes those of another engine or number format."
        )
    found = {answer.key: answer for answer in kept}
    if missing := sum(question.key not in found for question in rows):
        raise InputError(
            f"{missing} of the {len(rows)} questions have no answer in {path}. "
            "Run that calibration with these questions."
        )
    engine = EngineIdentity(fingerprint=theirs["fingerprint"], dtype=theirs["dtype"])
    return OtherRun(engine, [found[question.key] for question in rows])
