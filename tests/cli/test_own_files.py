"""A file that the command did not write is another person's work: refused before any work, and left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from semgrad_guard.cli import loading

from .helpers import ASKED, TOKENS, Run, flat, jsonl

NOTES = {
    "notes": "MY OWN NOTES\n",
    "questions": '{"question": "q", "answers": ["a"], "response": "r"}\n',
    "an object": '{"a": 1}',
    "a list": "[]\n",
    "a blank line": "\n",
    "bytes": "\x89PNG\r\n\x1a\n\x00\x00",
}
PLACES = {
    "score": ("s.jsonl",),
    "calibrate": ("c.json", "c.answers.jsonl"),
    "probe": ("p.json", "p.answers.jsonl", "p.sps.png", "p.auroc.png"),
    "evaluate": (
        *("e/answers.jsonl", "e/grades.jsonl", "e/graded.csv", "e/run.json", "e/report.html"),
        "e/tables/differences.csv",
    ),
}


@pytest.fixture
def call(run: Run, model_folder: Path, tmp_path: Path) -> Callable[[str], Result]:
    """A command with all its outputs in the folder."""
    columns = {"answers": ["seven"], "response": "This.", "paraphrases": ["Which one?"]}
    data = jsonl(tmp_path / "data.jsonl", ({"question": q, **columns} for q in ASKED[:3]))
    short = ("--max-tokens", TOKENS)
    more = {
        "score": ("--output", tmp_path / "s.jsonl"),
        "calibrate": ("--output", tmp_path / "c.json", *short, "--on-cut", "score"),
        "probe": ("--output", tmp_path / "p.json"),
        "evaluate": ("--output", tmp_path / "e", "--methods", "gnll", "--methods", "hybridgrad", *short),
    }
    return lambda command: run(command, "--model", model_folder, "--data", data, *more[command])


CASES = [(command, place, name) for command, places in PLACES.items() for place in places for name in NOTES]


@pytest.mark.parametrize(("command", "place", "name"), CASES)
def test_what_is_somebodys_own_is_refused(
    call: Callable[[str], Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str, name: str
) -> None:
    monkeypatch.setattr(loading, "load", lambda *_args, **_named: pytest.fail("a model was loaded"))
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(NOTES[name].encode("latin-1"))
    before = sorted(tmp_path.rglob("*"))
    result = call(command)
    assert result.exit_code == 1, result.stdout
    stderr = flat(result.stderr)
    assert f"{path.name} is there already, and it is not a " in stderr
    assert "Choose another path, or remove the file first." in stderr
    assert path.read_bytes() == NOTES[name].encode("latin-1")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", PLACES)
def test_what_the_command_has_made_is_made_again(call: Callable[[str], Result], tmp_path: Path, command: str) -> None:
    pytest.importorskip("matplotlib")
    for place in PLACES[command]:
        if "tables" not in place:
            (tmp_path / place).parent.mkdir(exist_ok=True)
            (tmp_path / place).touch()
    first = call(command)
    assert first.exit_code in (0, 4), first.stderr
    made = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = call(command)
    assert again.exit_code == first.exit_code, again.stderr
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(made)


def test_scores_that_somebody_has_added_to_are_theirs(call: Callable[[str], Result], tmp_path: Path) -> None:
    assert call("score").exit_code == 0
    path = tmp_path / "s.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    jsonl(path, [*rows[:2], {**rows[2], "checked by me": True}])
    assert "is there already" in flat(call("score").stderr)


def test_one_commands_file_is_not_anothers(
    call: Callable[[str], Result], run: Run, model_folder: Path, tmp_path: Path
) -> None:
    assert call("score").exit_code == 0
    given = ("--model", model_folder, "--data", tmp_path / "data.jsonl", "--max-tokens", TOKENS)
    before = (tmp_path / "s.jsonl").read_bytes()
    refused = run("calibrate", *given, "--output", tmp_path / "s.jsonl")
    assert refused.exit_code == 1
    assert "it is not a calibration" in flat(refused.stderr)
    assert (tmp_path / "s.jsonl").read_bytes() == before
