"""On a CUDA device: exact in the fast tiers, near in half precision, memory given back (`make check-gpu`)."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from semgrad_guard import LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scoring.gradient_scores import gradient_scores
from tests.random_llama import byte_tokenizer, random_llama

from .oracle import reference_scores, worst_relative_error
from .scoring_paths import CASES
from .tiny_models import build

DEVICE = "cuda"

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_scores_are_those_of_plain_autograd_on_the_cpu(name: str) -> None:
    model = build(name)
    placed = copy.deepcopy(model).to(DEVICE)
    for case in CASES:
        found = gradient_scores(placed, case.prompt, case.response, semantic_token=case.semantic_token)
        assert found.tier == "prefix"
        assert found.semgrad == pytest.approx(case.reference(model, Objective()).semgrad, rel=1e-6)


def test_an_answer_is_scored_from_the_states_of_its_generation() -> None:
    model = LanguageModel.from_transformers(random_llama().to(DEVICE), byte_tokenizer())
    answer = model.generate("What is in it?")
    timed = answer.evidence.gradients()
    assert timed is not None
    assert timed.scores.tier == "captured"
    prompt = answer.evidence.prompt
    expected = reference_scores(random_llama(), prompt.ids, answer.response_ids, prompt.semantic_token.offset)
    assert worst_relative_error(timed.scores, expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near(dtype: torch.dtype) -> None:
    case, model = CASES[0], build("llama", dtype=dtype)
    exact = case.reference(copy.deepcopy(model).double(), Objective())
    found = gradient_scores(model.to(DEVICE), case.prompt, case.response, semantic_token=case.semantic_token)
    assert found.semgrad == pytest.approx(exact.semgrad, rel=0.1)


def test_memory_is_given_back() -> None:
    model, case = build("llama", dtype=torch.float32).to(DEVICE), CASES[0]

    def held() -> int:
        gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)
        gc.collect()
        return torch.cuda.memory_allocated()

    held()
    after_the_second = held()
    assert held() <= after_the_second
