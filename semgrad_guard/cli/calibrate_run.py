"""The run of `calibrate`: answers, their grades, and the calibration on both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from semgrad_guard.calibration import Binding
from semgrad_guard.calibration.calibration_set import Copies
from semgrad_guard.cli import grading, loading
from semgrad_guard.cli.calibrate_answers import ModelWriter, ServerWriter
from semgrad_guard.cli.grading import Files
from semgrad_guard.cli.options import EstimatorSpec, LearnedEstimatorSpec, Sentences, candidates_for, estimators_for
from semgrad_guard.cli.terminal import say, say_unscored
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.estimators import NEEDS_LABELS, FusedStates
from semgrad_guard.grading import GRADERS, AnswerGrader, default_grader
from semgrad_guard.grading.candidates import (
    Outcome,
    calibrate_best,
    calibrate_by_hand,
    calibrate_learned,
    calibrate_scored,
)
from semgrad_guard.grading.learning_set import LearningSet
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.answered import Answer
from semgrad_guard.questions.data import Question, QuestionFile, wordings
from semgrad_guard.questions.job_record import number_of_try
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.records import PromptForm
from semgrad_guard.settings import REPORTED


@dataclass(frozen=True)
class Graded:
    """Answered questions with their grades, and the forms of the prompts; all in one order.

    An answer that was not to be graded has None. By sentence, `sentences` are the grades of each answer's.
    """

    rows: Sequence[Question]
    answers: Sequence[Answer]
    correct: Sequence[bool | None]
    prompts: Sequence[PromptForm | None] | None
    copies: Copies | None
    sentences: Sequence[Sequence[bool]] | None

    def labels(self) -> str:
        """A digest of the answers and their grades."""
        grades = self.correct if self.sentences is None else map(list, self.sentences)
        rows = [[answer.key, right] for answer, right in zip(self.answers, grades, strict=True)]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def calibrated(
        self, spec: EstimatorSpec, bind: Callable[[Any], Binding], *, named: str | None, **how: Any
    ) -> Outcome:
        """Calibrate; for a learned estimator and "auto", learn on a part of the answers first.

        `bind` gives the binding by an estimator. `named` takes the scores of that name instead, which no model here
        has made: then it is given None. `how` are options of `calibrate` (alpha, delta ...).
        """
        how = {"copies": self.copies, **how}
        if "by_hand" in how:
            estimator = None if named is not None else spec.make()
            name = estimator.name if estimator is not None else named
            scores = [answer.uncertainty(str(name)) for answer in self.answers]
            how |= {"groups": [row.key for row in self.rows], "binding": bind(estimator), "prompts": self.prompts}
            return calibrate_by_hand(scores, self.correct, **how)
        known = LearningSet.of(
            self.rows,
            self.answers,
            [right is True for right in self.correct],
            prompts=self.prompts,
            copies=self.copies,
            sentences=self.sentences,
        )
        if named is not None:
            return calibrate_scored(known, named, binding=bind(None), **how)
        if spec.estimator == "auto":
            return calibrate_best(known, candidates_for(spec), bind=bind, **how)
        if spec.estimator in NEEDS_LABELS:
            return calibrate_learned(known, spec.set_on(FusedStates()), bind=bind, **how)
        estimator = spec.make()
        return calibrate_scored(known, estimator, binding=bind(estimator), **how)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How to answer, score and grade; `by_hand` is how many of the surest answers people grade, None: all."""

    source: ModelSource
    estimator: EstimatorSpec
    phrasing: Phrasing
    decoding: GenerationOptions
    batch_size: int
    by_hand: int | None
    server: str | None
    sentences: Sentences | None
    graders: Sequence[AnswerGrader]
    alpha: float
    delta: float
    upstream: str | None
    copies: Copies | None

    def __call__(self, questions: QuestionFile, files: Files) -> Outcome:
        """Answer the missing questions, grade, and calibrate."""
        rows = questions.rows
        self.phrasing.require(rows)
        template = self.phrasing.name(rows)
        writer = self._writer(template)
        grader = next(iter(self.graders), GRADERS[default_grader(writer.prompt_name(template))])
        answers = writer.answers(rows, files.answers, template)
        say_unscored(answers)
        times = questions.times if self.copies == "keep" else ()
        # The places of all answers, those of traffic as often as they were asked for.
        everything = [row for row in range(len(rows)) for _ in range(times[row] if times else 1)]
        named = writer.scorer.estimator if isinstance(writer, ServerWriter) else None
        drawn = None
        if self.by_hand is not None:
            scored_by = named or self.estimator.make().name
            drawn = grading.drawn_for_people(rows, answers, everything, scored_by, count=self.by_hand, alpha=self.alpha)
        about: dict[str, Any] = {"labels": files.labels, "others": grading.recorded_keys(files.answers)}
        by_sentence = self.sentences is not None
        grades = grading.grade(rows, answers, grader, book=files.grades, only=drawn, by_sentence=by_sentence, **about)
        right = {row: grade is True for row, grade in zip(grades.rows, grades.correct, strict=True)}
        left_out = {*grades.abstained} if drawn is None else set[int]()  # like what a guard withholds
        places = [row for row in everything if drawn is not None or (row in right and row not in left_out)]
        kept = [rows[i] for i in places]
        _say_near([rows[i] for i in grades.rows])
        forms = self.phrasing.forms(kept, writer.form)
        prompts = forms if any(forms) else None
        correct = [right.get(row) for row in places]
        found = [answers[i] for i in places]
        parts = [[one is True for one in grades.units[row]] for row in places] if by_sentence else None
        graded = Graded(kept, found, correct, prompts, self.copies, parts)
        how: dict[str, Any] = {"alpha": self.alpha, "delta": self.delta}
        how |= {} if self.sentences is None else asdict(self.sentences)
        how |= {} if self.by_hand is None else {"by_hand": self.by_hand}
        settings = {"estimator": asdict(self.estimator), "labels": graded.labels(), "copies": self.copies, **how}
        how["tries"] = number_of_try(files.answers, settings)
        bind = writer.binding(grades.grader, self.upstream)
        outcome = graded.calibrated(self.estimator, bind, named=named, **how)
        return replace(outcome, no_verdict=grades.no_verdict, abstained=sum(row in left_out for row in everything))

    def _writer(self, template: str) -> ModelWriter | ServerWriter:
        if self.server is None:
            model = loading.load(self.source)
            estimators = {estimator.name: estimator for estimator in estimators_for(self.estimator)}
            return ModelWriter(
                model,
                estimators,
                template,
                self.decoding,
                self.phrasing,
                self.batch_size,
                None if self.sentences is None else self.sentences.on_doubt,
            )
        given = self.estimator.estimator
        scorer = ReportedScorer(
            self.source.model,
            REPORTED[0] if given == LearnedEstimatorSpec.estimator else str(given),
            by_sentence=None if self.sentences is None else self.sentences.on_doubt,
        )
        return ServerWriter(self.server, scorer, self.decoding, self.phrasing, self.batch_size)


def _say_near(questions: Sequence[Question]) -> None:
    near = [(row, first) for row, first in enumerate(wordings(questions)) if row != first]
    if near:
        row, first = near[0]
        say(
            f"{len(near)} of {len(questions)} questions are close to another one: {questions[row].question!r} and "
            f"{questions[first].question!r}, for example. Wordings of one fact are not independent draws: the promise "
            "is weaker than stated where they are many. Keep one of each.",
            label="Warning",
        )
