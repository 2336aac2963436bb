"""Bad input ends with a message that names the remedy, on stderr, with code 1, and before any work where possible."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from transformers import PreTrainedTokenizerFast

from semgrad_guard import LanguageModel
from semgrad_guard.cli import loading

from .helpers import flat, jsonl

Run = Callable[..., Result]


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Run, expect code 1 and a bare stdout; the message."""

    def invoke(*arguments: object, stdin: str | None = None) -> str:
        result = run(*arguments, stdin=stdin)
        assert result.exit_code == 1, (result.exit_code, result.stdout, result.stderr)
        assert result.stdout == ""
        return result.stderr

    return invoke


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load", lambda name: pytest.fail(f"{name} was loaded"))


Refused = Callable[..., str]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("question", ["", " \n\t"])
def test_empty_questions(refused: Refused, question: str) -> None:
    assert "The question is empty; ask something." in refused("ask", question)
    assert "The question is empty; ask something." in refused("ask", "-", stdin=question)


def test_unknown_models(refused: Refused, tmp_path: Path) -> None:
    assert "there is no folder './nowhere'. Is the path right?" in refused("ask", "q", "--model", "./nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file; give the folder" in refused("ask", "q", "--model", tmp_path / "file")
    assert "holds no *.safetensors" in refused("ask", "q", "--model", tmp_path)


def test_corrupted_weights(refused: Refused, model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "cut")
    weights = (folder / "model.safetensors").read_bytes()
    for damaged in (weights[: len(weights) // 2], b"", b"\xff" * 100):
        (folder / "model.safetensors").write_bytes(damaged)
        assert "cannot load" in refused("ask", "q", "--model", folder)


def test_prompts_over_the_window(refused: Refused, model_folder: Path) -> None:
    assert "context window of 256" in refused("ask", "long " * 100, "--model", model_folder)


def test_a_calibration_for_another_model(
    refused: Refused, other_folder: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "generate", lambda *_args, **_kwargs: pytest.fail("answered first"))
    message = refused("ask", "q", "--model", other_folder, "--calibration", calibration)
    assert "model is 'other' and was 'tiny' at calibration" in message
    assert "fingerprint is" in message
    scored = ("score", "--data", jsonl(calibration.with_name("one.jsonl"), [{"question": "q", "response": "r"}]))
    assert "fingerprint is" in refused(*scored, "--model", other_folder, "--calibration", calibration)


def test_calibrations_that_are_not_intact(refused: Refused, calibration: Path, no_model: None, tmp_path: Path) -> None:
    whole = calibration.read_text()
    record = json.loads(whole)
    texts = (
        whole[:200],
        "",
        "[]",
        "\x00",
        json.dumps({**record, "threshold": 9.0}),
        json.dumps({**record, "alpha": 0.01}),
    )
    for text in texts:
        (tmp_path / "bad.json").write_text(text)
        assert "is not an intact calibration" in refused("ask", "q", "--calibration", tmp_path / "bad.json")
    assert "Cannot read the calibration" in refused("ask", "q", "--calibration", tmp_path / "none.json")


@pytest.mark.usefixtures("no_model")
def test_places_that_cannot_be_written(refused: Refused, right: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside, good = tmp_path / "file" / "x.json", tmp_path / "c.json"
    job = ("calibrate", "--data", right, "--output")
    for output in (inside, tmp_path):
        assert "Choose a path in an existing folder" in refused(*job, output)
    data = jsonl(tmp_path / "r.jsonl", [{"question": "q", "response": "r"}])
    assert "Cannot write" in refused("score", "--data", data, "--output", inside)
    assert not good.exists()


@pytest.mark.usefixtures("no_model")
def test_data_that_cannot_be_used(refused: Refused, tmp_path: Path) -> None:
    job = ("calibrate", "--output", tmp_path / "c.json", "--data")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "No such file" in refused(*job, tmp_path / "none.jsonl")
    assert "holds no question: it is empty" in refused(*job, tmp_path / "empty.jsonl")
    assert "holds no usable line" in refused(*job, jsonl(tmp_path / "no.jsonl", ["{", '{"question": "q"}']))


@pytest.mark.usefixtures("no_model")
def test_wrong_usage_has_its_own_code(run: Run, tmp_path: Path) -> None:
    for arguments in (
        ("ask",),
        ("ask", "q", "--estimator", "guess"),
        ("ask", "q", "--max-tokens", 0),
        ("serve", "--threshold", "nan"),
        ("serve", "--calibration", tmp_path / "c.json", "--threshold", 1),
        ("calibrate", "--data", "q.jsonl"),
        ("calibrate", "--data", "q.jsonl", "--output", "c.json", "--alpha", 10),
        ("calibrate", "--data", "q.jsonl", "--output", "c.json", "--alpha", "1e-300"),
        ("calibrate", "--data", "q.jsonl", "--output", "c.json", "--delta", 0),
        ("evaluate", "--data", "q.jsonl", "--output", "e", "--methods", "guess"),
        ("bark",),
    ):
        assert run(*arguments).exit_code == 2, arguments


@pytest.mark.parametrize("place", ["question", "response", "context", "system"])
def test_texts_that_are_far_too_long_are_not_even_read(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
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
        quick = ("--methods", "gnll", "--no-report") if command == "evaluate" else ()
        given = ("--data", data, "--output", tmp_path / command, *system, *more, *quick)
        result = run(command, "--model", model_folder, *given)
        if place == "response" and command != "score":
            continue
        everything = {"score": 1, "calibrate": 6, "evaluate": 6, "probe": 1}
        assert result.exit_code == (everything[command] if place == "system" else code), (command, result.stderr)
        assert "characters, far more than fit into this model's context window of 256 tokens" in flat(result.stderr)
    assert max(taken, default=0) < 1000
