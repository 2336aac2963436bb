"""The run of `calibrate`: answers, their grades, and the calibration on both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from semgrad_guard.calibration import Binding
from semgrad_guard.calibration.calibration_set import ABSTAINED, Copies
from semgrad_guard.cli import grading, loading
from semgrad_guard.cli.answers import ModelWriter, ServerWriter
from semgrad_guard.cli.grading import Files
from semgrad_guard.cli.terminal import say, say_cut, say_unscored
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.estimators import NEEDS_LABELS, Estimator, FusedStates
from semgrad_guard.grading import GRADERS, AnswerGrader, default_grader
from semgrad_guard.grading.candidates import (
    CANDIDATES,
    FREE,
    Outcome,
    calibrate_best,
    calibrate_by_hand,
    calibrate_learned,
    calibrate_scored,
)
from semgrad_guard.grading.grader import Grade, Verdicts
from semgrad_guard.grading.learning_set import LearningSet
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.loading import ModelSource, load_estimator
from semgrad_guard.questions.data import Question, QuestionFile, wordings
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.questions.run_record import number_of_try
from semgrad_guard.settings import REPORTED, OnCut, OnDoubt


def estimators_for(name: str | None) -> Sequence[Estimator]:
    """The estimators behind an `--estimator`: with it the scores that generating computes anyway, one of which takes
    the place of a learned one where there are too few labels."""
    if name == "auto":
        own: list[Estimator] = list(CANDIDATES)
    else:
        own = [FusedStates() if name in NEEDS_LABELS else load_estimator(name)]
    return [*own, *(free for free in FREE if free.name not in [one.name for one in own])]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How to answer, score, grade and calibrate. `by_hand` is how many of the surest answers people grade."""

    source: ModelSource
    server: str | None
    estimator: str | None
    phrasing: Phrasing
    decoding: GenerationOptions
    by_hand: int | None
    by_sentence: OnDoubt | None
    on_cut: OnCut
    graders: Sequence[AnswerGrader]
    alpha: float
    delta: float
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
        say_cut(answers, self.decoding.max_tokens)
        times = questions.times if self.copies == "keep" else ()
        # The places of all answers, those of traffic as often as they were asked for.
        everything = [row for row in range(len(rows)) for _ in range(times[row] if times else 1)]
        named = writer.scorer.estimator if isinstance(writer, ServerWriter) else None
        scored_by = drawn = None
        if self.by_hand is not None:
            scored_by = named or load_estimator(self.estimator).name
            drawn = grading.draw(rows, answers, everything, scored_by, alpha=self.alpha, count=self.by_hand)
        grades = grading.grade(
            rows,
            answers,
            grader,
            book=files.grades,
            only=drawn,
            by_sentence=self.by_sentence is not None,
            labels=files.labels,
            others=grading.recorded_keys(files.answers),
        )
        graded = grades.of_answers
        places = [row for row in everything if drawn is not None or row in graded]
        _say_near([rows[i] for i in graded])
        kept, found = [rows[i] for i in places], [answers[i] for i in places]
        correct: Verdicts = [graded.get(i) for i in places]
        forms = self.phrasing.forms(kept, writer.form)
        prompts = forms if any(forms) else None
        by_sentence = self.by_sentence is not None
        parts = [[one is True for one in grades.units[row]] for row in places] if by_sentence else None
        how: dict[str, Any] = {"alpha": self.alpha, "delta": self.delta}
        how |= {} if self.by_sentence is None else {"on_doubt": self.by_sentence}
        how |= {} if self.by_hand is None else {"by_hand": self.by_hand}
        labels = [[answer.key, own] for answer, own in zip(found, correct if parts is None else parts, strict=True)]
        digest = hashlib.sha256(json.dumps(labels, default=list).encode()).hexdigest()[:16]
        settings = {"estimator": self.estimator, "labels": digest, "copies": self.copies, "on_cut": self.on_cut, **how}
        how |= {"tries": number_of_try(files.answers, settings), "copies": self.copies}
        bind: Callable[[Any], Binding] = writer.binding(grades.grader)
        if scored_by is not None:
            estimator = None if named is not None else load_estimator(self.estimator)
            scores = [answer.uncertainty(scored_by) for answer in found]
            how |= {"groups": [row.key for row in kept], "binding": bind(estimator), "prompts": prompts}
            outcome = calibrate_by_hand(scores, correct, **how)
        else:
            given: list[Grade] = [graded[i] for i in places]
            known = LearningSet.of(kept, found, given, prompts=prompts, copies=self.copies, sentences=parts)
            if named is not None:
                outcome = calibrate_scored(known, named, binding=bind(None), **how)
            elif self.estimator == "auto":
                outcome = calibrate_best(known, bind=bind, **how)
            elif self.estimator in NEEDS_LABELS:
                outcome = calibrate_learned(known, FusedStates(), bind=bind, **how)
            else:
                estimator = load_estimator(self.estimator)
                outcome = calibrate_scored(known, estimator, binding=bind(estimator), **how)
        cut = [grade for row, grade in graded.items() if answers[row].is_cut and grade != ABSTAINED]
        return replace(outcome, no_verdict=grades.no_verdict, n_cut=len(cut), n_cut_wrong=cut.count(False))

    def _writer(self, template: str) -> ModelWriter | ServerWriter:
        if self.server is None:
            model = loading.load(self.source)
            estimators = {estimator.name: estimator for estimator in estimators_for(self.estimator)}
            return ModelWriter(model, estimators, template, self.decoding, self.phrasing, self.by_sentence, self.on_cut)
        scorer = ReportedScorer(self.source.model, self.estimator or REPORTED[0], by_sentence=self.by_sentence)
        return ServerWriter(self.server, scorer, self.decoding, self.phrasing, self.on_cut)


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
