"""The run of `calibrate`: answers, their grades, and the calibration on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semgrad_guard.cli import grading, loading
from semgrad_guard.cli.calibrate_model import ModelWriter
from semgrad_guard.cli.calibrate_output import Files
from semgrad_guard.cli.calibrate_sentences import Sentences
from semgrad_guard.cli.calibrate_server import ServerWriter
from semgrad_guard.cli.estimators import (
    EstimatorSpec,
    Graded,
    GradedOther,
    LearnedEstimatorSpec,
    estimators_for,
    outcome_of,
)
from semgrad_guard.cli.grading import ByHand
from semgrad_guard.cli.loading import Cluster
from semgrad_guard.cli.terminal import say, say_unscored
from semgrad_guard.loading import ModelSource
from semgrad_guard.settings import REPORTED

if TYPE_CHECKING:
    from semgrad_guard.calibration.calibration_set import Copies
    from semgrad_guard.engine.generation.options import GenerationOptions
    from semgrad_guard.evaluation.calibrating import Outcome
    from semgrad_guard.evaluation.graders import AnswerGrader
    from semgrad_guard.evaluation.questions.data import Question, QuestionFile
    from semgrad_guard.evaluation.questions.prompts import Phrasing
    from semgrad_guard.records import Message


@dataclass(frozen=True)
class Shape:
    """Conversations and slots that widen the shape of the prompts."""

    conversations: Sequence[Sequence[Message]]
    slots: Sequence[str]


@dataclass(frozen=True)
class Run:
    """How to answer and score."""

    source: ModelSource
    estimator: EstimatorSpec
    phrasing: Phrasing
    decoding: GenerationOptions
    batch_size: int
    cluster: Cluster
    also: Sequence[Path]
    shape: Shape
    hand: ByHand | None
    server: str | None = None
    sentences: Sentences | None = None
    languages: Sequence[str] = ()

    def __call__(
        self,
        questions: QuestionFile,
        files: Files,
        *,
        graders: Sequence[AnswerGrader],
        alpha: float,
        delta: float,
        robust: bool,
        upstream: str | None,
        copies: Copies | None,
        by_kind: bool,
    ) -> Outcome:
        """Answer the missing questions, grade, and calibrate."""
        from semgrad_guard.calibration.languages import doubt_of_grader
        from semgrad_guard.evaluation.graders import GRADERS, default_grader
        from semgrad_guard.evaluation.job_record import number_of_try

        rows = questions.rows
        self.phrasing.require(rows)
        template = self.phrasing.name(rows)
        writer = self._writer(template)
        grader = next(iter(graders), GRADERS[default_grader(writer.prompt_name(template))])
        if files.labels is None and (doubt := doubt_of_grader(self.languages, grader.name)) is not None:
            say(f"{doubt}.", label="Warning")
        others = [] if isinstance(writer, ServerWriter) else writer.others(self.also, rows)
        answers = writer.answers(rows, files.answers, template)
        say_unscored(answers)
        times = questions.times if copies == "keep" else ()
        # The places of all answers, those of traffic as often as they were asked for.
        everything = [row for row in range(len(rows)) for _ in range(times[row] if times else 1)]
        named = writer.scorer.estimator if isinstance(writer, ServerWriter) else None
        scored_by, drawn = "", None
        if self.hand is not None:
            scored_by = named or self.estimator.make().name
            drawn = self.hand.draw(rows, answers, everything, scored_by, alpha=alpha)
        about: dict[str, Any] = {"labels": files.labels, "others": grading.recorded_keys(files.answers)}
        by_sentence = None
        if self.sentences is None:
            grades = grading.grade(rows, answers, grader, book=files.grades, only=drawn, **about)
        else:
            grades, by_sentence = grading.grade_sentences(rows, answers, grader, book=files.grades, **about)
        right = dict(zip(grades.rows, grades.correct, strict=True))
        places = [row for row in everything if drawn is not None or row in right]
        kept = [rows[i] for i in places]
        _say_near([rows[i] for i in grades.rows])
        forms = self.phrasing.forms(kept, writer.form)
        prompts = forms if any(forms) else None
        of_others = [
            GradedOther(other, grading.grade(rows, other.answers, grader, book=files.grades)) for other in others
        ]
        correct = [right.get(row) for row in places]
        kinds = [row.kind or "" for row in kept] if by_kind else None
        found = [answers[i] for i in places]
        parts = None if by_sentence is None else [by_sentence[row] for row in places]
        graded = Graded(kept, found, correct, grades.grader, prompts, of_others, copies, kinds, parts)
        extra = [form for turns in self.shape.conversations if (form := writer.form(turns)) is not None]
        how: dict[str, Any] = {"alpha": alpha, "delta": delta, "robust": robust, "languages": self.languages}
        how |= {} if self.sentences is None else asdict(self.sentences)
        promise = how | ({"by_kind": True} if by_kind else {})
        if self.hand is not None:
            how["by_hand"] = self.hand.count
            promise |= {"by_hand": self.hand.count, "prediction_powered": self.hand.machine}
        settings = {"estimator": asdict(self.estimator), "labels": graded.labels(), "copies": copies, **promise}
        how["tries"] = number_of_try(files.answers, settings)
        shape = {"extra_prompts": extra, "slots": self.shape.slots}
        if self.hand is not None and self.hand.machine:
            surest = self.hand.draw(rows, answers, everything, scored_by, alpha=alpha, whole=True)
            verdicts = grading.grade(rows, answers, grader, book=files.grades, only=surest)
            by_machine = dict(zip(verdicts.rows, verdicts.correct, strict=True))
            how["machine"] = [by_machine.get(row) for row in places]
        bind = writer.binding(grades.grader, upstream)
        outcome = outcome_of(self.estimator, graded, bind, named=named, **how, **shape)
        return replace(outcome, no_verdict=grades.no_verdict)

    def _writer(self, template: str) -> ModelWriter | ServerWriter:
        """The model here that answers, or the server."""
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
                self.cluster,
                self.source,
                None if self.sentences is None else self.sentences.on_doubt,
            )
        from semgrad_guard.guard.reported import ReportedScorer

        given = self.estimator.estimator
        scorer = ReportedScorer(
            self.source.model,
            REPORTED[0] if given == LearnedEstimatorSpec.estimator else str(given),
            by_sentence=None if self.sentences is None else self.sentences.on_doubt,
        )
        return ServerWriter(self.server, scorer, self.decoding, self.phrasing, self.batch_size)


def _say_near(questions: Sequence[Question]) -> None:
    """Warn of questions that are probably wordings of one fact."""
    from semgrad_guard.evaluation.questions.near import wordings

    near = [(row, first) for row, first in enumerate(wordings(questions)) if row != first]
    if near:
        row, first = near[0]
        say(
            f"{len(near)} of {len(questions)} questions are close to another one: {questions[row].question!r} and "
            f"{questions[first].question!r}, for example. Wordings of one fact are not independent draws: the promise "
            "is weaker than stated where they are many. Keep one of each.",
            label="Warning",
        )
