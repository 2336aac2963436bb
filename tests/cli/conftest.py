"""The program as a user runs it: a tiny random model in a folder, files of questions, and a runner."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.cli import app, terminal
from semgrad_guard.loading import ModelSource

from .helpers import ASKED, TOKENS, Run, jsonl, merged, rows_of, saved

PROGRAM = get_command(app)
LOADED: dict[str, LanguageModel] = {}


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal.speak(terminal.Loudness.NORMAL)  # as a new process does


@pytest.fixture(autouse=True)
def _one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner builds the program anew for every call, which takes as long as most calls do."""
    monkeypatch.setattr("typer.testing._get_command", lambda _: PROGRAM, raising=False)


@pytest.fixture(autouse=True)
def _one_model(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    """The tiny model is loaded and checked once for all calls that name it and nothing else."""
    real = ModelSource.load

    def load(source: ModelSource, *, verbose: bool = False) -> LanguageModel:
        if source != ModelSource(model=str(model_folder)):
            return real(source, verbose=verbose)
        return LOADED.get(source.model) or LOADED.setdefault(source.model, real(source))

    monkeypatch.setattr(ModelSource, "load", load)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, language_model: LanguageModel) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "tiny", language_model)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory, make_language_model: Callable[..., LanguageModel]) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "other", make_language_model(seed=1))


@pytest.fixture(scope="session")
def texts(language_model: LanguageModel) -> list[str]:
    """What the tiny model answers to the questions: references that make it right."""
    found = language_model.generate_batch(ASKED, GenerationOptions(max_tokens=TOKENS))
    return [generation.text for generation in found]


@pytest.fixture(scope="session")
def run() -> Run:
    def invoke(*arguments: object, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.stderr
        return result

    return invoke


@pytest.fixture
def right(tmp_path: Path, texts: list[str]) -> Path:
    """Questions whose references are the tiny model's own answers."""
    return jsonl(tmp_path / "right.jsonl", rows_of(texts))


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "wrong.jsonl", ({"question": q, "answers": ["seven"]} for q in ASKED))


@pytest.fixture(scope="session")
def usual_calibration(tmp_path_factory: pytest.TempPathFactory, run: Run, model_folder: Path, texts: list[str]) -> Path:
    """A folder with a calibration of the tiny model that lets answers through, and with its record."""
    folder = tmp_path_factory.mktemp("calibrated")
    with TemporaryDirectory() as elsewhere:
        data = jsonl(Path(elsewhere) / "right.jsonl", rows_of(texts))
        result = run(
            "calibrate", "--model", model_folder, "--data", data, "--output", folder / "calibration.json",
            "--max-tokens", TOKENS, "--on-cut", "score",
        )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def usual_band(
    tmp_path_factory: pytest.TempPathFactory, run: Run, model_folder: Path, usual_calibration: Path, texts: list[str]
) -> Path:
    """A folder with that calibration, its questions and a recorded band of both."""
    folder = tmp_path_factory.mktemp("recorded")
    shutil.copytree(usual_calibration, folder, dirs_exist_ok=True)
    data = jsonl(folder / "right.jsonl", rows_of(texts))
    made = run(
        *("gate", "--model", model_folder, "--calibration", folder / "calibration.json", "--data", data),
        *("--band", folder / "band.json", "--record", "--max-tokens", TOKENS),
    )
    assert made.exit_code == 0, made.stderr
    return folder


@pytest.fixture(scope="session")
def on_passages(tmp_path_factory: pytest.TempPathFactory, run: Run, model_folder: Path) -> tuple[Path, list[object]]:
    """A calibration on questions about passages, put in words of two files, and the options for these words."""
    folder = tmp_path_factory.mktemp("passages")
    rows = [{"question": q, "context": f"{q} It is seven.", "answers": ["x"]} for q in ASKED]
    typed: list[object] = ["--prompt", "Read {context} and say: {question}", "--system", "Be terse."]
    for name, text in (("prompt", typed[1]), ("system", typed[3])):
        (folder / name).write_text(f"{text}\n")
    way = ["--prompt", f"@{folder / 'prompt'}", "--system", f"@{folder / 'system'}"]
    fixed = ["--model", model_folder, "--max-tokens", TOKENS, "--on-cut", "score", "--alpha", 0.3]
    path, data = folder / "told.json", folder / "t.jsonl"
    run("calibrate", *fixed, "--data", jsonl(data, rows), "--output", path, *way)
    kept = [json.loads(line) for line in path.with_suffix(".answers.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in kept if "text" in row]  # not the settings, nor the plan of the calibration
    right = [row | {"answers": [text]} for row, text in zip(rows, texts, strict=True)]
    result = run("calibrate", *fixed, "--data", jsonl(data, right), "--output", path, *way)
    assert result.exit_code == 0, result.output
    return path, typed


@pytest.fixture
def calibrate(run: Run, model_folder: Path, tmp_path: Path) -> Run:
    """`calibrate(data, *options)` into `c.json`."""
    fixed = ("--model", model_folder, "--output", tmp_path / "c.json", "--max-tokens", TOKENS, "--on-cut", "score")
    return lambda data, *arguments: run("calibrate", *merged((*fixed, "--data", data), arguments))


@pytest.fixture
def calibration(tmp_path: Path, usual_calibration: Path, right: Path) -> Path:
    """That calibration, next to the questions that it was made on."""
    shutil.copytree(usual_calibration, tmp_path, dirs_exist_ok=True)
    return tmp_path / "calibration.json"
