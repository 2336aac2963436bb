"""`calibrate --also`: one calibration for a model in two engines, here in two number formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from semgrad_guard import Calibration, GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.errors import BindingMismatchError

from .helpers import ASKED, TOKENS, flat, jsonl, merged

Run = Callable[..., Result]


@pytest.fixture
def calibrate(run: Run, model_folder: Path, tmp_path: Path, both_right: Path) -> Run:
    fixed = ("--model", model_folder, "--data", both_right, "--max-tokens", TOKENS, "--batch-size", 30)

    def called(name: str, *arguments: object) -> Result:
        return run("calibrate", *merged((*fixed, "--output", tmp_path / name), arguments))

    return called


@pytest.fixture
def both_right(tmp_path: Path, texts: list[str], model_folder: Path) -> Path:
    """Questions whose references are the model's answers, in either number format."""
    coarse = LanguageModel.from_pretrained(model_folder, dtype="bfloat16")
    others = [answer.text for answer in coarse.generate_batch(ASKED, GenerationOptions(max_tokens=TOKENS))]
    rows = zip(ASKED, texts, others, strict=True)
    return jsonl(tmp_path / "right.jsonl", ({"question": q, "answers": [a, b]} for q, a, b in rows))


def test_it_holds_for_both_and_for_no_third(calibrate: Run, model_folder: Path, tmp_path: Path) -> None:
    assert calibrate("fine.json").exit_code == 0
    result = calibrate("both.json", "--dtype", "bfloat16", "--also", tmp_path / "fine.answers.jsonl")
    assert result.exit_code == 0, result.stderr
    made = Calibration.load(tmp_path / "both.json")
    fine = LanguageModel.from_pretrained(model_folder)
    coarse = LanguageModel.from_pretrained(model_folder, dtype="bfloat16")
    assert made.binding is not None
    engines = {(engine.fingerprint, engine.dtype) for engine in (made.binding.engine, *made.binding.also) if engine}
    assert engines == {(model.identity.fingerprint, model.identity.dtype) for model in (fine, coarse)}
    assert f"engines 2; these are the numbers of {made.binding.fingerprint}" in flat(result.stdout)
    for model in (fine, coarse):
        guard = Guard(model, Policy.from_calibration(made), options=GenerationOptions(max_tokens=TOKENS))
        assert guard(ASKED[0]).calibration_id == made.id
    alone = Policy.from_calibration(Calibration.load(tmp_path / "fine.json"))
    with pytest.raises(BindingMismatchError, match="dtype"):
        Guard(coarse, alone)(ASKED[0])
    half = LanguageModel.from_pretrained(model_folder, dtype="float16")
    with pytest.raises(BindingMismatchError, match="dtype"):
        Guard(half, Policy.from_calibration(made))(ASKED[0])


def test_one_of_them_that_keeps_no_promise_leaves_none(calibrate: Run, tmp_path: Path, wrong: Path) -> None:
    """The very same answers of the other engine are graded wrong: nothing is let through for either."""
    assert calibrate("fine.json").exit_code == 0
    lines = (tmp_path / "fine.answers.jsonl").read_text().splitlines()
    spoilt = [json.dumps(json.loads(line) | {"text": "seven"}) for line in lines[1:]]
    (tmp_path / "spoilt.jsonl").write_text("\n".join([lines[0], *spoilt]) + "\n")
    result = calibrate("both.json", "--dtype", "bfloat16", "--also", tmp_path / "spoilt.jsonl")
    assert result.exit_code == 4, result.stderr
    made = Calibration.load(tmp_path / "both.json")
    assert (made.threshold, made.n_wrong) == (None, 60)


def test_what_cannot_be_together_is_refused_before_any_answer(calibrate: Run, tmp_path: Path, right: Path) -> None:
    assert calibrate("fine.json").exit_code == 0
    kept = tmp_path / "fine.answers.jsonl"
    half = tmp_path / "half.jsonl"
    half.write_text("\n".join(kept.read_text().splitlines()[:31]) + "\n")
    for arguments, says in (
        (("--also", kept), "this engine's own"),
        (("--dtype", "bfloat16", "--also", kept, "--system", "Be brief."), "differs in more than its engine"),
        (("--dtype", "bfloat16", "--also", half), "30 of the 60 questions have no answer"),
        (("--dtype", "bfloat16", "--also", right), "not a record of answers"),
        (("--dtype", "bfloat16", "--also", tmp_path / "none.jsonl"), "Cannot read"),
        (("--dtype", "bfloat16", "--also", kept, "--estimator", "auto"), "learns nothing from labels, not auto"),
        (("--dtype", "bfloat16", "--also", kept, "--labels", tmp_path / "l.csv"), "no --labels|--labels are about"),
    ):
        result = calibrate("both.json", *arguments)
        assert result.exit_code not in (0, 4), arguments
        assert any(part in flat(result.stderr) for part in says.split("|")), (arguments, result.stderr)
        assert not (tmp_path / "both.json").exists()
        assert "Answering: 0 of" not in result.stderr
