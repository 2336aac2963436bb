"""Several threads at once: scores come out the same, and a generation at the same time sees nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from semgrad_guard.engine.scores import scorer as scorer_module
from semgrad_guard.engine.scores.exactness import checked
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import Scorer, scorer_of

from .cases import CASES
from .tiny_models import LONG_ROPE, build, token_ids

ROUNDS = 6


def test_two_threads_score_while_a_third_generates() -> None:
    """A long-rope model: it rewrites a buffer in every pass, so that shared state would show."""
    model = build("phi3", **LONG_ROPE)
    prompt = torch.tensor([token_ids(30, 1)])

    def generate() -> list[int]:
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=False)[0].tolist()

    def score(row: int) -> GradientScores:
        case = CASES[row]
        return gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)

    generated, scored = generate(), [score(0), score(2)]
    start = threading.Barrier(3)

    def repeat(work: Callable[[], Any]) -> list[Any]:
        start.wait()
        return [work() for _ in range(ROUNDS)]

    with ThreadPoolExecutor(3) as pool:
        texts = pool.submit(repeat, generate)
        scores = [pool.submit(repeat, lambda row=row: score(row)) for row in (0, 2)]
        assert texts.result() == [generated] * ROUNDS
        assert [future.result() for future in scores] == [[found] * ROUNDS for found in scored]


def test_the_first_scores_of_many_threads_share_one_scorer_and_one_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    checks: list[int] = []
    start = threading.Barrier(4)
    monkeypatch.setattr(scorer_module, "checked", lambda *given: (checks.append(1), checked(*given))[1])

    def first() -> tuple[Scorer, float | None]:
        start.wait()
        case = CASES[0]
        found = gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)
        return scorer_of(model), found.semgrad

    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(first) for _ in range(4)]]
    assert len(set(results)) == 1
    assert len(checks) == 1
