"""Bad input ends with a message that names the remedy, on stderr, with code 1, and before any work where possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from transformers import PreTrainedTokenizerFast

from semgrad_guard import LanguageModel

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


Refused = Callable[..., str]


def test_a_calibration_for_another_model(
    refused: Refused, other_folder: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "generate", lambda *_args, **_kwargs: pytest.fail("answered first"))
    message = refused("ask", "q", "--model", other_folder, "--calibration", calibration)
    assert "model is 'other' and was 'tiny' at calibration" in message
    assert "fingerprint is" in message
    scored = ("score", "--data", jsonl(calibration.with_name("one.jsonl"), [{"question": "q", "response": "r"}]))
    assert "fingerprint is" in refused(*scored, "--model", other_folder, "--calibration", calibration)


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
        more += ("--on-cut", "score") if command == "calibrate" else ()
        quick = ("--methods", "gnll", "--no-report") if command == "evaluate" else ()
        given = ("--data", data, "--output", tmp_path / command, *system, *more, *quick)
        result = run(command, "--model", model_folder, *given)
        if place == "response" and command != "score":
            continue
        everything = {"score": 1, "calibrate": 6, "evaluate": 6, "probe": 1}
        assert result.exit_code == (everything[command] if place == "system" else code), (command, result.stderr)
        assert "characters, far more than fit into this model's context window of 256 tokens" in flat(result.stderr)
    assert max(taken, default=0) < 1000
