"""An answer that there was no room to score is delivered by the policy for answers without a score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy, Router
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.estimators import SemanticEntropy
from semgrad_guard.estimators.base import Estimator

OPTIONS = GenerationOptions(max_tokens=4)
QUESTIONS = ["q", "another question", "why?"]


@contextmanager
def no_room(model: LanguageModel, when: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """A layer asks the allocator for more than there is, for some of the passes."""

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if when(args[0]):
            torch.empty(1 << 52)

    handle = model._model.model.layers[3].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def guard(model: LanguageModel, on_unscored: Any, estimator: Estimator | None = None) -> Guard:
    policy = Policy(threshold=1e308, on_unscored=on_unscored, on_cut="score")
    return Guard(model, Router(policy, lambda _: "elsewhere"), estimator=estimator, options=OPTIONS)


@pytest.mark.parametrize("way", ["batch", "abatch", "stream", "astream"])
@pytest.mark.parametrize("on_unscored", ["answer", "abstain", "escalate"])
def test_it_is_delivered_by_the_policy(on_unscored: str, way: str, language_model: LanguageModel) -> None:
    expected = [generation.text for generation in language_model.generate_batch(QUESTIONS, OPTIONS)]
    guarded = guard(language_model, on_unscored)
    with no_room(language_model, lambda states: states.requires_grad):
        verdicts = verdicts_of(guarded, way)
    for verdict, text in zip(verdicts, expected, strict=True):
        assert verdict.text == {"answer": text, "abstain": "I don't know.", "escalate": "elsewhere"}[on_unscored]
        assert (verdict.action, verdict.status, verdict.uncertainty) == (on_unscored, "failed", None)
        assert "memory ran out" in str(verdict.reason)
        assert not verdict.promised
    assert [verdict.status for verdict in guarded.batch(QUESTIONS)] == ["scored"] * 3


def verdicts_of(guarded: Guard, way: str) -> list[Any]:
    if way == "batch":
        return guarded.batch(QUESTIONS)
    if way == "abatch":
        return asyncio.run(guarded.abatch(QUESTIONS))
    if way == "stream":
        return [guarded.stream(question).verdict for question in QUESTIONS]

    async def streamed() -> list[Any]:
        return [await guarded.astream(question).verdict() for question in QUESTIONS]

    return asyncio.run(streamed())


def test_the_others_of_a_batch_have_their_scores(language_model: LanguageModel) -> None:
    guarded = guard(language_model, "answer")
    alone = [guarded(question).uncertainty for question in QUESTIONS]
    with no_room(language_model, lambda states: states.requires_grad and len(states) > 1):
        verdicts = guarded.batch(QUESTIONS)
    assert [verdict.uncertainty for verdict in verdicts] == pytest.approx(alone, rel=1e-9)


def test_methods_that_sample_are_tried_answer_by_answer_too(language_model: LanguageModel) -> None:
    estimator = SemanticEntropy(Sampling(count=3, max_tokens=4))
    guarded = guard(language_model, "answer", estimator)
    with no_room(language_model, lambda states: states.shape[0] > 3):  # the samples of one answer fit
        verdicts = guarded.batch(QUESTIONS)
    assert [verdict.status for verdict in verdicts] == ["scored"] * 3
    with no_room(language_model, lambda states: states.shape[0] >= 3 and states.shape[1] == 1):
        verdict = guarded(QUESTIONS[0])
    assert verdict.status == "failed"
    assert "memory ran out" in str(verdict.reason)
