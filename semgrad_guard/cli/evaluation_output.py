"""The files of `evaluate` in its folder, and its output at the end."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich import box
from rich.table import Table

from semgrad_guard.calibration import Calibration
from semgrad_guard.cli.terminal import OUT, detail, status
from semgrad_guard.evaluation.files import Output, make_folder, read_by, require_outputs
from semgrad_guard.evaluation.graded import GradedRun, read_graded, write_graded
from semgrad_guard.evaluation.graders.grading import GRADES
from semgrad_guard.evaluation.graders.labels import extend_sheet
from semgrad_guard.evaluation.job_record import is_record
from semgrad_guard.evaluation.metrics import aurc, auroc
from semgrad_guard.evaluation.metrics.guarantee import ALPHAS
from semgrad_guard.evaluation.probing.probe_record import Probe
from semgrad_guard.evaluation.report import write_report
from semgrad_guard.evaluation.report.drawing import require_drawable
from semgrad_guard.evaluation.report.page import is_report
from semgrad_guard.evaluation.report.table import is_table
from semgrad_guard.evaluation.results import Results, hold_against, is_graded_table


@dataclass(frozen=True)
class Files:
    """The files of an evaluation in its folder."""

    folder: Path

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
            outputs += [
                Output(path, "table of a report", is_table) for path in sorted(self.folder.glob("tables/*.csv"))
            ]
        require_outputs(outputs, inputs=inputs)

    @property
    def answers(self) -> Path:
        """The record of the run."""
        return self.folder / "answers.jsonl"

    @property
    def grades(self) -> Path:
        """The verdicts of models and judges."""
        return self.folder / "grades.jsonl"

    @property
    def table(self) -> Path:
        """A row for every question."""
        return self.folder / "graded.csv"

    @property
    def run(self) -> Path:
        """The source of the report, for reports on several runs."""
        return self.folder / "run.json"

    @property
    def page(self) -> Path:
        """The report."""
        return self.folder / "report.html"

    @property
    def sheet(self) -> Path:
        """The sheet for human labels."""
        return self.folder / "labels.csv"


def finished(folders: Sequence[Path], *, report: bool) -> Sequence[GradedRun]:
    """Other evaluations for the same report, and whether there can be one, before any work."""
    if report:
        require_drawable(Path("report.svg"))
    return [read_graded(Files(folder).run) for folder in folders]


def write(results: Results, files: Files) -> None:
    """The table, and the sheet for people: begun, or extended, for it may be half filled in."""
    results.write_csv(files.table)
    write_graded(files.run, results.graded_run)
    extend_sheet(files.sheet, results.answers)


def report(
    results: Results, others: Sequence[GradedRun], probe: Probe | None, files: Files, *, alphas: Sequence[float] | None
) -> None:
    """Tables, figures and the page, of this run and the other ones."""
    with status("Writing the report …"):
        maps = None if probe is None else probe.maps
        runs = [results.graded_run, *others]
        write_report(runs, files.folder, probe=maps, alphas=alphas or ALPHAS, tell=lambda what: detail(f"{what} …"))


def show(
    results: Results, files: Files, calibration: Calibration | None, *, as_json: bool, reported: bool = True
) -> None:
    """The methods, best first, the effect of a calibration on the run, and the places of the files.

    `reported` tells that this command wrote the report: an existing page may be older, or another run's.
    """
    shift = None if calibration is None else hold_against(calibration, results)
    graded = results.graded_run
    rows = [
        (title, auroc(scores, graded.correct), aurc(scores, graded.correct), _mean(graded.milliseconds.get(title, ())))
        for title, scores in graded.scores.items()
    ]
    if as_json:
        methods = {title: {"auroc": a, "aurc": r, "milliseconds": ms} for title, a, r, ms in rows}
        document = {"title": graded.title, "accuracy": graded.accuracy, "ungraded": results.ungraded}
        about = {"settings": graded.settings, "folder": str(files.folder)}
        if shift is not None:
            about["calibration"] = {"answered": shift.answered, "risk": shift.risk, "drift": shift.drift.model_dump()}
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
    OUT.print(f"{right}{undefined}.", soft_wrap=True, markup=False)
    if means := graded.settings.get("right means"):
        OUT.print(f"Right means: {means}.", soft_wrap=True, markup=False)
    if shift is not None:
        OUT.print(f"By the calibration {shift.in_words}", soft_wrap=True, markup=False)
    places = f"{files.table.name}, {files.answers.name}" + (f" and {files.page.name}" if reported else "")
    OUT.print(f"Everything is in {files.folder}: {places}.", soft_wrap=True, markup=False)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
