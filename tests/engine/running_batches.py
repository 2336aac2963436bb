"""Requests that join a running batch at random, and the comparison of its answers with those of single requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.writing import BatchRequest, RunningAnswer
from semgrad_guard.engine.answers.answer import Evidence, Generation
from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.objective import Objective
from tests.random_llama import byte_tokenizer
from tests.whole_runs import whole_run

from .tiny_models import build

Options = GenerationOptions


Wanted = tuple[str, GenerationOptions]


WHOLE_PROMPT = Objective(last_tokens=1000)


OBJECTIVES = (
    Objective(),
    WHOLE_PROMPT,
    Objective(variant="official", token=-1),
    Objective(layers=(0,)),
    Objective(gradients=False),
)


def wrapped(name: str, **changes: Any) -> LanguageModel:
    settings = {"vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257, "max_position_embeddings": 300}
    model = build(name, **{"dtype": torch.float32, **settings, **changes})
    return LanguageModel.from_transformers(model, byte_tokenizer())


shared = cache(wrapped)


def batch_request(model: LanguageModel, wanted: Wanted, listener: Callable[[str], None] | None = None) -> BatchRequest:
    question, options = wanted
    prompt = model.render(question)
    return BatchRequest(prompt, model.fitted(options, prompt), listener)


def joined(model: LanguageModel, batch: RunningBatch, wanted: Sequence[Wanted]) -> list[RunningAnswer]:
    return batch.join([batch_request(model, item) for item in wanted])


def finished(batch: RunningBatch) -> None:
    while batch.rows:
        batch.step()


def written(
    model: LanguageModel, wanted: Sequence[Wanted], random: Random, objective: Objective | None = None
) -> list[Generation]:
    """What a batch makes of requests that come a few at a time, with steps in between."""
    batch, left, rows = model.running_batch(objective), list(wanted), list[RunningAnswer]()
    while left or batch.rows:
        if left and (not batch.rows or random.random() < 0.6):
            count = random.randint(1, 3)
            rows += joined(model, batch, left[:count])
            left = left[count:]
        batch.step()
    assert [row.error for row in rows] == [None] * len(wanted)
    return batch.generations(rows)


def numbers(evidence: Evidence, objective: Objective) -> list[float]:
    """What is recorded of an answer."""
    found = evidence.observed()
    if found is None:
        return []
    values = [*found.log_probs, *found.entropies]
    if objective.gradients:
        timed = evidence.gradients(objective)
        assert timed is not None
        scores = timed.scores
        values += [score for score in (scores.semgrad, scores.paragrad, scores.hybridgrad) if score is not None]
    return values


def require_alike(one: Generation, single: Generation, objective: Objective | None = None) -> None:
    """An answer from a batch is that of a single request."""
    objective = objective or Objective()
    names = ("response_ids", "text", "finish_reason", "cut", "completion_tokens")
    assert [getattr(one, name) for name in names] == [getattr(single, name) for name in names]
    assert numbers(one.evidence, objective) == pytest.approx(numbers(single.evidence, objective), rel=1e-4, abs=1e-9)
    if one.response_ids:
        states = [seen.state for answer in (one, single) if (seen := answer.evidence.observed(own=True))]
        assert states[0] == pytest.approx(states[1], rel=1e-3, abs=1e-5)
    if objective.gradients and one.response_ids:
        mine, its = one.evidence.gradients(objective), single.evidence.gradients(objective)
        assert mine is not None
        assert its is not None
        assert mine.scores.tier == its.scores.tier
        for row, other in zip(mine.scores.grid, its.scores.grid, strict=True):
            assert row == pytest.approx(other, rel=1e-3)


def require_all_alike(
    model: LanguageModel, wanted: Sequence[Wanted], random: Random, objective: Objective | None = None
) -> None:
    singles = [whole_run(model, question, options, objective=objective) for question, options in wanted]
    for one, single in zip(written(model, wanted, random, objective), singles, strict=True):
        require_alike(one, single, objective)


def some(random: Random, count: int) -> list[Wanted]:
    """Questions of very unequal length, with options of their own."""
    questions = ["".join(random.choices("abc de?", k=random.choice((1, 2, 5, 20, 60)))) + "x" for _ in range(count)]
    return [
        (
            question,
            Options(
                max_tokens=random.choice((1, 2, 3, 8)),
                temperature=random.choice((0.0, 0.0, 0.9)),
                top_k=random.choice((0, 5)),
                seed=random.randint(0, 99),
                stop=random.choice(((), (), ("a",), ("e", "ab"))),
            ),
        )
        for question in questions
    ]
