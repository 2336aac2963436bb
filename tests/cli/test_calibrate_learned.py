"""`calibrate --estimator states` and `auto`: learned on a quarter, calibrated on the rest, and then simply used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from semgrad_guard import Calibration, GenerationOptions, LanguageModel

from .helpers import TOKENS, Run, flat, jsonl, merged

FREE = {"gnll", "max_probability", "mean_entropy", "states"}
MANY = [f"Which is number {i}?" for i in range(204)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, language_model: LanguageModel) -> Path:
    """Questions of which the tiny model answers three in four right."""
    options = GenerationOptions(max_tokens=TOKENS)
    found = [one for i in range(0, 204, 34) for one in language_model.generate_batch(MANY[i : i + 34], options)]
    rows = [
        {"question": question, "answers": [one.text if i % 4 else "seven"]}
        for i, (question, one) in enumerate(zip(MANY, found, strict=True))
    ]
    return jsonl(tmp_path_factory.mktemp("data") / "many.jsonl", rows)


@pytest.fixture(scope="module")
def calibrate(run: Run, model_folder: Path, data: Path) -> Run:
    fixed = ("--model", model_folder, "--max-tokens", TOKENS, "--on-cut", "score", "--alpha", 0.5)
    return lambda output, *arguments: run("calibrate", *merged((*fixed, "--output", output, "--data", data), arguments))


@pytest.fixture(scope="module")
def learned(calibrate: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    path = tmp_path_factory.mktemp("states") / "c.json"
    return calibrate(path, "--estimator", "states"), path


def test_states_are_fitted_on_a_quarter_and_says_so(learned: tuple[Result, Path]) -> None:
    result, path = learned
    assert result.exit_code == 0, result.stderr
    made = Calibration.load(path)
    assert "states: Fitted on 51 answers" in flat(result.stderr)
    assert made.choice.weights is not None
    assert (made.binding.estimator, made.n, len(made.choice.questions)) == ("states", 153, 51)


def test_ask_and_score_use_the_fitted_estimator(learned: tuple[Result, Path], run: Run, model_folder: Path) -> None:
    _, path = learned
    made = Calibration.load(path)
    given = ("--model", model_folder, "--calibration", path, "--json")
    answer = json.loads(run("ask", MANY[0], "--max-tokens", TOKENS, *given).stdout)
    assert answer["estimator"] == "states"
    assert answer["details"]["settings"] == made.binding.settings
    assert (answer["semgrad"], answer["paragrad"]) == (None, None), "there is no replay"
    assert answer["details"]["gnll"] >= 0
    assert answer["action"] == ("answer" if answer["uncertainty"] <= made.threshold else "abstain")
    text = jsonl(path.with_name("text.jsonl"), [{"question": MANY[0], "response": "some words"}])
    scored = json.loads(run("score", "--data", text, *given).stdout)
    assert (scored["estimator"], scored["threshold"]) == ("states", made.threshold)


@pytest.mark.parametrize("loudness", [(), ("--quiet",)])
def test_too_few_questions_fall_back_in_words(
    calibrate: Run, data: Path, tmp_path: Path, loudness: tuple[str, ...]
) -> None:
    few = jsonl(tmp_path / "few.jsonl", data.read_text().splitlines()[:60])
    result = calibrate(tmp_path / "c.json", "--estimator", "states", "--data", few, *loudness)
    stderr = flat(result.stderr)
    assert "max_probability: Max probability takes the place of FusedStates, which learns from" in stderr
    made = Calibration.load(tmp_path / "c.json")
    assert (made.binding.estimator, made.n) == ("max_probability", 60)


def test_auto_names_the_best_and_its_rivals(calibrate: Run, tmp_path: Path) -> None:
    result = calibrate(tmp_path / "c.json", "--estimator", "auto", "--json")
    document = json.loads(result.stdout)
    choice = document["calibration"]["choice"]
    figures = {name: value for name, value in choice["aurocs"].items() if value is not None}
    free = {name: value for name, value in figures.items() if name in FREE}
    assert choice["estimator"] in (max(figures, key=figures.__getitem__), max(free, key=free.__getitem__))
    assert choice["estimator"] == document["calibration"]["binding"]["estimator"]
    assert {"hybridgrad", "gnll", "states"} <= figures.keys()
    assert "weights" not in choice
    reason = "Gradients add nothing clear" if choice["estimator"] in FREE else "Gradients are worth their price here"
    assert f"{choice['estimator']}: {reason}, by the AUROC on 51 answers" in flat(result.stderr)


def test_features_are_kept_with_the_answers_and_resumed(learned: tuple[Result, Path], calibrate: Run) -> None:
    _, path = learned
    record = path.with_suffix(".answers.jsonl")
    lines = record.read_text().splitlines(keepends=True)
    assert json.loads(lines[1])["scores"]["states"]["features"]["gnll"] >= 0
    whole = Calibration.load(path)
    record.write_text("".join(lines[:-20]))
    assert calibrate(path, "--estimator", "states").exit_code == 0
    assert Calibration.load(path).threshold == whole.threshold
