"""The engine's entry for token ids: any response of an unmodified Hugging Face causal LM."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast, overload

import numpy as np
from transformers import PreTrainedModel

from semgrad_guard.declared import plain
from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.engine.replay.memory import unless_memory_runs_out
from semgrad_guard.engine.replay.tape import Row
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.errors import EmptyPromptError, EmptyResponseError, InputError


@overload
def gradient_scores(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    semantic_token: int,
    variant: Variant = "paper",
    layers: Sequence[int] | None = None,
) -> GradientScores: ...


@overload
def gradient_scores(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    semantic_token: int | Sequence[int],
    variant: Variant = "paper",
    layers: Sequence[int] | None = None,
) -> list[GradientScores]: ...


def gradient_scores(
    model: PreTrainedModel,
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    response_ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    semantic_token: int | Sequence[int],
    variant: Variant = "paper",
    layers: Sequence[int] | None = None,
) -> GradientScores | list[GradientScores]:
    """SemGrad, ParaGrad and HybridGrad of a response, written by the model or not.

    Args:
        model: a causal LM; it is read, never changed, and may be in use elsewhere.
        prompt_ids: the prompt's tokens, or a list of prompts; without padding.
        response_ids: the response's tokens, or one response per prompt.
        semantic_token: t*, counted from the prompt's end (-1 is its last token); one for all, or one per prompt.
        variant: "paper" (sum over tokens, layers floor(L/2)+1 .. L-1) or "official" (mean over tokens, the last
            floor(L/2) of layers 0 .. L-1). With tied heads both count the head alone.
        layers: another span, as layer numbers 0 .. L-1.

    Returns:
        One `GradientScores`, or a list of them for a list of prompts.

    Raises:
        EmptyLayerSpanError: the variant's span is empty (paper: L <= 2); the message names the layer count.
        UnsupportedModelError: the architecture rules a score out; the message gives the reason.
        InputError: empty or mismatched ids, ids outside the vocabulary, a t* outside the prompt.
    """
    single = _is_one_row(prompt_ids)
    prompts, responses = (_rows(ids, single=single) for ids in (prompt_ids, response_ids))
    places: Any = semantic_token if np.ndim(semantic_token) else [semantic_token] * len(prompts)
    offsets = plain("semantic_token", places, tuple[int, ...])
    scorer = scorer_of(model)
    objective = Objective(variant, None if layers is None else tuple(layers))
    with scorer.lock:  # one turn, in which the model is looked at once
        unless_memory_runs_out(scorer.exactness)  # a reason that rules every score out comes first
        objective.span(scorer.architecture.n_layers)
        embedding: Any = model.get_input_embeddings()
        vocabulary = min(int(embedding.weight.shape[0]), scorer.vocabulary)
        _validate(prompts, responses, offsets, vocabulary=vocabulary)
        texts = zip(prompts, responses, offsets, strict=True)
        scores = scorer.score([Row.of(*text, objective) for text in texts], objective)
    return scores[0] if single else scores


def _is_one_row(ids: Sequence[int] | Sequence[Sequence[int]]) -> bool:
    try:
        return len(ids) == 0 or operator.index(cast(int, ids[0])) is not None
    except TypeError:
        return False


def _rows(ids: Sequence[int] | Sequence[Sequence[int]], *, single: bool) -> list[list[int]]:
    """One row, or one per prompt, of plain ints (NumPy's count as such)."""
    rows = cast("Sequence[Sequence[int]]", [ids] if single else ids)
    try:
        return [[operator.index(token) for token in row] for row in rows]
    except TypeError:
        raise InputError("token ids must be a list of ints, or a list of such lists for a batch") from None


def _validate(prompts: list[list[int]], responses: list[list[int]], offsets: Sequence[int], *, vocabulary: int) -> None:
    if not len(prompts) == len(responses) == len(offsets):
        raise InputError(
            f"{len(prompts)} prompt(s), {len(responses)} response(s) and {len(offsets)} t* position(s) do not match"
        )
    for prompt, response, offset in zip(prompts, responses, offsets, strict=True):
        if not prompt:
            raise EmptyPromptError("the prompt holds no token")
        if not response:
            raise EmptyResponseError("the response holds no token to score")
        if not -len(prompt) <= offset <= -1:
            raise InputError(f"semantic_token={offset} lies outside the prompt: use -{len(prompt)} .. -1")
        if not all(0 <= token < vocabulary for token in (*prompt, *response)):
            raise InputError(f"token ids must be ints within 0 .. {vocabulary - 1}")
