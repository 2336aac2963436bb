"""On a CUDA device: exact in the fast tiers, near in half precision, memory given back (`make check-gpu`)."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.engine.answers.sentence_evidence import sentences_of
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.estimators import Estimator, HybridGrad
from semgrad_guard.estimators.suite import paper_suite
from tests.random_llama import byte_tokenizer, random_llama

from .cases import CASES
from .oracle import reference_scores, worst_relative_error
from .tiny_models import build

DEVICE = "cuda"
BRIEF = GenerationOptions(max_tokens=12)
LENIENT = Policy(threshold=1e9)
METHODS = paper_suite(max_tokens=6)
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Peru?",
    "Which language is spoken in the capital of the country that lies west of Germany and Belgium?",
    "Hello",
]

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
        assert found.tier == "replay"
        assert found.semgrad == pytest.approx(case.reference(model, Objective()).semgrad, rel=1e-6)


def test_an_answer_is_scored_from_the_states_of_its_generation() -> None:
    model = LanguageModel.from_transformers(random_llama().to(DEVICE), byte_tokenizer())
    answer = model.generate("What is in it?")
    timed = answer.evidence.gradients()
    assert timed is not None
    assert timed.scores.tier == "replay"
    prompt = answer.evidence.prompt
    expected = reference_scores(random_llama(), prompt.ids, answer.response_ids, prompt.semantic_token.offset)
    assert worst_relative_error(timed.scores, expected) < 1e-5  # a rotary table is float32, and rounds otherwise here


@cache
def pocket(device: str) -> LanguageModel:
    return LanguageModel.from_pretrained("pocket", device_map=device)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_method_gives_the_number_of_the_cpu(method: Estimator) -> None:
    """Up to rounding; samples are drawn by the device's own random numbers, and are others there."""
    guards = (Guard(pocket(device), LENIENT, estimator=method, options=BRIEF) for device in (DEVICE, "cpu"))
    found, expected = (guard(QUESTIONS[0]) for guard in guards)
    assert found.text == expected.text
    assert (found.uncertainty is None) == (expected.uncertainty is None), found.reason
    if not hasattr(method, "sampling") and found.uncertainty is not None:
        assert found.uncertainty == pytest.approx(expected.uncertainty, rel=5e-3, abs=1e-6)


def test_concurrent_calls_and_streams_give_the_scores_of_single_calls() -> None:
    guard = Guard(pocket(DEVICE), LENIENT, estimator=HybridGrad(), options=BRIEF)
    singly = [guard(question) for question in QUESTIONS]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(guard, QUESTIONS * 4))
    streams = [guard.stream(question) for question in QUESTIONS]
    texts = ["".join(stream) for stream in streams]
    for found in (*(together[i : i + 4] for i in range(0, 16, 4)), [stream.verdict for stream in streams]):
        assert [verdict.text for verdict in found] == [verdict.text for verdict in singly]
        for verdict, alone in zip(found, singly, strict=True):
            assert verdict.uncertainty == pytest.approx(alone.uncertainty, rel=5e-3, abs=1e-6)
    assert texts == [verdict.text for verdict in singly]


def test_sentences_are_scored_as_on_the_cpu() -> None:
    text = "The capital of Peru is Lima. It is a city! Its currency is the sol."
    models = (pocket(DEVICE), pocket("cpu"))
    found, expected = (sentences_of(model.evidence(QUESTIONS[1], text)) for model in models)
    assert found is not None
    assert expected is not None
    assert len(found) == 3
    for (span, ours), (other, theirs) in zip(found, expected, strict=True):
        assert span == other
        scores, reference = (part and part.gradients() for part in (ours, theirs))
        assert scores is not None
        assert reference is not None
        assert scores.scores.hybridgrad == pytest.approx(reference.scores.hybridgrad, rel=5e-3, abs=1e-6)
        assert scores.scores.log_probs == pytest.approx(reference.scores.log_probs, rel=1e-3, abs=1e-4)


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
