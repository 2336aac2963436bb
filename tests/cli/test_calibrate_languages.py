"""Calibrations that name the languages of their prompts, and questions in eight languages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from semgrad_guard import Calibration
from semgrad_guard.adapters.examples import ExampleCalibration
from semgrad_guard.calibration import calibrate as calibrate_scores
from semgrad_guard.calibration.calibrating import recalibrate
from semgrad_guard.calibration.calibration_set import read_languages
from semgrad_guard.calibration.promise import report
from semgrad_guard.engine.sentences import sentences
from semgrad_guard.errors import InputError
from semgrad_guard.questions.data import read_questions

from .helpers import TOKENS, flat, jsonl

EIGHT = Path(__file__).parents[2] / "examples/languages.jsonl"


@pytest.fixture
def calibrate(run: Callable[..., Result], model_folder: Path, tmp_path: Path) -> Callable[..., Result]:
    fixed = ("--model", model_folder, "--output", tmp_path / "c.json", "--max-tokens", TOKENS, "--estimator", "gnll")
    return lambda data, *arguments: run("calibrate", *fixed, "--data", data, *arguments)


def test_questions_in_eight_languages_are_read_and_their_answers_divided() -> None:
    found = read_questions(EIGHT, strict=True)
    assert {row.language for row in found.rows} == {"en", "de", "fr", "es", "it", "pt", "zh", "ja"}
    assert found.unread == ("response",)
    assert [len(sentences(row.response or "")) for row in found.rows] == [2] * 16


def test_the_languages_of_the_questions_are_kept_and_shown(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    shown = calibrate(EIGHT)
    made = Calibration.load(tmp_path / "c.json")
    assert made.languages == ("de", "en", "es", "fr", "it", "ja", "pt", "zh")
    stated = report(made)["languages"]
    assert stated.startswith(
        "de, en, es, fr, it, ja, pt, zh, as declared; that of a later prompt is not checked. contains@2"
    )
    assert stated in flat(shown.stdout)
    assert "Warning contains@2 reads English. In other languages (de, es," in flat(shown.stderr).replace(":", "")
    exact = calibrate(EIGHT, "--language", "DE,pt-BR", "--grader", "exact-match")
    assert Calibration.load(tmp_path / "c.json").languages == ("de", "pt")
    assert "reads English" not in exact.stderr + exact.stdout
    english = calibrate(EIGHT, "--language", "en")
    assert "reads English" not in english.stderr + english.stdout


@pytest.mark.parametrize(
    ("languages", "arguments", "words", "code"),
    [
        (("de", None), (), "'two' has no language", 1),
        (("English", "German"), (), "'English' is no language tag of BCP 47", 1),
        (("de", "fr"), ("--language", "de,,fr"), "'' is no language tag", 2),
    ],
)
def test_languages_that_are_not_declared_for_all_are_refused_before_any_work(
    calibrate: Callable[..., Result],
    tmp_path: Path,
    languages: tuple[str, str | None],
    arguments: tuple[str, ...],
    words: str,
    code: int,
) -> None:
    rows = [
        {"question": question, "answers": ["x"], "language": language}
        for question, language in zip(("one", "two"), languages, strict=True)
    ]
    refused = calibrate(jsonl(tmp_path / "q.jsonl", rows), *arguments)
    assert refused.exit_code == code
    assert words in flat(refused.stderr)
    assert not (tmp_path / "c.answers.jsonl").exists()


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
