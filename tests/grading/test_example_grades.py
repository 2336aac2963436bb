"""Grades of a chain's answers to examples: doubted aloud, or given by people."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from semgrad_guard.adapters.examples import ExampleCalibration
from semgrad_guard.adapters.recorded_runs import AnsweredExample
from semgrad_guard.calibration import Binding, Calibration
from semgrad_guard.errors import GradingError
from semgrad_guard.records import PromptForm

COUNT = 60
EXAMPLES = [(f"What is item {i}?", "seven") for i in range(COUNT)]
FORM = PromptForm(text="What is item?", tokens=4, roles=("user",), user_text="What is item?")


def calibrated(text: str, tmp_path: Path | None = None) -> Calibration:
    more = {} if tmp_path is None else {"labels": tmp_path / "labels.csv"}
    job = ExampleCalibration(EXAMPLES, "contains", alpha=0.3, delta=0.2, **more)
    return job(
        [
            AnsweredExample(
                key=example.key,
                text=text,
                uncertainty=float(i),
                binding=Binding(model="tiny", estimator="hybridgrad"),
                prompt=FORM,
            )
            for i, example in enumerate(job.examples)
        ]
    )


@pytest.mark.parametrize(
    ("text", "wrong", "warning"),
    [
        ("It is seven.", 0, "60 of 60 answers are right by contains@3, more than 95 %"),
        ("Perhaps seven.", COUNT, "60 of 60 answers have no verdict by contains@3; they count as wrong."),
    ],
)
def test_what_can_hardly_be_is_told(text: str, wrong: int, warning: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "semgrad_guard"):
        assert calibrated(text).n_wrong == wrong
    assert warning in caplog.text


def test_people_decide(tmp_path: Path) -> None:
    with pytest.raises(GradingError, match="60 rows and no label yet"):
        calibrated("eight", tmp_path)
    sheet = tmp_path / "labels.csv"
    head, *rows = sheet.read_bytes().decode("utf-8-sig").splitlines()
    labelled = [f"{row}yes" if i % 4 else f"{row}no" for i, row in enumerate(rows[:-10])] + rows[-10:]
    sheet.write_text("\n".join([head, *labelled]) + "\n")
    made = calibrated("eight", tmp_path)
    assert (made.n, made.n_wrong, made.binding.grader) == (50, 13, "human")
    with pytest.raises(GradingError, match="another answer"):
        calibrated("nine", tmp_path)
