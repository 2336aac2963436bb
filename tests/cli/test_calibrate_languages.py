"""Calibrations that name the languages of their prompts, and questions in eight languages."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import Calibration
from semgrad_guard.adapters.examples import ExampleCalibration
from semgrad_guard.calibration import calibrate as calibrate_scores
from semgrad_guard.calibration.calibrating import recalibrate
from semgrad_guard.calibration.calibration_set import read_languages
from semgrad_guard.engine.sentences import sentences
from semgrad_guard.errors import InputError
from semgrad_guard.questions.data import read_questions

EIGHT = Path(__file__).parents[2] / "examples/languages.jsonl"


def test_questions_in_eight_languages_are_read_and_their_answers_divided() -> None:
    found = read_questions(EIGHT, strict=True)
    assert {row.language for row in found.rows} == {"en", "de", "fr", "es", "it", "pt", "zh", "ja"}
    assert found.unread == ("response",)
    assert [len(sentences(row.response or "")) for row in found.rows] == [2] * 16


@pytest.mark.parametrize("tag", ["", "jp", "english", "en_US", "d", "de fr", "-de", 7])
def test_what_is_no_tag_is_refused(tag: Any) -> None:
    with pytest.raises(InputError, match="no language tag"):
        read_languages([tag])


def test_languages_go_with_a_calibration(tmp_path: Path) -> None:
    answers = {"uncertainties": [0.1] * 60, "correct": [True] * 60, "alpha": 0.1, "delta": 0.1}
    made = calibrate_scores(**answers, languages=iter(["fr", "de-AT"]))
    assert made.languages == ("de", "fr")
    assert Calibration.load(made.save(tmp_path / "c.json")) == made
    assert calibrate_scores(**answers).id != calibrate_scores(**answers, languages=["de"]).id
    old = calibrate_scores(**answers, languages="de")
    assert recalibrate(old, [0.1] * 60, [(0.1, True)] * 60).new.languages == ("de",)
    assert "languages" not in (calibrate_scores(**answers).save(tmp_path / "without.json")).read_text()


def test_a_chains_calibration_warns_of_an_english_grader(caplog: pytest.LogCaptureFixture) -> None:
    rates: Any = {"alpha": 0.1, "delta": 0.1}
    with caplog.at_level(logging.WARNING):
        ExampleCalibration([("Wer?", "Hugo")], "exact-match", **rates, languages=["de"])
        ExampleCalibration([("Wer?", "Hugo")], "contains", **rates, languages=["de"], labels="sheet.csv")
        assert not caplog.messages
        ExampleCalibration([("Wer?", "Hugo")], "contains", **rates, languages=["de"])
    assert "contains@2 reads English" in caplog.messages[0]
