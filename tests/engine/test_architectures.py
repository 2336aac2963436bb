"""Exact, or refused in words: a spread of architectures against plain autograd by the model's own ordinary call.

`make check-models` runs every one that the installed transformers knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.pairwise import every
from tests.scripts import load

from .architectures import NOISE, check
from .cases import CASES
from .generated_models import MODEL_TYPES, require_known, tiny_config

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_models.py"
REPLAYED = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"),
    *("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "llama4_text", "mllama", "mistral", "ministral3"),
    *("mixtral", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "minimax", "kimi_linear"),
    *("lfm2_moe", "lfm3", "nemotron_h", "falcon_h1", "granitemoehybrid", "zamba2", "olmo_hybrid", "mamba2"),
    *("phi3", "granite", "olmo2", "cohere2", "smollm3", "gpt2", "bloom", "opt", "falcon", "doge", "longcat_flash"),
)
"""Must have the cheap tier."""
ORDINARY = ("mamba", "xlnet", "openai-gpt", "phi3, long positions", "llama, dynamic positions")
VARIED = ("falcon, 40B's layers", "falcon, alibi", "olmo, clipped", "qwen3, with a window")
REFUSED = ("blt", "cpmant", "hrm_text", "musicgen", "prophetnet", "reformer")


@pytest.mark.parametrize("model_type", every(7, [*REPLAYED, *ORDINARY, *VARIED]))
def test_an_architecture_is_scored_exactly(model_type: str) -> None:
    require_known(model_type)
    verdict = check(model_type)
    assert (verdict.outcome, verdict.tier) == ("exact", "ordinary" if model_type in ORDINARY else "replay"), verdict
    # A noise that no rounding explains is a wrong way of replaying; these two choose other experts in close calls.
    assert (verdict.noise_ratio or 0) < NOISE or model_type in ("mixtral", "aria_text"), verdict


@pytest.mark.parametrize("model_type", every(2, REFUSED))
def test_what_cannot_be_scored_is_refused_in_words(model_type: str) -> None:
    require_known(model_type)
    verdict = check(model_type)
    assert verdict.outcome == "refused", verdict
    assert "UnsupportedModelError" in verdict.message
    assert "Use a" in verdict.message or "Load" in verdict.message or "Check" in verdict.message, "says what to do"


LONGEST = max(len(case.prompt) + len(case.response) for case in CASES)


def kinds(config: Any) -> set[str]:
    """The words of a configuration for its layers."""
    return set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_tiny_model_has_what_defines_its_family(model_type: str) -> None:
    """All kinds of layers of the default, windows that the cases exceed, layers of pictures, shared keys."""
    tiny = text_config(tiny_config(model_type))
    try:
        default = text_config(CONFIG_MAPPING[model_type]())
    except Exception:  # noqa: BLE001 - some configurations have no default
        default = tiny
    assert kinds(tiny) >= kinds(default)
    for name in ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"):
        assert (vars(tiny).get(name) or 0) < LONGEST
    for name in ("cross_attention_layers", "num_kv_shared_layers", "final_logit_softcapping"):
        assert bool(vars(tiny).get(name)) >= bool(vars(default).get(name))


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
    fast = {result["name"] for result in exact if result["tier"] == "replay"}
    quiet = [result for result in exact if result["noise_ratio"] is not None and result["noise_ratio"] < NOISE]
    assert {result["outcome"] for result in results["architectures"]} <= {"exact", "refused", "not built"}
    assert len(exact) >= 0.94 * len(known)
    assert len(fast) >= 170
    assert fast >= set(REPLAYED)
    assert len(quiet) >= 0.95 * len(exact)
