"""Models that think, in the commands: what is graded and promised, and the switch that turns thinking off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from semgrad_guard import Calibration, Guard, LanguageModel, Policy
from tests.thinking import ANSWERS, CAPITALS, FOLDER, QUESTIONS, THOUGHTS, written

from .helpers import Run, flat, jsonl

OFF = ("--template-option", "enable_thinking=false")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Questions whose references occur in every thought, and in half of the answers."""
    return jsonl(tmp_path / "asked.jsonl", ({"question": q, "answers": [right]} for q, right in QUESTIONS.items()))


def calibrated(run: Run, questions: Path, output: Path, *options: str) -> Result:
    rates = ("--alpha", "0.9", "--delta", "0.5")
    return run("calibrate", "--model", FOLDER, "--data", questions, "--output", output, *rates, *options)


def test_thoughts_are_neither_graded_nor_promised(run: Run, questions: Path, tmp_path: Path) -> None:
    result = calibrated(run, questions, tmp_path / "calibration.json")
    assert "2 of 4 answers wrong" in flat(result.output)
    assert "It is" not in result.output


def test_thinking_is_turned_off_and_the_calibration_is_bound_to_that(run: Run, questions: Path, tmp_path: Path) -> None:
    output, question = tmp_path / "calibration.json", next(iter(QUESTIONS))
    result = calibrated(run, questions, output, *OFF)
    assert "2 of 4 answers wrong" in flat(result.output)
    guarded = ("ask", question, "--model", FOLDER, "--calibration", output, "--json")
    assert json.loads(run(*guarded, *OFF).stdout)["status"] == "scored"
    assert "prompt_template" in run(*guarded).stderr


@pytest.mark.filterwarnings("error:No artists")
def test_a_thought_is_no_part_of_an_answer(run: Run, questions: Path, tmp_path: Path) -> None:
    question = next(iter(QUESTIONS))
    answer = json.loads(run("ask", question, "--model", FOLDER, "--json").stdout)
    assert (answer["text"], answer["status"]) == (ANSWERS[question], "scored")
    assert answer["reasoning"] == THOUGHTS[question]
    text = jsonl(tmp_path / "text.jsonl", [{"question": question, "response": written(question)}])
    result = run("score", "--model", FOLDER, "--data", text, "--json")
    scored = json.loads(result.stdout)
    assert scored["uncertainty"] == pytest.approx(answer["uncertainty"], rel=1e-3)
    evaluated = run(
        "evaluate", "--model", FOLDER, "--data", questions, "--output", tmp_path / "run", "--methods", "mean_entropy"
    )
    assert "cut off within its reasoning" not in flat(evaluated.output)
    cut = json.loads(run("ask", question, "--model", FOLDER, "--max-tokens", 6, "--json").stdout)
    assert (cut["status"], cut["action"]) == ("unscored", "abstain")


@pytest.mark.parametrize("named_in_thought", [False, True], ids=["half are right", "only the thoughts are"])
def test_the_promise_is_about_the_answers(run: Run, tmp_path: Path, named_in_thought: bool) -> None:
    """A hundred questions: each of the four 25 times. A thought names two cities, and one of them is the answer."""
    others = {
        q: next(city for city in pair if city != ANSWERS[q])
        for q, pair in zip(QUESTIONS, CAPITALS.values(), strict=True)
    }
    references = others if named_in_thought else QUESTIONS
    rows = [{"question": question, "answers": [city]} for question, city in references.items()] * 25
    data = jsonl(tmp_path / "data.jsonl", rows)
    output, rates = tmp_path / "calibration.json", ("--alpha", "0.05", "--delta", "0.2", "--copies", "keep")
    given = ("--model", FOLDER, "--data", data, "--output", output, *rates)
    result = run("calibrate", *given, "--template-option", "thinking=on", "--max-tokens", 40)
    wrong = 100 if named_in_thought else 50
    assert f"{wrong} of 100 answers wrong" in flat(result.output), result.output
    model = LanguageModel.from_pretrained(str(FOLDER), template_options={"thinking": "on"})
    verdicts = Guard(model, Policy.from_calibration(Calibration.load(output))).batch(list(QUESTIONS))
    promised = {question for question, verdict in zip(QUESTIONS, verdicts, strict=True) if verdict.promised}
    assert promised == {q for q in QUESTIONS if references[q] == ANSWERS[q]}
