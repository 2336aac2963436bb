"""Ways into the scorer for the tests: one tier at a time, or after a real generation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import Memory, TokenBatch, cache_of
from semgrad_guard.engine.replay.captured_states import Capture, CapturedStates
from semgrad_guard.engine.scores.gradients import GradientScores, Rows, States, Tier
from semgrad_guard.engine.scores.scorer import Branches, InputCheck
from semgrad_guard.engine.scores.scorer import clean_slate, scorer_of

from .oracle import Reference, reference_scores
from .tiny_models import shared, token_ids


@dataclass(frozen=True)
class Case:
    """A prompt, a response and its t*, counted from the prompt's end."""

    prompt: list[int]
    response: list[int]
    semantic_token: int

    def reference(self, model: Any, objective: Objective, **options: Any) -> Reference:
        """The oracle's results."""
        n = objective.last_tokens
        return reference_scores(
            model,
            self.prompt,
            self.response,
            self.semantic_token if objective.token is None else objective.token,
            objective.variant,
            objective.layers,
            norm=objective.norm,
            weighted=objective.weighted,
            grid_tokens=None if n is None else min(n, len(self.prompt)),
            **options,
        )


# Prompts of unequal length (one far longer than any sliding window of the tiny models), unequal responses, T = 1,
# and another t* in each row.
CASES = (
    Case(token_ids(11, 1), token_ids(4, 2), -3),
    Case(token_ids(7, 3), token_ids(1, 4), -1),
    Case(token_ids(20, 5), token_ids(6, 6), -5),
)


def batch_of(
    cases: Sequence[Case], objective: Objective | None = None, segments: Sequence[Sequence[int]] | None = None
) -> TokenBatch:
    """The cases as one padded batch, laid out for an objective."""
    prompts, responses = [c.prompt for c in cases], [c.response for c in cases]
    tokens = [c.semantic_token for c in cases]
    return TokenBatch.of(prompts, responses, tokens, "cpu", objective=objective, segments=segments)


def score_in_tier(
    tier: Tier, model: Any, cases: Sequence[Case], objective: Objective, captured: CapturedStates | None = None
) -> tuple[GradientScores, ...]:
    """Score the cases together in one tier, as the engine would if the self-check had left only that one."""
    rows = score_parts_in_tier(tier, model, batch_of(cases, objective), objective, captured)
    return tuple(parts[0] for parts in rows)


def score_parts_in_tier(
    tier: Tier, model: Any, batch: TokenBatch, objective: Objective, captured: States = None
) -> Rows:
    """Score the parts of a batch's responses in one tier."""
    scorer = scorer_of(model)
    with scorer.lock, clean_slate():  # one turn: a model with a patched function is verified anew in the next
        assert tier in scorer.tiers(), f"the self-check turned the {tier} tier down"
        state = scorer._current()
        found = state.exactness, state.inputs
        assert found[0] is not None
        state.exactness = replace(found[0], tiers=(tier,) if tier == "full" else (tier, "full"))
        state.inputs = InputCheck(Branches(), {"gradient": sys.maxsize})  # the oracle verifies it
        try:
            if tier == "captured" and captured is None:
                layer = objective.span(scorer.architecture.n_layers)[0]
                record = scorer.current_replayer().record
                by_row = tuple(record(row, layer) for row in batch.rows() if batch.context)
                captured = by_row or record(batch, layer)
            rows = scorer.score_parts(batch, objective, captured)
        finally:
            state.exactness, state.inputs = found
    assert {scores.tier for row in rows for scores in row} == {tier}
    return rows


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    offsets: Sequence[int],
    layer: int,
    *,
    logit_bytes: int = 1 << 20,
    output_bytes: int = 1 << 20,
    **options: Any,
) -> tuple[list[list[int]], CapturedStates]:
    """A real `generate` of a left-padded batch with states captured on the way: responses and what is left behind."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    capture = Capture(layer, width + min(offsets), memory=Memory(logits=logit_bytes, outputs=output_bytes))
    config = GenerationConfig(pad_token_id=0, return_dict_in_generate=True, **options)
    with clean_slate():
        output = scorer_of(model).current_replayer().generate(ids, mask, capture, generation_config=config)
    return output.sequences[:, width:].tolist(), CapturedStates.of(cache_of(output), capture)


def answered(name: str, *, lengths: Sequence[int] = (6, 1, 4), **options: int) -> tuple[list[Case], CapturedStates]:
    """The cases' prompts with real answers of a shared model, each cut to its length, and what is left behind."""
    model = shared(name)
    layer = Objective().span(scorer_of(model).architecture.n_layers)[0]
    prompts, offsets = [case.prompt for case in CASES], [case.semantic_token for case in CASES]
    responses, captured = generate(
        model, prompts, offsets, layer, max_new_tokens=6, do_sample=False, eos_token_id=None, **options
    )
    answers = [response[:length] for response, length in zip(responses, lengths, strict=True)]
    return [Case(*row) for row in zip(prompts, answers, offsets, strict=True)], captured
