"""The steps of `evaluate`, in order: read, answer (or take what is kept), grade, write, show."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.table import Table

from semgrad_guard.cli.help import ExitCode
from semgrad_guard.cli.terminal import ERR, OUT, progress, say, say_problems
from semgrad_guard.errors import InputError

if TYPE_CHECKING:
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.evaluation.data import QuestionFile
    from semgrad_guard.evaluation.evaluated import EvaluatedAnswer
    from semgrad_guard.evaluation.graded import GradedRun
    from semgrad_guard.evaluation.graders import AnswerGrader
    from semgrad_guard.evaluation.prompts import Wording
    from semgrad_guard.evaluation.results import Results


@dataclass(frozen=True)
class Files:
    """What an evaluation keeps and writes in its folder."""

    folder: Path

    @classmethod
    def within(cls, folder: Path) -> Files:
        """The folder, made if need be, and known to be writable."""
        from semgrad_guard.evaluation.files import require_writable

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"Cannot make the folder {folder}: {error.strerror or error}.") from error
        require_writable(folder / "answers.jsonl")
        return cls(folder)

    @property
    def answers(self) -> Path:
        """The record of the run."""
        return self.folder / "answers.jsonl"

    @property
    def grades(self) -> Path:
        """What models and judges said of the answers."""
        return self.folder / "grades.jsonl"

    @property
    def table(self) -> Path:
        """A row for every question."""
        return self.folder / "graded.csv"

    @property
    def run(self) -> Path:
        """What the report is made of, for reports on several runs."""
        return self.folder / "run.json"

    @property
    def sheet(self) -> Path:
        """The sheet for human labels."""
        return self.folder / "labels.csv"


@dataclass(frozen=True)
class Asked:
    """How questions are put to the model."""

    wording: Wording
    system: str | None
    max_new_tokens: int
    batch_size: int


@dataclass(frozen=True)
class Chosen:
    """What is measured."""

    methods: Sequence[str] | None
    nli: str | None
    cross_encoder: str | None
    seed: int
    ablations: bool

    def estimators(self, max_new_tokens: int) -> Sequence[Estimator]:
        """The paper's methods with the models that the user named, or those among them that were chosen."""
        from semgrad_guard.engine.text_pairs import CrossEncoder, Entailment
        from semgrad_guard.estimators.equivalence import NLIEquivalence
        from semgrad_guard.estimators.suite import paper_suite

        nli = None if self.nli is None else NLIEquivalence(Entailment.from_pretrained(self.nli))
        importance = None if self.cross_encoder is None else CrossEncoder.from_pretrained(self.cross_encoder)
        suite = paper_suite(nli, importance, self.seed, max_new_tokens=max_new_tokens)
        known = {estimator.name: estimator for estimator in suite}
        wanted = list(dict.fromkeys(self.methods or known))
        if unknown := [name for name in wanted if name not in known]:
            raise InputError(f"there is no method {unknown[0]!r}; there are {', '.join(known)}")
        return [known[name] for name in wanted]


@dataclass(frozen=True)
class Run:
    """Answers, and the settings of the run that gave them."""

    answers: Sequence[EvaluatedAnswer]
    settings: dict[str, Any]


def load_graders(specs: Sequence[str], *, nli: str | None) -> Sequence[AnswerGrader]:
    """The graders, before hours of answering rather than after."""
    from semgrad_guard.evaluation.graders.naming import load_graders

    with ERR.status("Loading graders …"):
        return load_graders(specs, nli=nli)


def finished(folders: Sequence[Path], *, report: bool) -> Sequence[GradedRun]:
    """Other evaluations for the same report, and whether there can be one, before any work."""
    from semgrad_guard.evaluation.graded_file import read_graded
    from semgrad_guard.evaluation.plots import require_drawable

    if report:
        require_drawable(Path("report.svg"))
    return [read_graded(Files(folder).run) for folder in folders]


def read(data: str | None, *, limit: int | None, strict: bool, optional: bool) -> QuestionFile | None:
    """The questions, with a word on what is left out."""
    from semgrad_guard.evaluation.data import read_questions

    if data is None:
        if optional:
            return None
        raise typer.BadParameter("give --data SOURCE: the questions to ask (or --regrade the answers there are)")
    questions = read_questions(data, strict=strict)
    say_problems(questions.problems)
    say_problems([*questions.duplicates, *questions.shared_ids], label="Note")
    return replace(questions, rows=questions.rows[:limit])


