"""Files of a command: one writer at a time, links that stay links, standard input in a file's place, a full disk."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from semgrad_guard.cli import app, from_options
from semgrad_guard.questions.run_record import sole_writer
from tests.pairwise import in_turn
from tests.warm_python import WarmPython

from .helpers import ASKED, TOKENS, Run, flat, jsonl

Job = Callable[..., list[str]]


@pytest.fixture
def job(model_folder: Path, right: Path, tmp_path: Path) -> Job:
    """The arguments of a command that writes at a path."""
    rows = [{"question": q, "response": "This.", "paraphrases": [f"{q} Say it."]} for q in ASKED[:4]]
    data = {name: jsonl(tmp_path / "rows.jsonl", rows) for name in ("score", "probe")}
    more = {
        "calibrate": ["--max-tokens", str(TOKENS), "--on-cut", "score"],
        "evaluate": ["--max-tokens", str(TOKENS), "--methods", "gnll", "--no-report", "--limit", "4"],
        "probe": ["--no-answers"],
    }

    def arguments(command: str, output: Path, read: str | None = None) -> list[str]:
        source = str(data.get(command, right)) if read is None else read
        given = [command, "--model", str(model_folder), "--data", source, "--output", str(output)]
        return [*given, *more.get(command, [])]

    return arguments


PROGRAM = ("-m", "semgrad_guard.cli")
COMMANDS = ("score", "calibrate", "evaluate", "probe")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_writer_is_told_so(run: Run, job: Job, tmp_path: Path, command: str) -> None:
    output = tmp_path / "output"
    output.mkdir() if command == "evaluate" else None
    with sole_writer(output / "run.json" if command == "evaluate" else output):
        refused = run(*job(command, output))
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "Another run is writing" in refused.stderr.splitlines()[-1]
    done = run(*job(command, output))
    assert done.exit_code == 0, done.stderr
    assert not list(tmp_path.rglob("*.lock"))


def test_a_link_stays_a_link(run: Run, job: Job, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "link.jsonl"
    link.symlink_to("far/scores.jsonl")
    assert run(*job("score", link)).exit_code == 0
    assert link.is_symlink()
    assert len((tmp_path / "far" / "scores.jsonl").read_text().splitlines()) == 4
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["scores.jsonl"]


@in_turn(command=COMMANDS, mark=[b"", codecs.BOM_UTF8])
def test_data_may_come_from_stdin(job: Job, tmp_path: Path, command: str, mark: bytes) -> None:
    runner = CliRunner()
    given = Path(job(command, tmp_path)[4]).read_bytes()
    results = [
        runner.invoke(app, [*job(command, tmp_path / "a"), "--json"]),
        runner.invoke(app, [*job(command, tmp_path / "b", "-"), "--json"], input=mark + given.replace(b"\n", b"\r\n")),
    ]
    assert [result.exit_code for result in results] == [0, 0], results[1].stderr
    plain, piped = (json.loads(result.stdout.splitlines()[0]) for result in results)
    name = {"score": "uncertainty", "calibrate": "auroc", "evaluate": "accuracy", "probe": "preservation"}[command]
    assert piped[name] == plain[name]


def test_the_file_behind_stdin_is_an_input(warm_python: WarmPython, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "r.jsonl", [{"question": "q", "response": "r"}])
    before = data.read_bytes()
    with data.open("rb") as stdin:
        done = warm_python.run([*PROGRAM, "score", "--data", "-", "--output", str(data)], stdin=stdin.fileno())
    assert done.returncode == 1
    assert "would overwrite an input of this command (stdin is read)" in done.stderr
    assert data.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_named_and_nothing_half_written_stays(
    run: Run, job: Job, warm_python: WarmPython, tmp_path: Path, command: str
) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    done = warm_python.run([*PROGRAM, *job(command, folder / "output.json")], largest=600)
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()[-1]) < 400
    left = [path for path in folder.rglob("*") if path.is_file()]
    resumable = {"output.answers.jsonl", "answers.jsonl"}
    assert {path.name for path in left} <= resumable
    assert run(*job(command, folder / "output.json")).exit_code == 0


@pytest.mark.slow
def test_output_that_nobody_can_take_is_named(warm_python: WarmPython, tmp_path: Path, model_folder: Path) -> None:
    arguments = [*PROGRAM, "ask", "What?", "--model", str(model_folder), "--json"]
    with (tmp_path / "shown").open("w") as shown:
        done = warm_python.run(arguments, largest=100, stdout=shown.fileno())
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr


# A file that the command did not write is another person's work: refused before any work, and left alone.


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


OWN = [(command, place, name) for command, places in PLACES.items() for place in places for name in NOTES]


@pytest.mark.parametrize(("command", "place", "name"), OWN)
def test_what_is_somebodys_own_is_refused(
    call: Callable[[str], Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str, name: str
) -> None:
    monkeypatch.setattr(from_options, "load", lambda *_args, **_named: pytest.fail("a model was loaded"))
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
