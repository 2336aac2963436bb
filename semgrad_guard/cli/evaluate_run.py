"""The steps of `evaluate`: read, answer (or take the recorded answers), grade, write into its folder, and show."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.table import Table

from semgrad_guard.cli import loading
from semgrad_guard.cli.grading import recorded_keys, show_grades
from semgrad_guard.cli.terminal import OUT, kept_on_interrupt, note, say, show_line, status
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Estimator, FusedStates
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.estimators.suite import paper_suite
from semgrad_guard.estimators.text_pairs import CrossEncoder, NLIEquivalence
from semgrad_guard.grading import GRADERS, AnswerGrader, default_grader
from semgrad_guard.grading.by_name import entailment_model, is_final, no_verdict
from semgrad_guard.grading.grader import ABSTAINED, Verdicts
from semgrad_guard.grading.sheets import GRADES, HUMAN, SheetAnswer, extend_sheet, grade, labels_for, with_references
from semgrad_guard.guard.calibrated_estimator import require_by_sentence
from semgrad_guard.loading import ModelSource
from semgrad_guard.metrics import aurc, auroc
from semgrad_guard.paper.experiment import Experiment, SampledQuestions, semgrad_ablations
from semgrad_guard.paper.graded import GradedRun, read_graded, write_graded
from semgrad_guard.paper.report import is_report, write_report
from semgrad_guard.paper.results import Results, is_graded_table
from semgrad_guard.paper.tables import is_table
from semgrad_guard.questions.data import QuestionFile
from semgrad_guard.questions.data_files import Output, make_folder, read_by, require_outputs
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.questions.run_record import EvaluatedAnswer, is_record, read_record
from semgrad_guard.questions.sources import HUB
from semgrad_guard.settings import JudgedBy

_SAMPLED = 300
"""Questions of each kind in which the methods that draw samples take part, a seeded choice; the others take all."""


def compared_by(models: str | None) -> tuple[str | None, str | None]:
    """The NLI model and the cross-encoder of `--nli`, each None where it is not named."""
    nli, _, cross_encoder = (models or "").partition("+cross-encoder=")
    return nli or None, cross_encoder or None


def estimators_of(
    methods: Sequence[str] | None,
    *,
    nli: str | None,
    cross_encoder: str | None,
    seed: int,
    max_tokens: int,
    by: JudgedBy,
) -> dict[str, Estimator]:
    """The paper's methods with the models that the user named, or those among them that were chosen; by sentence
    without those that compare whole answers."""
    with loading.quietly("Loading what compares answers …"):
        compared = None if nli is None else NLIEquivalence(entailment_model(nli))
        importance = None if cross_encoder is None else CrossEncoder.from_pretrained(cross_encoder)
    suite = paper_suite(compared, importance, seed, max_tokens=max_tokens)
    known = {estimator.name: estimator for estimator in (*suite, FusedStates())}
    by_sentence = by == "sentence"
    parts = [name for name, one in known.items() if not by_sentence or not isinstance(one, AskingEstimator)]
    wanted = list(dict.fromkeys(methods or parts))
    for name in wanted if by_sentence else ():
        require_by_sentence(known[name])
    return {name: known[name] for name in wanted}


@dataclass(frozen=True)
class Run:
    """Answers, and the settings of the run that gave them."""

    answers: Sequence[EvaluatedAnswer]
    settings: dict[str, Any]


def read(data: Path | None, columns: loading.Pairs | None, *, limit: int | None, optional: bool) -> QuestionFile | None:
    """The questions, with a note on those that are left out."""
    if data is None:
        if optional:
            return None
        raise typer.BadParameter("give --data SOURCE: the questions to ask (or --regrade the answers there are)")
    questions = loading.read_data(data, columns)
    return replace(questions, rows=questions.rows[:limit])


def answer(
    questions: QuestionFile | None,
    files: Files,
    estimators: Mapping[str, Estimator],
    *,
    source: ModelSource,
    phrasing: Phrasing,
    max_tokens: int,
    by: JudgedBy,
    seed: int,
) -> Run:
    """Answer and measure the missing questions; Ctrl-C tells how many are kept."""
    rows = () if questions is None else questions.rows
    phrasing.require(rows)
    sampled = SampledQuestions.of(rows, count=_SAMPLED, seed=seed)
    with_variants = by == "answer" and "semgrad" in estimators
    model = loading.load(source)
    experiment = Experiment(
        model,
        estimators,
        GenerationOptions(max_tokens=max_tokens),
        phrasing=phrasing,
        ablations=semgrad_ablations(model.n_layers) if with_variants else {},
        sampled=sampled,
        by_sentence=by == "sentence",
    )
    with kept_on_interrupt("Answering", f"answers are kept in {files.answers}") as tell:
        answers = experiment.run(rows, files.answers, batch_size=loading.BATCH, on_progress=tell)
    return Run([row for one in answers for row in one.rows_by_sentence], experiment.settings(rows))


def kept(files: Files, questions: QuestionFile | None) -> Run:
    """The answers there are, with the references of the questions, if those are given."""
    settings, answers = read_record(files.answers, EvaluatedAnswer)
    if questions is not None:
        known = {answer.key: answer for answer in answers}
        answers = [known[row.key] for row in questions.rows if row.key in known]
        if missing := len(questions.rows) - len(answers):
            note(f"{missing} of {len(questions.rows)} questions have no answer yet; without --regrade they get one.")
    if not answers:
        raise InputError(f"{files.answers} holds no answer to grade; run the command without --regrade.")
    return Run([row for one in answers for row in one.rows_by_sentence], settings)


def grade_run(
    run: Run, graders: Sequence[AnswerGrader], labels: Path | None, files: Files, questions: QuestionFile | None
) -> Results:
    """Every grader's verdicts; people, where there are labels, decide."""
    answers = run.answers if questions is None else with_references(run.answers, questions.rows)
    items = [SheetAnswer.of(answer) for answer in answers]
    grades: dict[str, Verdicts] = (
        {} if labels is None else {HUMAN: labels_for(labels, items, others=recorded_keys(files.answers))}
    )
    for grader in graders or [GRADERS[default_grader(run.settings["prompt_template"])]]:
        with kept_on_interrupt(f"Grading by {grader.name}", f"grades are kept in {files.grades}") as tell:
            grades[grader.name] = grade([one.to_grade for one in items], grader, files.grades, on_progress=tell)
    decides, verdicts = next(iter(grades.items()))
    show_grades(items, verdicts, decides, with_none=is_final(decides))
    results = Results(answers, grades, run.settings, _name(questions, files))
    for name, count in results.ungraded.items():
        left_out = f"{count} of {len(answers)} answers have no verdict by {name}; they are left out of the results."
        say(no_verdict(count, len(answers), name) if is_final(name) else left_out, label="Warning")
    if (abstained := verdicts.count(ABSTAINED)) > 0:
        note(f"{abstained} of {len(answers)} answers abstain; they are neither right nor wrong, and left out.")
    for title, reason in results.unfitted.items():
        note(f"{title} is left out. {reason}")
    return results


