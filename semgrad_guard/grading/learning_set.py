"""Graded answers as columns, to learn an estimator from and to choose a threshold on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from semgrad_guard.calibration import AnswerSentences
from semgrad_guard.calibration.calibration_set import Copies, Prompts, claims
from semgrad_guard.estimators import NEEDS_LABELS, Estimator
from semgrad_guard.estimators.learned import Features, FusedStates
from semgrad_guard.grading.grader import Grade
from semgrad_guard.questions.data import Question, wordings
from semgrad_guard.questions.run_record import Answer, AnsweredSentence, AnswerScore

T = TypeVar("T")


@dataclass(frozen=True)
class GradedSentences:
    """The sentences of one answer with their grades."""

    text: str
    sentences: Sequence[AnsweredSentence]
    correct: Sequence[bool]


@dataclass(frozen=True)
class LearningSet:
    """Answers that claim something, in the questions' order: their questions' names, grades, and by estimator features
    or scores; and the number of those that abstained.

    `prompts` are the forms of the questions' prompts; nothing is promised without them. `facts` numbers the
    questions, copies and near-duplicates alike: they stay on one side of a split (of traffic, every row is a draw by
    itself). By sentence, `sentences` holds those
    of each answer, and the other columns are about the whole (all sentences right, the most doubtful one's score).
    """

    questions: Sequence[str]
    correct: Sequence[bool]
    features: Mapping[str, Sequence[Features | None]]
    uncertainties: Mapping[str, Sequence[float | None]]
    prompts: Sequence[Prompts] | None = None
    facts: Sequence[int] | None = None
    sentences: Sequence[GradedSentences] | None = None
    n_abstained: int = 0

    @classmethod
    def of(
        cls,
        questions: Sequence[Question],
        answers: Sequence[Answer],
        grades: Sequence[Grade],
        *,
        prompts: Sequence[Prompts] | None = None,
        copies: Copies | None = None,
        sentences: Sequence[Sequence[bool]] | None = None,
    ) -> LearningSet:
        """The graded answers of a run whose estimators go by their own names; `sentences` are the grades of each
        answer's."""
        parts = [
            GradedSentences(answer.text or "", answer.sentences or (), own)
            for answer, own in zip(answers, sentences or (), strict=sentences is not None)
        ]
        every = cls(
            [question.key for question in questions],
            [grade is True for grade in grades],
            *_columns([answer.scores for answer in answers], answers[0].scores if answers else ()),
            prompts,
            None if copies == "keep" else wordings(questions),
            None if sentences is None else parts,
        )
        return every.claiming(grades)

    def claiming(self, grades: Sequence[Grade]) -> LearningSet:
        """The rows that claim something, by the grades of all.

        Raises:
            CalibrationError: all abstain.
        """
        rows = claims(grades)
        return replace(self.part(rows), n_abstained=len(grades) - len(rows))

    def part(self, rows: Sequence[int]) -> LearningSet:
        """Some of the rows."""
        return LearningSet(
            [self.questions[i] for i in rows],
            [self.correct[i] for i in rows],
            {name: [column[i] for i in rows] for name, column in self.features.items()},
            {name: [column[i] for i in rows] for name, column in self.uncertainties.items()},
            _some(self.prompts, rows),
            _some(self.facts, rows),
            _some(self.sentences, rows),
            self.n_abstained,
        )

    def distinct(self) -> LearningSet:
        """The first answer to each question."""
        first = {name: row for row, name in reversed([*enumerate(self.questions)])}
        return self.part(sorted(first.values()))

    def units(self) -> LearningSet:
        """The rows that estimators are compared and fitted on: by sentence a row for each one, whose answer is its
        `facts`; else the answers."""
        if self.sentences is None:
            return self
        rows = [(row, number) for row, one in enumerate(self.sentences) for number in range(len(one.sentences))]
        return LearningSet(
            [self.questions[row] for row, _ in rows],
            [self.sentences[row].correct[number] for row, number in rows],
            *_columns(
                [self.sentences[row].sentences[number].scores for row, number in rows],
                (*self.features, *self.uncertainties),
            ),
            facts=[row for row, _ in rows],
        )

    def usable(self, estimators: Sequence[Estimator]) -> list[bool]:
        """Which answers have finite features for all learned ones of these estimators: a fit counts no others. By
        sentence, all their sentences have."""
        units = self.units()
        columns = [units.features[one.name] for one in estimators if isinstance(one, FusedStates)]
        fit = [
            all(record is not None and all(map(math.isfinite, record.values())) for record in row)
            for row in zip(*columns, strict=True)
        ]
        if self.sentences is None or not columns:
            return fit or [True] * len(self.questions)
        unfit = {row for row, usable in zip(units.facts or (), fit, strict=True) if not usable}
        return [bool(one.sentences) and row not in unfit for row, one in enumerate(self.sentences)]

    def scores(self, estimator: Estimator | str) -> list[float | None]:
        """The uncertainties by an estimator, or of this name: a fitted one's from the features."""
        if isinstance(estimator, str):
            return list(self.uncertainties[estimator])
        if isinstance(estimator, FusedStates):
            return [estimator.uncertainty(record)[0] for record in self.features[estimator.name]]
        return list(self.uncertainties[estimator.name])

    def answer_sentences(self, estimator: Estimator | str) -> list[AnswerSentences]:
        """The sentences of each answer by the scores of an estimator, for `calibrate_sentences`."""
        found = self.sentences or ()
        scores = iter(self.units().scores(estimator))
        return [
            AnswerSentences(
                question,
                one.text,
                [next(scores) for _ in one.sentences],
                one.correct,
                [sentence.leans_on for sentence in one.sentences],
            )
            for question, one in zip(self.questions, found, strict=True)
        ]


def _columns(
    rows: Sequence[Mapping[str, AnswerScore]], names: Iterable[str]
) -> tuple[dict[str, list[Features | None]], dict[str, list[float | None]]]:
    """The features of learned estimators and the scores of all others, by name."""
    names = list(names)
    return (
        {name: [row[name].features for row in rows] for name in names if name in NEEDS_LABELS},
        {name: [row[name].uncertainty for row in rows] for name in names if name not in NEEDS_LABELS},
    )


def _some(column: Sequence[T] | None, rows: Iterable[int]) -> list[T] | None:
    return None if column is None else [column[row] for row in rows]
