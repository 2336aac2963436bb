"""The runs of `calibrate`, `evaluate` and `probe`: answers, or recorded ones, their grades, and the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.table import Table

from semgrad_guard.calibration import Binding
from semgrad_guard.calibration.calibration_set import Copies
from semgrad_guard.cli import from_options, grading
from semgrad_guard.cli.drafting import ModelWriter, ServerWriter, asking
from semgrad_guard.cli.from_options import Output, read_by, require_outputs
from semgrad_guard.cli.grading import Files, recorded_keys, show_grades
from semgrad_guard.cli.terminal import (
    OUT,
    kept_on_interrupt,
    note,
    progress,
    say,
    say_cut,
    say_unscored,
    show_line,
    status,
)
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import NEEDS_LABELS, Estimator, FusedStates
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.estimators.suite import paper_suite
from semgrad_guard.estimators.text_pairs import CrossEncoder, NLIEquivalence
from semgrad_guard.files import make_folder
from semgrad_guard.grading import GRADERS, AnswerGrader, default_grader
from semgrad_guard.grading.by_name import entailment_model, is_final, no_verdict
from semgrad_guard.grading.candidates import (
    CANDIDATES,
    FREE,
    Outcome,
    calibrate_best,
    calibrate_by_hand,
    calibrate_learned,
    calibrate_scored,
)
from semgrad_guard.grading.grader import ABSTAINED, Grade, Verdicts
from semgrad_guard.grading.learning_set import LearningSet
from semgrad_guard.grading.sheets import GRADES, HUMAN, SheetAnswer, extend_sheet, grade, labels_for, with_references
from semgrad_guard.guard import template_name
from semgrad_guard.guard.answering import require_by_sentence
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.loading import ModelSource, load_estimator
from semgrad_guard.metrics import aurc, auroc
from semgrad_guard.paper.drawing import save
from semgrad_guard.paper.experiment import Experiment, SampledQuestions, semgrad_ablations
from semgrad_guard.paper.probe_record import Probe
from semgrad_guard.paper.probing import ProbePlan, by_model, probe, with_written
from semgrad_guard.paper.report import is_report, sps_auroc_figure, sps_figure, write_report
from semgrad_guard.paper.results import GradedRun, Results, is_graded_table, read_graded, write_graded
from semgrad_guard.paper.tables import is_table
from semgrad_guard.questions.data import Phrasing, Question, QuestionFile, wordings
from semgrad_guard.questions.data_files import HUB
from semgrad_guard.questions.run_record import EvaluatedAnswer, is_record, number_of_try, read_record
from semgrad_guard.settings import REPORTED, JudgedBy, OnCut, OnDoubt


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
            model = from_options.load(self.source)
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


_SAMPLED = 300
"""Questions of each kind in which the methods that draw samples take part, a seeded choice; the others take all."""


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
    with from_options.quietly("Loading what compares answers …"):
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
class Answered:
    """Answers, and the settings of the run that gave them."""

    answers: Sequence[EvaluatedAnswer]
    settings: dict[str, Any]


def read(
    data: Path | None, columns: from_options.Pairs | None, *, limit: int | None, optional: bool
) -> QuestionFile | None:
    """The questions, with a note on those that are left out."""
    if data is None:
        if optional:
            return None
        raise typer.BadParameter("give --data SOURCE: the questions to ask (or --regrade the answers there are)")
    questions = from_options.read_data(data, columns)
    return replace(questions, rows=questions.rows[:limit])


def answer(
    questions: QuestionFile | None,
    files: EvaluationFolder,
    estimators: Mapping[str, Estimator],
    *,
    source: ModelSource,
    phrasing: Phrasing,
    max_tokens: int,
    by: JudgedBy,
    seed: int,
) -> Answered:
    """Answer and measure the missing questions; Ctrl-C tells how many are kept."""
    rows = () if questions is None else questions.rows
    phrasing.require(rows)
    sampled = SampledQuestions.of(rows, count=_SAMPLED, seed=seed)
    with_variants = by == "answer" and "semgrad" in estimators
    model = from_options.load(source)
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
        answers = experiment.run(rows, files.answers, batch_size=from_options.BATCH, on_progress=tell)
    return Answered([row for one in answers for row in one.rows_by_sentence], experiment.settings(rows))


def kept(files: EvaluationFolder, questions: QuestionFile | None) -> Answered:
    """The answers there are, with the references of the questions, if those are given."""
    settings, answers = read_record(files.answers, EvaluatedAnswer)
    if questions is not None:
        known = {answer.key: answer for answer in answers}
        answers = [known[row.key] for row in questions.rows if row.key in known]
        if missing := len(questions.rows) - len(answers):
            note(f"{missing} of {len(questions.rows)} questions have no answer yet; without --regrade they get one.")
    if not answers:
        raise InputError(f"{files.answers} holds no answer to grade; run the command without --regrade.")
    return Answered([row for one in answers for row in one.rows_by_sentence], settings)


def grade_run(
    run: Answered,
    graders: Sequence[AnswerGrader],
    labels: Path | None,
    files: EvaluationFolder,
    questions: QuestionFile | None,
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


def _name(questions: QuestionFile | None, files: EvaluationFolder) -> str:
    """The name of the questions in the results: that of their file or dataset, or the one of last time."""
    if questions is None:
        return read_graded(files.run).data if files.run.exists() else files.folder.name
    source = str(questions.path)
    return source.removeprefix(HUB) if source.startswith(HUB) else questions.path.stem


class EvaluationFolder:
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


def write(results: Results, files: EvaluationFolder, others: Sequence[GradedRun] | None) -> None:
    """The table, the sheet for people, which is extended where it is there, and the report, which shows `others` too;
    None: there is no report."""
    results.write_csv(files.table)
    write_graded(files.run, results.graded_run)
    extend_sheet(files.sheet, [SheetAnswer.of(answer) for answer in results.answers])
    if others is not None:
        with status("Writing the report …"):
            write_report([results.graded_run, *others], files.folder)


def show(results: Results, files: EvaluationFolder, *, as_json: bool, reported: bool = True) -> None:
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


def paraphrased(
    questions: Sequence[Question], path: Path, writer: str, nli: str | None, model: LanguageModel
) -> list[Question]:
    """The questions with their paraphrases, which the writer has written: the model itself, or a server's."""
    url, _, name = writer.partition("#")
    ask = asking(url, name) if name else by_model(model)
    with from_options.quietly("Loading what compares questions …"):
        judge = None if nli is None else entailment_model(nli)
    with progress("Writing paraphrases") as tell:
        named = writer if name else f"{model.identity.name}, {model.identity.fingerprint}"
        return with_written(
            questions, path, ask, writer=named, nli=judge, batch_size=from_options.BATCH, on_progress=tell
        )


def probed(questions: QuestionFile, plan: ProbePlan, model: LanguageModel, kept: Path | None) -> Probe:
    """The probe of a model; its answers are kept there."""
    return probe(
        questions.rows,
        model=model,
        plan=plan,
        data=questions.path.name,
        answers_path=kept,
        grader=GRADERS[default_grader(template_name(model, Phrasing().name()))],
        phase=progress,
    )


def drawn(found: Probe, heat_map: Path, scatter: Path) -> list[Path]:
    """The pictures of a probe, drawn into these files as far as there is something to show."""
    made = [save(sps_figure(found.preservation, title=found.title, tokens=found.labels), heat_map)]
    if (aurocs := found.aurocs) is not None:
        made.append(save(sps_auroc_figure(found.preservation, aurocs, title=found.title), scatter))
    return made
