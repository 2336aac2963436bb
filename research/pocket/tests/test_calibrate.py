"""The calibration that ships with the pocket model."""

from __future__ import annotations

from pathlib import Path

from research.pocket.calibrate import ALPHA, BATCH, calibrate_pocket, questions
from semgrad_guard import Calibration, Guard, LanguageModel, Policy
from semgrad_guard.grading import ExactMatch
from semgrad_guard.pocket import CALIBRATION_PATH


def test_the_shipped_calibration_fits_the_shipped_model() -> None:
    policy = Policy.from_calibration(Calibration.load(CALIBRATION_PATH))
    guard = Guard(LanguageModel.from_pretrained("pocket"), policy)
    known, unknown = guard.batch(["What is the capital of Japan?", "What is the capital of Mongolia?"])
    assert (known.action, known.text) == ("answer", "Tokyo")
    assert known.confidence > 0.9
    assert unknown.action == "abstain"
    assert unknown.confidence < 0.5


def test_a_small_calibration_is_made_and_saved(tmp_path: Path) -> None:
    calibration = calibrate_pocket(LanguageModel.from_pretrained("pocket"), limit=96)
    assert calibration.n == 96
    assert calibration.binding.grader == "exact-match"
    assert Calibration.load(calibration.save(tmp_path / "c.json")) == calibration


def test_the_promise_is_given_and_kept_on_questions_that_were_held_out() -> None:
    """Calibrated on 793 of the facts, tested on the other 500."""
    model = LanguageModel.from_pretrained("pocket")
    calibration = calibrate_pocket(model, limit=793)
    rows = questions()[793:]
    assert len(rows) == 500
    guard = Guard(model, Policy.from_calibration(calibration))
    texts = [text for text, _ in rows]
    verdicts = [v for start in range(0, 500, BATCH) for v in guard.batch(texts[start : start + BATCH])]
    let_through = [(v, answers) for v, (_, answers) in zip(verdicts, rows, strict=True) if v.action == "answer"]
    assert sum(bool(verdict.familiar) for verdict in verdicts) >= 0.99 * 500
    assert sum(verdict.promised for verdict, _ in let_through) >= 0.99 * len(let_through) > 100
    wrong = sum(not ExactMatch()(verdict.text, answers) for verdict, answers in let_through)
    print(f"{len(let_through)} let through, {wrong} of them wrong")
    assert wrong <= ALPHA * len(let_through)
