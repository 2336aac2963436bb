"""Grading for `calibrate`, `gate` and `evaluate`: graders by name, files of labels and of grades, a look at grades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from semgrad_guard.calibration.planning import rows_to_grade, share_to_grade
from semgrad_guard.cli.from_options import Output, quietly, require_outputs
from semgrad_guard.cli.terminal import kept_on_interrupt, note, say
from semgrad_guard.errors import GradingError
from semgrad_guard.files import STDIN, beside
from semgrad_guard.grading import GRADERS, AnswerGrader, by_name
from semgrad_guard.grading.by_name import no_verdict
from semgrad_guard.grading.grader import ABSTAINED, Grade, Verdicts
from semgrad_guard.grading.sheets import (
    GRADES,
    HUMAN,
    SheetAnswer,
    doubt,
    labels_for,
    open_sheet,
    some_of,
)
from semgrad_guard.grading.sheets import grade as graded
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.run_record import Answer, EvaluatedAnswer, is_record, read_record


def load_graders(specs: Sequence[str], *, nli: str | None = None) -> Sequence[AnswerGrader]:
    """The graders of these names, before hours of answering rather than after."""
    if set(specs) <= set(GRADERS):
        return by_name.load_graders(specs) if specs else ()
    with quietly("Loading graders …"):
        return by_name.load_graders(specs, nli=nli)


def check_labels(path: Path | None, *, begun_at: Path | None = None) -> None:
    """Refuse, before any work, a file of labels that cannot be read as one, or is not there.

    `begun_at` is where the command begins a sheet of its own.
    """
    if path not in (None, STDIN) and (path.exists() or path != begun_at):
        open_sheet(path)


def recorded_keys(answers: Path) -> list[str]:
    """The keys of all rows of a sheet about the answers in a record, also those to other questions."""
    rows = read_record(answers, EvaluatedAnswer)[1]
    return [key for answer in rows for key in ([answer.key] if answer.sentences is None else answer.sentence_keys)]


@dataclass(frozen=True)
class Files:
    """The files of `calibrate` and `gate`: next to the output its record of answers, and the grades of models."""

    output: Path
    labels: Path | None = None

    @property
    def answers(self) -> Path:
        """The record of answers."""
        return beside(self.output, ".answers.jsonl")

    @property
    def grades(self) -> Path:
        """The verdicts of models and judges."""
        return beside(self.output, ".grades.jsonl")

    def require(self, *outputs: Output, inputs: Sequence[Path]) -> None:
        """Refuse, before any work, a file that cannot be written; `outputs` is the output itself, if it is written."""
        written = [
            *outputs,
            Output(self.answers, "record of answers", is_record()),
            Output(self.grades, "record of grades", is_record(GRADES)),
        ]
        if self.labels not in (None, STDIN):  # extended, never overwritten; `check_labels` recognises it
            written.append(Output(self.labels, "sheet of labels", lambda _: True))
        require_outputs(written, inputs=inputs)


@dataclass(frozen=True)
class Grades:
    """The grades of answers, and whose they are: by the place of an answer, those of it or of each of its sentences.

    Answers without a label are not among them. `no_verdict` counts those on which the grader came to no verdict: they
    are wrong. A sentence that abstains claims nothing, and counts as right.
    """

    units: Mapping[int, Sequence[Grade]]
    grader: str
    no_verdict: int = 0

    @property
    def of_answers(self) -> dict[int, Grade]:
        """By place: whether an answer is right or abstains; by sentence, whether it has some, and all are right."""
        return {
            place: ABSTAINED if [*own] == [ABSTAINED] else bool(own) and all(own) for place, own in self.units.items()
        }


def draw(
    questions: Sequence[Question],
    answers: Sequence[Answer],
    draws: Sequence[int],
    estimator: str,
    *,
    alpha: float,
    count: int,
) -> list[int]:
    """The places of the answers that people grade, in random order; `draws` are the places of all, those of traffic
    with their repetitions."""
    drawn = rows_to_grade(
        [answers[place].uncertainty(estimator) for place in draws],
        alpha=alpha,
        by_hand=count,
        groups=[questions[place].key for place in draws],
        copies="keep",
    )
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
    by_sentence: bool = False,
) -> Grades:
    """Grade by people where there are labels, else by the grader; show ten, and warn where they are in doubt.

    With `only` these answers alone are graded, and all of them: they are a random sample.

    `others` are keys of further answers in the same record, `book` keeps the verdicts of a model or a judge. A question
    without an answer is wrong, and so is an answer on which the grader comes to no verdict. With `by_sentence` every
    sentence is graded, and has a row of a sheet. An answer without any label is left out; in others a sentence without
    one is wrong.
    """
    rows: dict[int, list[SheetAnswer]] = {}
    for i in range(len(questions)) if only is None else only:
        question, answer = questions[i], answers[i]
        parts = zip(answer.sentence_keys, answer.sentence_texts, strict=True)
        about, passage = (question.question, question.answers), question.context or ""
        units = parts if by_sentence else [(question.key, answer.text)]
        rows[i] = [SheetAnswer(key, *about, text, passage, by_sentence) for key, text in units]
    items = [item for own in rows.values() for item in own]
    name, unit = grader.name if labels is None else HUMAN, "sentences" if by_sentence else "answers"
    verdicts: Verdicts = []
    if labels is not None and items:
        labelled = labels_for(labels, items, others=others)
        verdicts = [False if item.text is None else label for item, label in zip(items, labelled, strict=True)]
    elif items:
        with kept_on_interrupt(f"Grading by {name}", f"grades are kept in {book}") as tell:
            verdicts = graded([item.to_grade for item in items], grader, book, on_progress=tell)
    found, taken, without = dict[int, list[Grade]](), iter(verdicts), 0
    for place, own in rows.items():
        given: Verdicts = [next(taken) for _ in own]
        if labels is None or not given or given.count(None) < len(given):
            without += given.count(None)
            found[place] = [bool(verdict) if by_sentence else verdict or False for verdict in given]
    if unlabelled := len(rows) - len(found):
        if only is not None:
            raise GradingError(
                f"{unlabelled} of the {len(rows)} answers to grade have no label in {labels}. Grade all of them: "
                "without the hard ones the rest is no random sample. One that cannot be judged counts as wrong."
            )
        where = "for any sentence" if by_sentence else "in the file"
        say(f"{unlabelled} of {len(rows)} answers have no label {where}; they are left out.", label="Warning")
    if without and labels is not None:
        say(f"{without} sentences of labelled answers have no label; they count as wrong.", label="Warning")
    elif without:
        say(no_verdict(without, len(items), name, unit=unit), label="Warning")
    show_grades(items, verdicts, name, unit=unit, with_none=labels is None)
    return Grades(found, name, without if labels is None else 0)


def show_grades(
    items: Sequence[SheetAnswer], verdicts: Verdicts, grader: str, *, unit: str = "answers", with_none: bool
) -> None:
    """Ten answers with their grades, and a warning where the grades are in doubt: before anything is made of them.

    Those without a verdict are among them if they count (`with_none`).
    """
    pairs = [pair for pair in zip(items, verdicts, strict=True) if pair[1] is not None or with_none]
    grades: Verdicts = [verdict for _, verdict in pairs]
    some = some_of(grades)
    note(f"{len(some)} of {len(pairs)} {unit}, graded by {grader}. Question [reference] answer:", label="Look")
    for item, verdict in (pairs[place] for place in some):
        note(item.graded(verdict), label=None)
    if (found := doubt(grades, grader, unit=unit)) is not None:
        say(found, label="Warning")
