"""`plan`: the effect to expect of so many labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semgrad_guard.calibration import plan

from .helpers import Run, flat, jsonl


def test_a_plan_is_told_and_printed_as_json(run: Run) -> None:
    shown = run("plan", "--error", 0.2, "--auroc", 0.8)
    expected = [plan(n, error=0.2, auroc=0.8, alpha=0.1, delta=0.09) for n in (50, 100, 300, 1000)]
    assert shown.stdout.splitlines() == [
        "Any guard has to withhold at least 11.1% of the answers.",
        *(f"{one}." for one in expected),
    ]
    one = json.loads(run("plan", "--error", 0.2, "--auroc", 0.8, "--labels", 100, "--json").stdout)
    assert [row["n"] for row in one] == [100]
    assert (one[0]["found"], one[0]["withheld"], one[0]["delta"]) == (expected[1].found, pytest.approx(1 / 9), 0.1)


def test_a_plan_is_about_the_first_calibration_of_the_command(run: Run) -> None:
    """It keeps a tenth of delta, so that it takes 23 right answers, not 22."""
    shown = json.loads(run("plan", "--error", 0, "--auroc", 0.5, "--labels", 22, "--labels", 23, "--json").stdout)
    assert [row["found"] for row in shown] == [0, 1]


def test_a_plan_by_sentence_is_about_answers_whose_sentences_have_labels(run: Run) -> None:
    usual = ("plan", "--error", 0.3, "--auroc", 0.88, "--alpha", 0.2, "--labels", 100, "--by", "sentence")
    drop = json.loads(run(*usual, "--on-doubt", "drop", "--json").stdout)[0]
    stop = json.loads(run(*usual, "--on-doubt", "stop", "--json").stdout)[0]
    assert drop["unit"] == "sentences"
    assert drop["found"] > stop["found"]
    assert drop["coverage"] > stop["coverage"]
    assert "100 answers with labels find a threshold" in run(*usual).stdout


def test_without_an_auroc_a_table_over_several_is_shown(run: Run, tmp_path: Path) -> None:
    usual = ("plan", "--error", 0.3, "--alpha", 0.2, "--labels", 100)
    found = json.loads(run(*usual, "--json").stdout)
    assert [row["auroc"] for row in found] == [0.6, 0.7, 0.8, 0.9]
    assert [row["found"] for row in found] == sorted(row["found"] for row in found)
    shown = flat(run(*usual).stdout)
    assert "AUROC 100 labels" in shown
    assert f"0.80 {found[2]['found']:.0%} / {found[2]['coverage']:.0%}" in shown
    score = {"gnll": {"uncertainty": 0.1}}
    texts = ["It is so.", "It is so.", "It is"]
    rows = [
        {"key": str(i), "question": f"{i}?", "text": text, "finish_reason": "length", "scores": score}
        for i, text in enumerate(texts)
    ]
    record = jsonl(tmp_path / "c.answers.jsonl", [{"semgrad_guard_record": "answers", "settings": {}}, *rows])
    result = run("plan", "--error", 0.3, "--answers", record, "--json")
    assert [row["n"] for row in json.loads(result.stdout)] == [2] * 4
    assert "holds 3 answers, 2 of them with a score" in flat(result.stderr)
    record = jsonl(tmp_path / "cut.answers.jsonl", [{"semgrad_guard_record": "answers", "settings": {}}, rows[2]])
    refused = run("plan", "--error", 0.3, "--answers", record)
    assert refused.exit_code == 1
    assert "has a score, so labels cannot find a threshold: raise --max-tokens" in flat(refused.stderr)
