"""`calibrate --by sentence`: a grade for every sentence, and a calibration that keeps a promise about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semgrad_guard import Calibration, Guard, LanguageModel, Policy
from semgrad_guard.paper.results import read_graded
from tests.fixed_model import PIECES, TEXT, FixedModel

from .helpers import ASKED, Run, fill, flat, jsonl, merged, table

N = 24


@pytest.fixture(scope="module")
def fixed(language_model: LanguageModel) -> FixedModel:
    return FixedModel.like(language_model)


@pytest.fixture
def calibrate(run: Run, fixed: FixedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with a model that writes three sentences, of which a reference is in the first two."""
    monkeypatch.setattr("semgrad_guard.cli.from_options.load", lambda _source: fixed)
    rows = ({"question": question, "answers": ["Go", "Milk is hot"]} for question in ASKED[:N])
    given = ("--data", jsonl(tmp_path / "q.jsonl", rows), "--output", tmp_path / "c.json", "--by", "sentence")
    usual = ("--alpha", 0.5, "--delta", 0.4)
    return lambda *arguments: run("calibrate", *merged((*given, *usual), arguments))


def test_sentences_are_graded_by_themselves(calibrate: Run, fixed: FixedModel, tmp_path: Path) -> None:
    result = calibrate("--on-doubt", "drop")
    made = Calibration.load(tmp_path / "c.json")
    assert (made.sentences.on_doubt, made.sentences.promise) == ("drop", "sentence")
    assert (made.sentences.n, made.sentences.wrong, made.n_wrong) == (3 * N, N, N)
    assert f"{N} of 72 sentences have no verdict by contains@3; they count as wrong" in flat(result.stderr)
    assert f"{N} of 72 sentences wrong, {N} sentences without a verdict among them" in flat(result.stdout)
    assert made.threshold is not None, result.stdout
    guard = Guard(fixed, Policy(calibration=made))
    verdict = guard(ASKED[0])
    assert [sentence.action for sentence in verdict.sentences].count("drop") < 3
    assert verdict.promised


def test_a_sheet_has_a_row_for_each_sentence(calibrate: Run, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.csv"
    begun = calibrate("--labels", sheet)
    assert (begun.exit_code, "no label yet" in begun.stderr) == (1, True)
    fill(sheet, {PIECES[0].strip(): "yes", PIECES[1].strip(): "yes", PIECES[2].strip(): "no"})
    result = calibrate("--labels", sheet)
    made = Calibration.load(tmp_path / "c.json")
    assert (made.sentences.n, made.sentences.wrong, made.tries) == (3 * N, N, 1), result.stderr
    assert made.binding.grader == "human"
    fill(sheet, {PIECES[0].strip(): "yes"})
    result = calibrate("--labels", sheet)
    assert "48 sentences of labelled answers have no label; they count as wrong" in flat(result.stderr)
    assert Calibration.load(tmp_path / "c.json").n_wrong == N


def test_few_grades_by_hand_are_those_of_random_questions(calibrate: Run, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.csv"
    result = calibrate("--labels", sheet, "--by-hand", 6)
    assert "6 of 24 questions are put to the model, a random part" in flat(result.stderr)
    assert len(table(sheet)) == 6 * 3


def test_a_changed_sheet_is_refused(calibrate: Run, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.csv"
    calibrate("--labels", sheet)
    text = sheet.read_text(encoding="utf-8-sig")
    sheet.write_text(text.replace("Milk is hot!", "Milk is cold!", 1), encoding="utf-8-sig")
    result = calibrate("--labels", sheet)
    assert result.exit_code == 1
    assert "holds another answer than this run gave" in flat(result.stderr)
    whole = tmp_path / "whole.csv"
    whole.write_text("key,correct\n" + sheet.read_text(encoding="utf-8-sig").splitlines()[1].split(".")[0] + ",yes\n")
    assert "which this run does not" in flat(calibrate("--labels", whole).stderr)


def test_one_record_is_of_one_unit(calibrate: Run, tmp_path: Path) -> None:
    calibrate()
    record = tmp_path / "c.answers.jsonl"
    answers = record.read_text().splitlines()[1:]
    row = json.loads(answers[0])
    assert row["text"] == TEXT
    assert [row["text"][one["start"] : one["end"]] for one in row["sentences"]] == list(PIECES)
    result = calibrate("--on-doubt", "drop")
    assert record.read_text().splitlines()[1:] == answers  # scored once
    made = Calibration.load(tmp_path / "c.json")
    assert (made.sentences.on_doubt, made.tries) == ("drop", 2), result.stderr
    whole = calibrate("--by", "answer")
    assert "by is None and was 'sentence'" in flat(whole.stderr)


def test_learned_estimators_learn_from_sentences(calibrate: Run, tmp_path: Path) -> None:
    result = calibrate("--estimator", "auto")
    made = Calibration.load(tmp_path / "c.json")
    assert made.choice is not None, result.stderr
    assert made.choice.estimator == "max_probability"
    assert "No label is spent" in made.choice.reason
    assert set(made.aurocs) >= {"hybridgrad", "max_probability"}


def test_an_evaluation_by_sentence_draws_answers_for_its_intervals(
    run: Run, fixed: FixedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semgrad_guard.cli.from_options.load", lambda _source: fixed)
    rows = ({"question": question, "answers": ["Go", "Milk is hot"]} for question in ASKED[:8])
    folder, data = tmp_path / "run", jsonl(tmp_path / "q.jsonl", rows)
    usual = ("evaluate", "--output", folder, "--data", data, "--by", "sentence")
    result = run(*usual, "--methods", "hybridgrad", "--methods", "gnll")
    assert result.exit_code == 0, result.stderr
    graded = read_graded(folder / "run.json")
    assert graded.clusters == [row // 3 for row in range(24)]
    assert graded.accuracy == pytest.approx(2 / 3)
    assert "66.7% of 24 sentences are right" in flat(result.stdout)
    assert "HybridGrad" in (folder / "report.html").read_text()
    assert [row["answer"] for row in table(folder / "labels.csv")][:3] == [piece.strip() for piece in PIECES]
    again = run("evaluate", "--output", folder, "--regrade", "--data", data, "--no-report")
    assert again.exit_code == 0, again.stderr
    refused = run(*usual, "--methods", "semantic_entropy")
    assert "compares whole answers" in flat(refused.stderr)
