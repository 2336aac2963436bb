"""The published figures: tiny models with fixed weights, scored by the paper's official implementation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradient_scores import gradient_scores

from .cases import Case, scored
from .oracle import reference_scores

FIXTURES = Path(__file__).parents[1] / "fixtures" / "parity"
MODELS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


@pytest.fixture(scope="module", params=MODELS)
def parity(request: pytest.FixtureRequest) -> tuple[str, Any, list[tuple[Case, dict[str, float]]]]:
    folder = FIXTURES / request.param
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = json.loads((folder / "cases.json").read_text())
    cases = [(Case(r["prompt_ids"], r["response_ids"], r["semantic_token_offset"]), r["expected"]) for r in rows]
    return request.param, model, cases


def error_of(variant: str, scores: Any, expected: dict[str, Any]) -> float:
    """The largest relative error of one case's figures (the fixtures' models are untied)."""
    paragrad = "paragrad_head_only_sum" if variant == "paper" else "paragrad_official"
    names = {
        "semgrad": f"semgrad_{variant}",
        "paragrad": paragrad,
        "hybridgrad": f"hybridgrad_{variant}",
        "mean_entropy": "mean_entropy",
        "greedy_nll": "greedy_nll",
    }
    return max(abs(getattr(scores, ours) / expected[theirs] - 1) for ours, theirs in names.items())


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_official_figures(parity: Any, variant: Any, record: Callable[[str, str, float], None]) -> None:
    name, model, cases = parity
    for case, expected in cases:
        [found] = scored(model, [case], Objective(variant))
        error = error_of(variant, found, expected)
        record(f"{name} (official, float32)", found.tier, error)
        assert error < 1e-4


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_official_figures_from_the_front_door_as_one_batch(parity: Any, variant: Any) -> None:
    _, model, cases = parity
    found = gradient_scores(
        model,
        [case.prompt for case, _ in cases],
        [case.response for case, _ in cases],
        semantic_token=[case.semantic_token for case, _ in cases],
        variant=variant,
    )
    assert max(error_of(variant, f, expected) for f, (_, expected) in zip(found, cases, strict=True)) < 1e-4


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_the_oracle_itself_reproduces_the_official_figures(parity: Any, variant: Any) -> None:
    _, model, cases = parity
    for case, expected in cases:
        found = reference_scores(model, case.prompt, case.response, case.semantic_token, variant)
        assert error_of(variant, found, expected) < 1e-4
