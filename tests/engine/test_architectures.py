"""Exact, or refused in words: a spread of architectures against plain autograd by the model's own ordinary call.

`make check-models` runs every one that the installed transformers knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pairwise import every
from tests.scripts import load

from .architectures import NOISE, check
from .generated_models import require_known

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_models.py"
SPREAD = (
    *("llama", "bloom", "roberta", "falcon", "falcon, 40B's layers", "falcon, alibi", "doge", "olmo, clipped", "mamba"),
    *("gemma3n_text", "deepseek_v4", "mllama", "longcat_flash", "openai-gpt", "ctrl", "xlnet"),
    *("granitemoehybrid, attention only", "moss_transcribe_diarize", "gemma4_text", "whisper"),
)
REFUSED = ("blt", "cpmant", "hrm_text", "musicgen", "prophetnet", "reformer")


@pytest.mark.parametrize("model_type", every(4, SPREAD))
def test_an_architecture_is_scored_exactly(model_type: str) -> None:
    require_known(model_type)
    verdict = check(model_type)
    assert verdict.outcome == "exact", verdict
    # A noise that no rounding explains is a wrong way of replaying.
    assert (verdict.noise_ratio or NOISE) < NOISE, verdict


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_scored_is_refused_in_words(model_type: str) -> None:
    require_known(model_type)
    verdict = check(model_type)
    assert verdict.outcome == "refused", verdict
    assert "UnsupportedModelError" in verdict.message
    assert "Use a" in verdict.message or "Load" in verdict.message or "Check" in verdict.message, "says what to do"


@pytest.fixture(scope="module")
def check_models() -> Any:
    """The script of `make check-models`."""
    return load(SCRIPT)


def test_the_page_is_what_the_results_say(check_models: Any) -> None:
    results = json.loads(check_models.RESULTS.read_text(encoding="utf-8"))
    assert check_models.PAGE.read_text(encoding="utf-8") == check_models.page(results)


def test_the_results_hold_no_silent_error(check_models: Any) -> None:
    """The results that a release of this package reports for the transformers that it was checked with."""
    results = json.loads(check_models.RESULTS.read_text(encoding="utf-8"))
    known = [result for result in results["architectures"] if "," not in result["name"]]
    exact = [result for result in known if result["outcome"] == "exact"]
    fast = [result for result in exact if result["tier"] != "full"]
    quiet = [result for result in exact if result["noise_ratio"] is not None and result["noise_ratio"] < NOISE]
    assert {result["outcome"] for result in results["architectures"]} <= {"exact", "refused", "not built"}
    assert len(exact) >= 0.95 * len(known)
    assert len(fast) >= 0.7 * len(known)
    assert len(quiet) >= 0.95 * len(exact)
