"""What `calibrate` and `evaluate` share about asking and grading: a look first, labels, examples, stop strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from semgrad_guard import Calibration
from semgrad_guard.cli import grading
from semgrad_guard.grading import Contains
from semgrad_guard.questions.data import Question
from tests.made_answers import made

from .helpers import TOKENS, Run, fill, flat, table


def test_ten_answers_are_shown_and_doubtful_grades_told(calibrate: Run, right: Path, wrong: Path) -> None:
    stderr = calibrate(right).stderr
    assert "Look: 10 of 60 answers, graded by contains@3. Question [reference] answer:" in stderr
    assert stderr.count("\n  right: What is item ") == 10
    assert "60 of 60 answers are right by contains@3, more than 95 %." in flat(stderr)
    stderr = calibrate(wrong, "--grader", "exact-match").stderr
    assert stderr.count("\n  wrong: What is item ") == 10
    assert "0 of 60 answers are right by exact-match, less than 5 %." in flat(stderr)
    quiet = calibrate(wrong, "--quiet").stderr
    assert "wrong: What" not in quiet
    assert "less than 5 %" in quiet


def test_answers_without_a_verdict_are_wrong_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["It is Paris.", "Paris or Lyon.", "It is Lyon."]
    answers = [made(i, text=text) for i, text in enumerate(texts)]
    questions = [Question(question=answer.question, answers=("Paris",)) for answer in answers]
    grades = grading.grade(questions, answers, Contains(), book=tmp_path / "grades.jsonl")
    assert (grades.of_answers, grades.no_verdict) == ({0: True, 1: False, 2: False}, 1)
    shown = flat(capsys.readouterr().err)
    assert "1 of 3 answers have no verdict by contains@3; they count as wrong." in shown
    assert "no verdict: question 1" in shown


def test_people_decide_once_the_sheet_is_filled_in(calibrate: Run, wrong: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "labels.csv"
    first = calibrate(wrong, "--labels", sheet)
    assert first.exit_code == 1
    assert "60 rows and no label yet" in flat(first.stderr)
    assert not (tmp_path / "c.json").exists()
    fill(sheet, ["yes"] * 50 + ["no"] * 5 + [""] * 5)
    labelled = sheet.read_bytes()
    second = calibrate(wrong, "--labels", sheet)
    assert second.exit_code in (0, 4), second.stderr
    assert "5 of 60 answers have no label in the file" in flat(second.stderr)
    made = Calibration.load(tmp_path / "c.json")
    assert (made.n, made.n_wrong, made.binding.grader) == (55, 5, "human")
    assert sheet.read_bytes() == labelled


def test_people_grade_a_random_part_of_the_surest(calibrate: Run, right: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "labels.csv"
    options = ("--labels", sheet, "--by-hand", 20, "--alpha", 0.3)
    first = calibrate(right, *options)
    assert "20 answers are graded by hand: a random part of the surest 50.0%." in flat(first.stderr)
    assert len(table(sheet)) == 20
    fill(sheet, ["yes"] * 19 + [""])
    assert "1 of the 20 answers to grade have no label" in flat(calibrate(right, *options).stderr)
    fill(sheet, ["yes"] * 19 + ["abstained"])
    result = calibrate(right, *options)
    assert result.exit_code == 0, result.stderr
    assert "questions 0 of 19 answers wrong; 1 more abstain, which is neither right nor wrong" in flat(result.stdout)
    assert "20 graded by hand, a random part of the surest 50.0% (30 answers)" in flat(result.stdout)
    made = Calibration.load(tmp_path / "c.json")
    assert made.by_hand is not None
    assert (made.n, made.n_tested, made.binding.grader) == (60, 19, "human")
    assert json.loads(calibrate(right, *options, "--json").stdout)["effect"] is None


@pytest.mark.parametrize("name", ["states", "auto"])
def test_what_is_learned_is_graded_by_people_too(calibrate: Run, wrong: Path, tmp_path: Path, name: str) -> None:
    sheet = tmp_path / "labels.csv"
    calibrate(wrong, "--labels", sheet, "--estimator", name)
    fill(sheet, ["yes", "no"] * 30)
    assert calibrate(wrong, "--labels", sheet, "--estimator", name).exit_code in (0, 4)
    made = Calibration.load(tmp_path / "c.json")
    assert made.binding.grader == "human"


def test_evaluate_extends_its_sheet_after_a_partial_run(
    run: Run, model_folder: Path, right: Path, tmp_path: Path
) -> None:
    def evaluate(*arguments: object) -> Result:
        fixed = ("--output", tmp_path / "out", "--no-report", "--methods", "gnll")
        options = ("--model", model_folder, "--data", right, "--max-tokens", TOKENS)
        return run("evaluate", *fixed, *options, *arguments)

    sheet = tmp_path / "out" / "labels.csv"
    assert "graded by contains@3" in evaluate("--limit", 8).stderr
    fill(sheet, ["yes", "no"] * 4)
    before = sheet.read_bytes()
    assert evaluate("--limit", 12, "--prompt", "paper").exit_code == 1  # other settings than those of the run
    assert evaluate("--limit", 12).exit_code == 0
    assert sheet.read_bytes().startswith(before)
    assert len(table(sheet)) == 12
    people = evaluate("--limit", 8, "--labels", sheet)
    assert people.exit_code == 0, people.stderr
    assert "50.0% of 8 answers are right by human." in flat(people.stdout)
    assert "graded by human" in people.stderr
