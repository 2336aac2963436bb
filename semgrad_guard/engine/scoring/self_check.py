"""Which tiers are exact on a model: the fast ones are held against plain autograd, once, on a short made-up prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from semgrad_guard.engine.models.architecture import Architecture
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.memory_budget import is_out_of_memory
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.replay.token_batch import TokenBatch
from semgrad_guard.engine.scoring.gradients import no_gradient, through_logits
from semgrad_guard.engine.scoring.scores import NO_GRADIENT, GradientScores, Tier, agree
from semgrad_guard.errors import AnswerInterruptedError

logger = logging.getLogger("semgrad_guard")

ScoreByTier = Callable[[TokenBatch, Objective, "CapturedStates | None", Tier], GradientScores]
"""Scores a batch of one answer by one tier; the scores say which tier it really was."""

# How far two exact computations may differ in each dtype: kernels of other shapes round differently, and scores of
# nearly certain answers carry that noise (bfloat16: up to 15 % at a mean entropy of 0.3).
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
_PROMPT, _RESPONSE = 9, 4


def exact_tiers(architecture: Architecture, replayer: Replayer, score: ScoreByTier) -> tuple[Tier, ...] | None:
    """The tiers that agree with plain autograd in the model's own dtype, cheapest first, "full" always the last.

    None where there is nothing to compare by (broken weights): that settles nothing, and is asked again next time.

    Raises:
        UnsupportedModelError: no gradient reaches the hidden states of this model.
    """
    if architecture.layers is None or not architecture.cuttable:
        logger.info("semgrad-guard replays whole sequences: this architecture's states cannot be cut at t*")
        return ("full",)
    batch, objective = _batch(replayer), _objective(architecture.n_layers)
    span = objective.span(architecture.n_layers)
    (expected,) = through_logits(batch, objective, replayer.full(batch, span))
    if expected.reason == NO_GRADIENT:
        raise no_gradient()
    if expected.reason is not None:
        return None
    agreeing: list[Tier] = []
    for tier in ("captured", "prefix"):
        try:
            captured = replayer.record(batch, span[0]) if tier == "captured" else None
            scores = score(batch, objective, captured, tier)
        except AnswerInterruptedError:
            raise
        except Exception as error:
            if is_out_of_memory(error):  # which says nothing of the tier
                raise
            # Unknown model code may fail in any way; the next tier is tried.
            logger.warning("semgrad-guard: the %s tier fails on this model (%r)", tier, error)
            continue
        if scores.tier == tier and agree(scores, expected, _TOLERANCE.get(replayer.head.weight.dtype, 0.25)):
            agreeing.append(tier)
        else:
            logger.warning("semgrad-guard: the %s tier disagrees with autograd: %s, %s", tier, scores, expected)
    if len(agreeing) < 2:
        logger.warning("semgrad-guard steps down to slower scoring for this model: %s", [*agreeing, "full"])
    return (*agreeing, "full")


def _batch(replayer: Replayer) -> TokenBatch:
    vocabulary, device = replayer.head.weight.shape[0], replayer.head.weight.device
    ids = [(7919 * i + 104729) % vocabulary for i in range(_PROMPT + _RESPONSE)]
    return TokenBatch.of([ids[:_PROMPT]], [ids[_PROMPT:]], [-3], device)


def _objective(n_layers: int) -> Objective:
    """One layer of the upper half, so that there are layers to leave out below it and to replay above."""
    return Objective(layers=(n_layers // 2 + 1,) if n_layers // 2 + 1 < n_layers else (n_layers - 1,))
