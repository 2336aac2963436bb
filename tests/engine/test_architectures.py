"""Exact, or refused in words: a spread of architectures against plain autograd by the model's own ordinary call.

`make check-models` runs every one that the installed transformers knows.
"""

from __future__ import annotations

import pytest

from .architectures import NOISE, check

SPREAD = ("llama", "gpt2", "bloom", "gemma2", "deepseek_v3", "mamba", "whisper")


@pytest.mark.parametrize("model_type", SPREAD)
def test_an_architecture_is_scored_exactly(model_type: str) -> None:
    verdict = check(model_type)
    assert verdict.outcome == "exact", verdict
    assert (verdict.noise_ratio or NOISE) < NOISE, verdict