def _name(questions: QuestionFile | None, files: Files) -> str:
    """The name of the questions in the results: that of their file or dataset, or the one of last time."""
    if questions is None:
        return read_graded(files.run).data if files.run.exists() else files.folder.name
    source = str(questions.path)
    return source.removeprefix(HUB) if source.startswith(HUB) else questions.path.stem


class Files:
    """The files of an evaluation in its folder.

    `answers` is the record of the run, `grades` has the verdicts of models and judges, `table` a row for every
    question. `run` is the source of the report, `page` the report, and `sheet` the one for
    human labels.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers, self.grades = folder / "answers.jsonl", folder / "grades.jsonl"
        self.table, self.run = folder / "graded.csv", folder / "run.json"
        self.page, self.sheet = folder / "report.html", folder / "labels.csv"

    @contextmanager
    def made(self) -> Generator[None]:
        """The folder is there; one that was made for this, and in which nothing came to lie, is gone at the end."""
        new = make_folder(self.folder)
        try:
            yield
        finally:
            if new and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def check(self, inputs: Sequence[Path], *, report: bool) -> None:
        """Refuse, before any work, a file that cannot be written, or is an input.

        The sheet for people is not among the outputs once it is there: it is read, and never overwritten.
        """
        outputs = [
            Output(self.answers, "record of answers", is_record()),
            Output(self.grades, "record of grades", is_record(GRADES)),
            Output(self.table, "table of an evaluation", is_graded_table),
            Output(self.run, "graded run", read_by(read_graded)),
        ]
        if not self.sheet.exists():
            outputs.append(Output(self.sheet, "sheet of labels", lambda _: False))
        if report:
            outputs.append(Output(self.page, "report of an evaluation", is_report))
            tables = sorted(self.folder.glob("tables/*.csv"))
            outputs += [Output(path, "table of a report", is_table) for path in tables]
        require_outputs(outputs, inputs=inputs)


def write(results: Results, files: Files, others: Sequence[GradedRun] | None) -> None:
    """The table, the sheet for people, which is extended where it is there, and the report, which shows `others` too;
    None: there is no report."""
    results.write_csv(files.table)
    write_graded(files.run, results.graded_run)
    extend_sheet(files.sheet, [SheetAnswer.of(answer) for answer in results.answers])
    if others is not None:
        with status("Writing the report …"):
            write_report([results.graded_run, *others], files.folder)


def show(results: Results, files: Files, *, as_json: bool, reported: bool = True) -> None:
    """The methods, best first, and the places of the files.

    `reported` tells that this command wrote the report: an existing page may be older.
    """
    graded = results.graded_run
    rows = [
        (title, auroc(scores, graded.correct), aurc(scores, graded.correct), _mean(graded.milliseconds.get(title, ())))
        for title, scores in graded.scores.items()
    ]
    if as_json:
        methods = {title: {"auroc": a, "aurc": r, "milliseconds": ms} for title, a, r, ms in rows}
        document = {"title": graded.title, "accuracy": graded.accuracy, "ungraded": results.ungraded}
        about = {"settings": graded.settings, "folder": str(files.folder)}
        typer.echo(json.dumps({**document, "methods": methods, **about}))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=graded.title, title_justify="left")
    for name in ("method", "AUROC", "AURC", "+ ms"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for title, a, r, ms in sorted(rows, key=lambda row: -(row[1] or 0.0)):
        table.add_row(title, *("none" if x is None else f"{x:.3f}" for x in (a, r)), f"{ms:.1f}")
    OUT.print(table)
    unit = "sentences" if graded.clusters else "answers"
    right = f"{100 * graded.accuracy:.1f}% of {graded.n} {unit} are right by {graded.settings['grader']}"
    undefined = "; AUROC is undefined: there is nothing to tell apart" if graded.accuracy in (0, 1) else ""
    show_line(f"{right}{undefined}.")
    if means := graded.settings.get("right means"):
        show_line(f"Right means: {means}.")
    places = f"{files.table.name}, {files.answers.name}" + (f" and {files.page.name}" if reported else "")
    show_line(f"Everything is in {files.folder}: {places}.")


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
