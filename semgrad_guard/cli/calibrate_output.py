"""The output of `semgrad-guard calibrate`: files, a picture, and a summary for people or programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from semgrad_guard.calibration import Calibration
from semgrad_guard.cli.rendering import calibration_view, confidence_rows
from semgrad_guard.cli.terminal import OUT
from semgrad_guard.evaluation.files import STDIN, Output, beside, read_by, require_outputs
from semgrad_guard.evaluation.graders.grading import GRADES
from semgrad_guard.evaluation.job_record import is_record
from semgrad_guard.evaluation.questions.data import QuestionFile
from semgrad_guard.evaluation.report.drawing import draw_risk_coverage, is_drawn, require_drawable
from semgrad_guard.named import title_of

if TYPE_CHECKING:
    from semgrad_guard.evaluation.calibrating import Outcome


@dataclass(frozen=True)
class Files:
    """The files that the command writes."""

    output: Path
    answers: Path
    plot: Path | None
    labels: Path | None = None

    @property
    def grades(self) -> Path:
        """The verdicts of models and judges."""
        return beside(self.output, ".grades.jsonl")

    def check(self, inputs: Sequence[Path]) -> None:
        """Refuse, before any work, a file that cannot be written."""
        if self.plot is not None:
            require_drawable(self.plot)
        outputs = [
            Output(self.output, "calibration", read_by(Calibration.load)),
            Output(self.answers, "record of answers", is_record()),
            Output(self.grades, "record of grades", is_record(GRADES)),
        ]
        if self.plot is not None:
            outputs.append(Output(self.plot, "picture of a calibration", is_drawn))
        if self.labels not in (None, STDIN):  # extended, never overwritten; `grading.check_labels` recognises it
            outputs.append(Output(self.labels, "sheet of labels", lambda _: True))
        require_outputs(outputs, inputs=inputs)


def draw(path: Path, outcome: Outcome) -> None:
    """Risk against coverage, as a picture."""
    made_for = outcome.calibration.binding
    draw_risk_coverage(
        path,
        outcome.uncertainties,
        outcome.correct,
        calibration=outcome.calibration,
        title=f"{title_of(made_for.model) if made_for else ''}: {len(outcome.correct)} questions",
        label=made_for.estimator if made_for else "",
    )


def show(outcome: Outcome, questions: QuestionFile, files: Files, *, as_json: bool) -> None:
    """The result, on the terminal or as JSON."""
    if as_json:
        long: dict[str, Any] = dict.fromkeys(("scores", "grid", "confidence_map"), True)
        long["choice"] = True if outcome.calibration.choice is None else {"weights", "questions"}
        rows = confidence_rows(outcome.calibration)
        document = {
            "calibration": outcome.calibration.model_dump(mode="json", exclude=long),
            "effect": None if outcome.effect is None else asdict(outcome.effect),
            "no_verdict": outcome.no_verdict,
            "auroc": outcome.auroc,
            "aurc": outcome.aurc,
            "confidence": [{"uncertainty": score, "confidence": confidence} for score, confidence in rows],
            "broken_lines": [str(problem) for problem in questions.problems],
            "duplicates": list(questions.duplicates),
            "output": str(files.output),
            "answers": str(files.answers),
            "plot": None if files.plot is None else str(files.plot),
        }
        typer.echo(json.dumps(document))
        return
    OUT.print(calibration_view(outcome))
    OUT.print(f"The calibration {outcome.calibration.id} is in {files.output},", soft_wrap=True, markup=False)
    OUT.print(f"the answers are in {files.answers}.", soft_wrap=True, markup=False)
    if files.plot is not None:
        OUT.print(f"The picture is {files.plot}.", soft_wrap=True, markup=False)
