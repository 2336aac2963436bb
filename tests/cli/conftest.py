"""The program as a user runs it: a tiny random model in a folder, files of questions, and a runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.cli import app

from .helpers import ASKED, TOKENS, jsonl, saved


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


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
def run() -> Callable[..., Result]:
    def invoke(*arguments: object, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.stderr
        return result

    return invoke


@pytest.fixture
def right(tmp_path: Path, texts: list[str]) -> Path:
    """Questions whose references are the tiny model's own answers."""
    return jsonl(tmp_path / "right.jsonl", ({"question": q, "answers": [t]} for q, t in zip(ASKED, texts, strict=True)))


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "wrong.jsonl", ({"question": q, "answers": ["seven"]} for q in ASKED))


@pytest.fixture
def calibration(tmp_path: Path, run: Callable[..., Result], model_folder: Path, right: Path) -> Path:
    """A calibration of the tiny model that lets answers through."""
    path = tmp_path / "calibration.json"
    result = run(
        "calibrate", "--model", model_folder, "--data", right, "--output", path, "--max-tokens", TOKENS,
        "--batch-size", 60,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    return path
