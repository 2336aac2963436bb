"""`gate`: a calibration that no longer lets through as much, or with more errors, fails a build."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy

import pytest
import torch

from semgrad_guard.cli import from_options
from semgrad_guard.errors import DataFileError, InputError
from semgrad_guard.paper.coverage import Band, Decided, Measured

from .helpers import TOKENS, Run, flat, merged


@pytest.fixture
def gate(run: Run, model_folder: Path, calibration: Path, right: Path, tmp_path: Path) -> Run:
    fixed = (
        *("--model", model_folder, "--calibration", calibration, "--data", right, "--band", tmp_path / "band.json"),
        *("--max-tokens", TOKENS),
    )
    return lambda *arguments: run("gate", *merged(fixed, arguments))


def test_a_recorded_band_passes_and_a_change_of_the_answers_grades_fails(gate: Run, tmp_path: Path) -> None:
    recorded = gate("--record")
    assert recorded.exit_code == 0, recorded.stderr
    band = Band.load(tmp_path / "band.json")
    assert (band.answers, band.delivered_wrong, band.error.high) == (60, 0, 0.02)
    assert (tmp_path / "band.answers.jsonl").exists() is False
    passed = gate()
    assert (passed.exit_code, passed.stdout.splitlines()[-1]) == (0, "The gate passes.")
    lowered = band.model_copy(update={"coverage": band.coverage.model_copy(update={"low": 0.0, "high": 0.2})})
    lowered.save(tmp_path / "band.json")
    failed = gate("--json")
    found = json.loads(failed.stdout)
    assert (failed.exit_code, found["passed"]) == (7, False)
    (left,) = found["left"]
    assert (left["name"], left["by"]) == ("coverage", pytest.approx(left["value"] - 0.2))
    assert (found["alpha"], found["requested_alpha"]) == (0.1, None)
    assert found["band"] == lowered.model_dump(mode="json")
    assert f"is {100 * left['by']:.1f} points above 0.0% to 20.0%. The gate fails." in flat(gate().stdout)


def test_the_verdict_depends_on_neither_threads_nor_batches(
    gate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do scores at the threshold, which is one of the calibration's own: there the last digits would decide."""
    assert gate("--record").exit_code == 0
    band = Band.load(tmp_path / "band.json")
    now = round(band.delivered / band.answers, 6)
    exact = {"coverage": {"low": now, "high": now}, "error": {"low": 0.0, "high": 0.0}}
    (tmp_path / "band.json").write_text(json.dumps({**band.model_dump(mode="json"), **exact}))
    before = torch.get_num_threads()
    try:
        for threads, size in ((1, 60), (2, 7)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(from_options, "BATCH", size)
            assert gate().exit_code == 0
    finally:
        torch.set_num_threads(before)


def test_the_same_verdict_in_a_hundred_runs() -> None:
    answers = [Decided(i < 50, i % 10 > 0, at_threshold=i == 49) for i in range(100)]
    band = Band.record(_of(answers), coverage_slack=0, error_slack=0)
    for run in range(100):  # rounding has the answer at the threshold let through or withheld
        answers[49] = Decided(run % 2 == 0, True, at_threshold=True)
        assert band.left_by(_of(answers)) == []
    answers[49] = Decided(True, False, at_threshold=False)
    assert [str(one) for one in band.left_by(_of(answers))] == [
        "error left its band: 12.0% is 2.0 points above 0.0% to 10.0%"
    ]
    coverage = band.left_by(_of([*answers[:48], *[Decided(False, True)] * 52]))
    assert [(one.name, round(one.by, 6)) for one in coverage] == [("coverage", -0.02), ("error", 0.004167)]


def _of(answers: list[Decided]) -> Measured:
    return Measured("0123456789abcdef", "contains@3", "0" * 16, answers)


def test_unpromised_answers_are_no_coverage(gate: Run, usual_band: Path, tmp_path: Path) -> None:
    """Another system message changes the form of the prompts, and so nothing is promised about the answers."""
    band = Path(copy(usual_band / "band.json", tmp_path))
    failed = gate("--system", "You are a pirate.")
    assert failed.exit_code == 7
    assert "nothing is promised about 60 of 60 answers: " in flat(failed.stderr)
    assert "coverage left its band: 0.0% is" in flat(failed.stdout)
    refused = gate("--system", "You are a pirate.", "--record")
    assert "Nothing is let through on these questions under the promise" in flat(refused.stderr)
    assert (refused.exit_code, Band.load(band).delivered > 0) == (1, True)


def test_a_band_edited_by_hand_is_checked(tmp_path: Path) -> None:
    measured = _of([Decided(True, True)])
    path = Band.record(measured, coverage_slack=0, error_slack=0).save(tmp_path / "band.json")
    content = json.loads(path.read_text())
    for change in ({"low": 2}, {"low": 0.5, "high": 0.2}, {"high": float("nan")}, {"middle": 1}):
        path.write_text(json.dumps(content | {"error": content["error"] | change}))
        with pytest.raises(DataFileError, match="is not a band"):
            Band.load(path)
    with pytest.raises(InputError, match="Nothing is let through"):
        Band.record(_of([Decided(False, True)]), coverage_slack=0, error_slack=0)