def answer(questions: QuestionFile | None, files: Files, chosen: Chosen, asked: Asked, *, model: LanguageModel) -> Run:
    """Answer and measure what is missing; on Ctrl-C say how much is kept."""
    from semgrad_guard.engine.generation import GenerationOptions
    from semgrad_guard.evaluation.ablations import semgrad_ablations
    from semgrad_guard.evaluation.experiment import Experiment

    rows = () if questions is None else questions.rows
    experiment = Experiment(
        model,
        chosen.estimators(asked.max_new_tokens),
        GenerationOptions(max_new_tokens=asked.max_new_tokens),
        wording=asked.wording,
        system=asked.system,
        ablations=semgrad_ablations(model.n_layers) if chosen.ablations else {},
    )
    with _kept_on_interrupt("Answering", f"answers are kept in {files.answers}") as tell:
        answers = experiment.run(rows, files.answers, batch_size=asked.batch_size, on_progress=tell)
    return Run(answers, experiment.settings(rows))


def kept(files: Files, questions: QuestionFile | None) -> Run:
    """The answers there are, with the references of the questions, if those are given."""
    from semgrad_guard.evaluation.evaluated import EvaluatedAnswer
    from semgrad_guard.evaluation.run_file import read_run

    settings, answers = read_run(files.answers, EvaluatedAnswer)
    if questions is not None:
        known = {each.key: each for each in answers}
        answers = [known[row.key] for row in questions.rows if row.key in known]
        if missing := len(questions.rows) - len(answers):
            say(f"{missing} of {len(questions.rows)} questions have no answer yet; without --regrade they get one.")
    if not answers:
        raise InputError(f"{files.answers} holds no answer to grade; run the command without --regrade.")
    return Run(answers, settings)


def grade(
    run: Run, graders: Sequence[AnswerGrader], labels: Path | None, files: Files, questions: QuestionFile | None
) -> Results:
    """Every grader's verdicts; people, where there are labels, decide."""
    from semgrad_guard.evaluation.graders.base import WordGrader
    from semgrad_guard.evaluation.grading import GradeBook, grade, with_references
    from semgrad_guard.evaluation.labels import NAME, read_sheet
    from semgrad_guard.evaluation.results import Results

    answers = run.answers if questions is None else with_references(run.answers, questions.rows)
    grades = {} if labels is None else {NAME: read_sheet(labels, answers)}
    book = GradeBook(files.grades)
    for grader in graders:
        if isinstance(grader, WordGrader):
            grades[grader.name] = grade(answers, grader)
            continue
        with _kept_on_interrupt(f"Grading by {grader.name}", f"grades are kept in {files.grades}") as tell:
            grades[grader.name] = grade(answers, grader, book, on_progress=tell)
    data = files.folder.name if questions is None else _name(str(questions.path))
    results = Results(answers, grades, run.settings, data)
    for name, count in results.ungraded.items():
        say(f"{count} of {len(answers)} answers have no verdict by {name}; they are left out of the results.")
    return results


def write(results: Results, files: Files) -> None:
    """The table, and the sheet for people unless there is one: it may be half filled in."""
    from semgrad_guard.evaluation.graded_file import write_graded
    from semgrad_guard.evaluation.labels import write_sheet

    results.write_csv(files.table)
    write_graded(files.run, results.graded_run())
    if not files.sheet.exists():
        write_sheet(files.sheet, results.answers)


def report(results: Results, others: Sequence[GradedRun], files: Files) -> None:
    """Tables, figures and the page, of this run and those beside it."""
    from semgrad_guard.evaluation.report import write_report

    with ERR.status("Writing the report …") as status:
        write_report([results.graded_run(), *others], files.folder, tell=lambda what: status.update(f"{what} …"))


def show(results: Results, files: Files, *, as_json: bool) -> None:
    """The methods, best first, and where everything is."""
    from semgrad_guard.evaluation.metrics import aurc, auroc

    graded = results.graded_run()
    rows = [
        (title, auroc(scores, graded.correct), aurc(scores, graded.correct), _mean(graded.milliseconds[title]))
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
    right = f"{100 * graded.accuracy:.1f}% of {graded.n} answers are right by {graded.settings['grader']}"
    undefined = "; AUROC is undefined: there is nothing to tell apart" if graded.accuracy in (0, 1) else ""
    OUT.print(f"{right}{undefined}.", soft_wrap=True, markup=False)
    page = files.folder / "report.html"
    places = f"{files.table.name}, {files.answers.name}" + (f" and {page.name}" if page.exists() else "")
    OUT.print(f"Everything is in {files.folder}: {places}.", soft_wrap=True, markup=False)


@contextmanager
def _kept_on_interrupt(what: str, kept: str) -> Generator[Callable[[int, int], None]]:
    """Progress; on Ctrl-C a word on how far it is and how to go on."""
    reached, of = 0, 0
    with progress(what) as tell:

        def watch(done: int, total: int) -> None:
            nonlocal reached, of
            reached, of = done, total
            tell(done, total)

        try:
            yield watch
        except KeyboardInterrupt as error:
            message = f"{reached} of {of} {kept}. Run the same command again to continue."
            say(message, label="Interrupted")
            raise typer.Exit(ExitCode.INTERRUPTED) from error


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _name(source: str) -> str:
    """What the results call the questions."""
    return source.removeprefix("hub:") if source.startswith("hub:") else Path(source).stem
