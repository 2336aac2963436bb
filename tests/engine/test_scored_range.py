"""An answer scored given the tokens before it (a thought): equal to plain autograd, however long they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from semgrad_guard import LanguageModel
from semgrad_guard.engine.answers.writing import BatchRequest
from semgrad_guard.engine.answers.answer import BatchScoring, Evidence, Generation
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.scores.gradients import Tier
from semgrad_guard.engine.scores.scorer import Scorer
from tests.pairwise import pairwise
from tests.thinking import ANSWERS, UNTHOUGHT, thinking_model

from .oracle import Reference, reference_scores, worst_relative_error
from .scoring_paths import CASES, score_parts_in_tier
from .tiny_models import build, token_ids


@cache
def long_model(name: str) -> Any:
    """A tiny model with room for two thousand tokens."""
    return build(name, max_position_embeddings=2200, num_hidden_layers=3).double()


def reference(model: Any, prompt: Sequence[int], before: Sequence[int], answer: Sequence[int], t: int) -> Reference:
    return reference_scores(model, prompt, [*before, *answer], t, part=slice(len(before), None))


@pairwise(
    name=["llama", "qwen2-tied"],
    lengths=[(0,), (1,), (2000,), (1, 0, 1)],
    tier=["captured", "prefix", "full"],
)
def test_tokens_before_the_scored_ones_are_context(name: str, lengths: tuple[int, ...], tier: Tier) -> None:
    model, rows = long_model(name), CASES[: len(lengths)]
    thoughts = [token_ids(length, 70 + length) for length in lengths]
    batch = TokenBatch.of(
        [row.prompt for row in rows],
        [[*thought, *row.response] for thought, row in zip(thoughts, rows, strict=True)],
        [row.semantic_token for row in rows],
        "cpu",
        before=lengths,
    )
    found = score_parts_in_tier(tier, model, batch, Objective())
    for (scores,), row, thought in zip(found, rows, thoughts, strict=True):
        expected = reference(model, row.prompt, thought, row.response, row.semantic_token)
        assert worst_relative_error(scores, expected) < 1e-7
    for seen, row, thought in zip(Scorer(model).observe(batch), rows, thoughts, strict=True):
        expected = reference(model, row.prompt, thought, row.response, row.semantic_token)
        assert seen.log_probs == pytest.approx(expected.log_probs, abs=1e-9)
        assert seen.entropies == pytest.approx(expected.entropies, abs=1e-9)


def one_run(model: LanguageModel, questions: Sequence[str]) -> list[Generation]:
    return model.generate_batch(questions)


def running(model: LanguageModel, questions: Sequence[str]) -> list[Generation]:
    batch = model.running_batch()
    rows = batch.join([BatchRequest(model.render(question), GenerationOptions()) for question in questions])
    while batch.rows:
        batch.step()
    return batch.generations(rows)


def from_text(model: LanguageModel, questions: Sequence[str]) -> list[Evidence]:
    written = [generation.reasoning for generation in one_run(model, questions)]
    answers = [generation.text for generation in one_run(model, questions)]
    thoughts = [None if thought is None else thought.text for thought in written]
    rows = zip(questions, answers, thoughts, strict=True)
    joined = [model.evidence(question, answer, reasoning=thought) for question, answer, thought in rows]
    return list(BatchScoring.joined(joined).evidence)


@pytest.mark.parametrize("way", [one_run, running, from_text])
@pytest.mark.parametrize("questions", [[next(iter(ANSWERS))], [*ANSWERS, UNTHOUGHT]], ids=["alone", "together"])
def test_a_written_answer_is_scored_given_its_thought(way: Any, questions: list[str]) -> None:
    """From a run's states, from those of a changing batch, and from the texts alone; one answer has no thought."""
    model = thinking_model()
    for question, found in zip(questions, way(model, questions), strict=True):
        evidence: Evidence = found.evidence if isinstance(found, Generation) else found
        assert model.tokenizer.decode(list(evidence.response_ids)) == evidence.text == ANSWERS.get(question, "yes")
        assert (evidence.preceding_ids == ()) == (question == UNTHOUGHT)
        prompt, before, answer = evidence.prompt, evidence.preceding_ids, evidence.response_ids
        expected = reference(model._model, prompt.ids, before, answer, prompt.semantic_token.offset)
        thought = evidence.thought()
        timed = evidence.gradients()
        assert timed is not None
        assert timed.scores.tier == ("prefix" if way is from_text else "captured")
        assert timed.scores.hybridgrad == pytest.approx(expected.hybridgrad, rel=1e-3)
        assert timed.scores.greedy_nll == pytest.approx(expected.greedy_nll, rel=1e-3, abs=1e-6)
        seen = evidence.alone().observed()
        assert seen is not None
        assert seen.greedy_nll == pytest.approx(expected.greedy_nll, rel=1e-3, abs=1e-6)
        if question == UNTHOUGHT:
            assert thought is None
            continue
        assert evidence.reasoning is not None
        begin, end = evidence.reasoning.span
        whole = reference_scores(model._model, prompt.ids, before, -1, part=slice(begin, end))
        assert thought is not None
        assert thought.entropies == pytest.approx(whole.entropies, rel=1e-3, abs=1e-5)


def test_attention_and_samples_are_read_given_the_thought() -> None:
    model = thinking_model()
    question = next(iter(ANSWERS))
    evidence = model.generate(question).evidence
    shifted = TokenBatch.of(
        [[*evidence.prompt.ids, *evidence.preceding_ids]], [list(evidence.response_ids)], [-1], torch.device("cpu")
    )
    (expected,) = model._scorer.attention(shifted)
    read = evidence.attention()
    assert read is not None
    assert read.own == pytest.approx(expected.own, rel=1e-4)
    sampler, prompt = evidence.sampler, evidence.prompt
    answers, before = [[evidence.response_ids, (3, 4)]], [[evidence.preceding_ids, ()]]
    ((given, bare),) = sampler.read([prompt], answers, before=before)
    seen = evidence.alone().observed()
    assert seen is not None
    assert given.log_probs == pytest.approx(seen.log_probs, abs=1e-4)
    ((alone,),) = sampler.read([prompt], [[(3, 4)]])
    assert bare.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
    assert bare.embedding == pytest.approx(alone.embedding, abs=1e-4)
