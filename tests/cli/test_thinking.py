"""Models that think, in the commands: what is graded and promised, and the switch that turns thinking off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from semgrad_guard import Calibration, Guard, LanguageModel, Policy
from tests.thinking import ANSWERS, QUESTIONS, THOUGHTS, taught, thinking_model, thought_through, written

from .helpers import flat, jsonl, saved

Run = Callable[..., Result]
OFF = ("--template-option", "enable_thinking=false")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "thinker", thinking_model())


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Questions whose references occur in every thought, and in half of the answers."""
    return jsonl(tmp_path / "asked.jsonl", ({"question": q, "answers": [right]} for q, right in QUESTIONS.items()))


def calibrated(run: Run, thinker: Path, questions: Path, output: Path, *options: str) -> Result:
    rates = ("--alpha", "0.9", "--delta", "0.5")
    return run("calibrate", "--model", thinker, "--data", questions, "--output", output, *rates, *options)


def test_thoughts_are_neither_graded_nor_promised(run: Run, thinker: Path, questions: Path, tmp_path: Path) -> None:
    result = calibrated(run, thinker, questions, tmp_path / "calibration.json")
    assert "2 of 4 answers wrong" in flat(result.output)
    assert "It is" not in result.output


def test_thinking_is_turned_off_and_the_calibration_is_bound_to_that(
    run: Run, thinker: Path, questions: Path, tmp_path: Path
) -> None:
    output, question = tmp_path / "calibration.json", next(iter(QUESTIONS))
    result = calibrated(run, thinker, questions, output, *OFF)
    assert output.exists(), result.output  # the surest answers are the wrong ones: there is no threshold
    assert "2 of 4 answers wrong" in flat(result.output)
    guarded = ("ask", question, "--model", thinker, "--calibration", output, "--json")
    assert json.loads(run(*guarded, *OFF).stdout)["status"] == "scored"
    assert "prompt_template" in run(*guarded).stderr


@pytest.mark.filterwarnings("error:No artists")
def test_a_thought_is_no_part_of_an_answer(run: Run, thinker: Path, questions: Path, tmp_path: Path) -> None:
    question = next(iter(QUESTIONS))
    answer = json.loads(run("ask", question, "--model", thinker, "--threshold", 9, "--json").stdout)
    assert (answer["text"], answer["status"]) == (ANSWERS[question], "scored")
    assert answer["reasoning"] == THOUGHTS[question]
    result = run("score", "--model", thinker, "--question", question, "--response", written(question), "--json")
    scored = json.loads(result.stdout)
    assert scored["uncertainty"] == pytest.approx(answer["uncertainty"], rel=1e-3)
    evaluated = run(
        "evaluate", "--model", thinker, "--data", questions, "--output", tmp_path / "run", "--methods", "mean_entropy"
    )
    assert "cut off within its reasoning" not in flat(evaluated.output)
    cut = json.loads(run("ask", question, "--model", thinker, "--max-tokens", 6, "--threshold", 9, "--json").stdout)
    assert (cut["status"], cut["action"]) == ("unscored", "abstain")


LETTERS = [(one, other) for one in "BCDFGHJKLM" for other in "NPQRSTVWXZ"]
HUNDRED = {
    # Every thought names both letters. Twenty answers are neither, the others are the first.
    f"{one} or {other}?": thought_through(f"{one}, not {other}.", "E" if one in "BC" else one)
    for one, other in LETTERS
}


@pytest.fixture(scope="module")
def chooser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "chooser", taught(HUNDRED, {}))


@pytest.mark.parametrize("reference", [0, 1], ids=["20 of 100 wrong", "all wrong, every thought right"])
def test_the_promise_is_about_the_answers(run: Run, chooser: Path, tmp_path: Path, reference: int) -> None:
    output, rates = tmp_path / "calibration.json", ("--alpha", "0.3", "--delta", "0.2")
    rows = ({"question": q, "answers": [pair[reference]]} for q, pair in zip(HUNDRED, LETTERS, strict=True))
    given = ("--model", chooser, "--data", jsonl(tmp_path / "asked.jsonl", rows), "--output", output, *rates)
    result = run("calibrate", *given, "--thinking", "on", "--max-tokens", 40)
    if reference:
        assert "100 of 100 answers wrong" in flat(result.output)
        assert Calibration.load(output).threshold is None
        return
    assert "20 of 100 answers wrong" in flat(result.output)
    model = LanguageModel.from_pretrained(str(chooser), template_options={"thinking": "on"})
    verdicts = Guard(model, Policy.from_calibration(Calibration.load(output))).batch(list(HUNDRED))
    right = [v for v, (one, _) in zip(verdicts, LETTERS, strict=True) if v.promised and v.text == one]
    assert len(right) >= 40
