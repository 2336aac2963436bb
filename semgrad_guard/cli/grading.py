"""Grading for `calibrate` and `evaluate`: graders by name, files of labels, and a look at grades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from semgrad_guard.cli.loading import quietly
from semgrad_guard.cli.terminal import kept_on_interrupt, note, say, show_grades
from semgrad_guard.errors import GradingError

if TYPE_CHECKING:
    from semgrad_guard.evaluation.graders import AnswerGrader
    from semgrad_guard.evaluation.graders.labels import SheetAnswer
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.runs.answers import Answer


def load_graders(specs: Sequence[str], *, nli: str | None = None) -> Sequence[AnswerGrader]:
    """The graders of these names, before hours of answering rather than after."""
    from semgrad_guard.evaluation.graders import GRADERS
    from semgrad_guard.evaluation.graders.naming import load_graders

    if set(specs) <= set(GRADERS):
        return load_graders(specs) if specs else ()
    with quietly("Loading graders …"):
        return load_graders(specs, nli=nli)


def check_labels(path: Path | None, *, begun_at: Path | None = None) -> None:
    """Refuse, before any work, a file of labels that cannot be read as one, or is not there.

    `begun_at` is where the command begins a sheet of its own.
    """
    from semgrad_guard.evaluation.files import STDIN
    from semgrad_guard.evaluation.graders.labels import open_sheet

    if path not in (None, STDIN) and (path.exists() or path != begun_at):
        open_sheet(path)


def recorded_keys(answers: Path) -> list[str]:
    """The keys of all rows of a sheet about the answers in a record, also those to other questions."""
    from semgrad_guard.evaluation.job_record import read_record
    from semgrad_guard.evaluation.runs.answers import EvaluatedAnswer

    rows = read_record(answers, EvaluatedAnswer)[1]
    return [key for answer in rows for key in ([answer.key] if answer.sentences is None else answer.sentence_keys)]


@dataclass(frozen=True)
class Grades:
    """Grades of answers: their places among all, the grades in order, and whose they are.

    Answers without a label are not among them. `no_verdict` counts those on which the grader came to no verdict: they
    are wrong.
    """

    rows: Sequence[int]
    correct: Sequence[bool]
    grader: str
    no_verdict: int = 0


@dataclass(frozen=True)
class ByHand:
    """How many of the surest answers people grade, and whether the grader (`machine`) grades all of these as well."""

    count: int
    machine: bool

    def draw(
        self,
        questions: Sequence[Question],
        answers: Sequence[Answer],
        draws: Sequence[int],
        estimator: str,
        *,
        alpha: float,
        whole: bool = False,
    ) -> list[int]:
        """The places of the answers that people grade, in random order; `draws` are the places of all, those of traffic
        with their repetitions. With `whole` the places of all the surest answers."""
        from semgrad_guard.calibration.hand_grades import rows_to_grade, share_to_grade

        drawn = rows_to_grade(
            [answers[place].uncertainty(estimator) for place in draws],
            alpha=alpha,
            by_hand=len(draws) if whole else self.count,
            groups=[questions[place].key for place in draws],
            copies="keep",
        )
        if not whole:
            note(
                f"{len(drawn)} answers are graded by hand: a random part of the surest {share_to_grade(alpha):.1%}. "
                "Nothing less sure is let through then. --by-hand takes another number."
            )
        return list(dict.fromkeys(draws[row] for row in drawn))


def grade(
    questions: Sequence[Question],
    answers: Sequence[Answer],
    grader: AnswerGrader,
    *,
    book: Path,
    labels: Path | None = None,
    others: Sequence[str] = (),
    only: Sequence[int] | None = None,
) -> Grades:
    """Grade by people where there are labels, else by the grader; show ten, and warn where they are in doubt.

    With `only` these answers alone are graded, and all of them: they are a random sample.

    `others` are keys of further answers in the same record, `book` keeps the verdicts of a model or a judge. A question
    without an answer is wrong, and so is an answer on which the grader comes to no verdict.
    """
    from semgrad_guard.evaluation.graders.labels import NAME, SheetAnswer
    from semgrad_guard.evaluation.graders.words import no_verdict

    places = range(len(questions)) if only is None else only
    items = [
        SheetAnswer(questions[i].key, questions[i].question, questions[i].answers, answers[i].text) for i in places
    ]
    name = grader.name if labels is None else NAME
    verdicts = _verdicts(items, grader, book=book, labels=labels, others=others)
    without = verdicts.count(None)
    known = [i for i, verdict in enumerate(verdicts) if labels is None or verdict is not None]
    if without and only is not None and labels is not None:
        raise GradingError(
            f"{without} of the {len(items)} answers to grade have no label in {labels}. Grade all of them: without the "
            "hard ones the rest is no random sample. One that cannot be judged counts as wrong."
        )
    if without and labels is not None:
        say(f"{without} of {len(items)} answers have no label in the file; they are left out.", label="Warning")
    elif without:
        say(no_verdict(without, len(items), name), label="Warning")
    _look([(items[i], verdicts[i]) for i in known], name)
    correct = [verdicts[i] is True for i in known]
    return Grades([places[i] for i in known], correct, name, without if labels is None else 0)


def grade_sentences(
    questions: Sequence[Question],
    answers: Sequence[Answer],
    grader: AnswerGrader,
    *,
    book: Path,
    labels: Path | None = None,
    others: Sequence[str] = (),
) -> tuple[Grades, dict[int, list[bool]]]:
    """Like `grade`, of every sentence: a sheet has a row for each. Also the grades of an answer's sentences, by place.

    An answer is right if all of its sentences are, and it has some. One without any label is left out; in others a
    sentence without one is wrong, and so is one on which the grader comes to no verdict.
    """
    from semgrad_guard.evaluation.graders.labels import NAME, SheetAnswer
    from semgrad_guard.evaluation.graders.words import no_verdict

    items = [
        SheetAnswer(
            key,
            question.question,
            question.answers,
            (answer.text or "")[part.start : part.end].strip(),
            question.context or "",
        )
        for question, answer in zip(questions, answers, strict=True)
        for key, part in zip(answer.sentence_keys, answer.sentences or (), strict=True)
    ]
    name = grader.name if labels is None else NAME
    verdicts = _verdicts(items, grader, book=book, labels=labels, others=others) if items else []
    found, taken = dict[int, list[bool]](), iter(verdicts)
    without = unlabelled = 0
    for row, answer in enumerate(answers):
        own = [next(taken) for _ in answer.sentences or ()]
        if labels is not None and own and own.count(None) == len(own):
            unlabelled += 1
            continue
        without += own.count(None)
        found[row] = [verdict is True for verdict in own]
    if unlabelled:
        say(
            f"{unlabelled} of {len(answers)} answers have no label for any sentence; they are left out.",
            label="Warning",
        )
    if without and labels is not None:
        say(f"{without} sentences of labelled answers have no label; they count as wrong.", label="Warning")
    elif without:
        say(no_verdict(without, len(items), name, unit="sentences"), label="Warning")
    _look(
        [
            (item, verdict)
            for item, verdict in zip(items, verdicts, strict=True)
            if labels is None or verdict is not None
        ],
        name,
        unit="sentences",
    )
    right = [bool(own) and all(own) for own in found.values()]
    return Grades([*found], right, name, without if labels is None else 0), found


def _verdicts(
    items: Sequence[SheetAnswer], grader: AnswerGrader, *, book: Path, labels: Path | None, others: Sequence[str]
) -> list[bool | None]:
    """The verdicts of people where there are labels, else of the grader."""
    from semgrad_guard.evaluation.graders import AnswerToGrade
    from semgrad_guard.evaluation.graders.grading import grade_texts
    from semgrad_guard.evaluation.graders.labels import labels_for

    if labels is not None:
        found = labels_for(labels, items, others=others)
        return [False if item.text is None else label for item, label in zip(items, found, strict=True)]
    texts = [
        AnswerToGrade(one.question, one.text or "", one.references, one.passage is not None, one.passage or None)
        for one in items
    ]
    with kept_on_interrupt(f"Grading by {grader.name}", f"grades are kept in {book}") as tell:
        return grade_texts(texts, grader, book, on_progress=tell)


def _look(graded: Sequence[tuple[SheetAnswer, bool | None]], name: str, *, unit: str = "answers") -> None:
    from semgrad_guard.evaluation.graders.grading import GradedAnswer

    rows = [GradedAnswer(row.question, row.text or "", row.references, grade) for row, grade in graded]
    show_grades(rows, name, unit=unit)
