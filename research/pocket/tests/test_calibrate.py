"""The calibration that ships with the pocket model."""

from __future__ import annotations

from pathlib import Path

from research.pocket.calibrate import calibrate_pocket
from semgrad_guard import Calibration, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.pocket import CALIBRATION_PATH


def test_the_shipped_calibration_fits_the_shipped_model() -> None:
    guard = Guard(
        LanguageModel.from_pretrained("pocket"),
        HybridGrad(),
        Policy.from_calibration(Calibration.load(CALIBRATION_PATH)),
    )
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
