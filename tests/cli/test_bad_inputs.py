"""Bad inputs by the hundred: none is taken silently, none ends in a traceback, none leaves a half or changed file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from semgrad_guard import LanguageModel
from semgrad_guard.cli import app, from_options

from . import bad_calls, bad_files, bad_models
from .bad_calls import Bad
from .helpers import flat, jsonl

CASES = [case for make in (*bad_calls.ALL, *bad_files.ALL, *bad_models.ALL) for case in make()]
WORK = ("generate", "generate_batch")
Places = dict[str, Path]


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Path,
    other_folder: Path,
    usual_band: Path,
    finished_run: Path,
) -> Places:
    """The folders that the cases name, made once."""
    inputs, models = tmp_path_factory.mktemp("in"), tmp_path_factory.mktemp("models")
    for path, name in (("calibration.json", "c.json"), ("right.jsonl", "right.jsonl"), ("band.json", "band.json")):
        shutil.copy(usual_band / path, inputs / name)
    bad_files.make_inputs(inputs)
    bad_files.edit_calibration(inputs)
    bad_models.break_models(models, model_folder, fill_with_nan)
    return {"in": inputs, "models": models, "model": model_folder, "other": other_folder, "run": finished_run}


@pytest.fixture(scope="module")
def untouched(places: Places) -> dict[str, Any]:
    """What the inputs are like before any case."""
    return states(places.values())


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, run: Any, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = folder / "answers.jsonl"
    data.write_text('{"question": "What?", "answers": ["That."]}\n{"question": "Who?", "answers": ["They."]}\n')
    job = ("evaluate", "--model", model_folder, "--data", data, "--output", folder / "e", "--max-tokens", 3)
    assert run(*job, "--methods", "gnll", "--no-report").exit_code == 0
    return folder / "e"


def fill_with_nan(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: t * float("nan") for name, t in load_file(path).items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_input(
    case: Bad, places: Places, untouched: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, here = tmp_path / "out", tmp_path / "here"
    out.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    forbidden = [(LanguageModel, name) for name in WORK if not case.works] + [(from_options, "load")] * (not case.loads)
    for owner, name in forbidden:
        monkeypatch.setattr(owner, name, lambda *_args, name=name, **_named: pytest.fail(f"it did {name} first"))
    result = CliRunner().invoke(app, case.at({**places, "out": out}), input=case.stdin)
    stderr = flat(result.stderr)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in case.codes, (result.exit_code, stderr, result.stdout)
    assert stderr
    assert case.works or not result.stdout
    assert "Traceback" not in stderr
    assert "Value error" not in stderr  # our own words
    assert len(stderr) < 1200, stderr
    for part in case.says.split("@@"):
        assert part.strip() in stderr, stderr
    assert states(places.values()) == untouched
    assert not list(here.iterdir())
    check_left(out, keeps=case.keeps)


def check_left(out: Path, *, keeps: bool) -> None:
    """What lies in the folder of outputs: nothing, or whole files."""
    left = [path for path in out.rglob("*") if path.is_file()]
    assert keeps or not left, left
    for path in left:
        assert not path.name.startswith("."), path
        content = path.read_text(encoding="utf-8-sig") if path.suffix != ".safetensors" else ""
        for line in content.splitlines() if path.suffix == ".jsonl" else [content] if path.suffix == ".json" else []:
            json.loads(line)


def states(folders: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Of every file its kind, size and the time of its last change of any sort, which no program can set."""
    return {
        path: (found.st_mode, found.st_ino, found.st_size, found.st_ctime_ns)
        for folder in folders
        for path, found in _walk(str(folder))
    }


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        else:
            yield entry.path, entry.stat(follow_symlinks=False)


@pytest.mark.parametrize("place", ["question", "response", "context", "system"])
def test_texts_that_are_far_too_long_are_not_even_read(
    run: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    taken: list[int] = []
    encode = PreTrainedTokenizerFast.__call__

    def watch(self: Any, text: Any, *more: Any, **options: Any) -> Any:
        taken.append(len(text))
        return encode(self, text, *more, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", watch)
    huge = "what " * 100_000
    row = {"question": "q", "response": "r", "answers": ["a"], "paraphrases": ["p"]}
    good = {**row, "question": "Which?", **({"context": "c"} if place == "context" else {})}
    bad = row if place == "system" else {**row, place: huge}
    data = jsonl(tmp_path / "d.jsonl", [bad, good])
    system = ("--system", huge) if place == "system" else ()
    for command, code in (("score", 5), ("calibrate", 4), ("evaluate", 0), ("probe", 1)):
        more = ("--max-tokens", 2) if command in ("calibrate", "evaluate") else ()
        more += ("--on-cut", "score") if command == "calibrate" else ()
        quick = ("--methods", "gnll", "--no-report") if command == "evaluate" else ()
        given = ("--data", data, "--output", tmp_path / command, *system, *more, *quick)
        result = run(command, "--model", model_folder, *given)
        if place == "response" and command != "score":
            continue
        everything = {"score": 1, "calibrate": 6, "evaluate": 6, "probe": 1}
        assert result.exit_code == (everything[command] if place == "system" else code), (command, result.stderr)
        assert "characters, far more than fit into this model's context window of 256 tokens" in flat(result.stderr)
    assert max(taken, default=0) < 1000
