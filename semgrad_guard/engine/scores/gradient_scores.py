"""The engine's entries for research: scores by token ids, and where a model keeps a prompt's meaning.

`gradient_scores` takes any response of an unmodified Hugging Face causal LM.

The Semantic Preservation Score tells at which layer and token a model keeps a prompt's meaning (paper, section 3.2).

With h_n^(i) the hidden state of the i-th wording of query n (0 its own, 1 .. K_n paraphrases) at one layer and token,

    S_within = mean over n of the mean cosine of h_n^(i) and h_n^(j), i != j
    S_across = mean cosine of h_m^(0) and h_n^(0), m != n
    SPS      = S_within - S_across

The cosines of all pairs of m unit vectors add up to ||sum of them||^2 - m. So one pass over the queries is enough, and
its size does not grow with their number.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import numpy as np
import torch
from transformers import PreTrainedModel

from semgrad_guard.declared import plain
from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scores.gradients import GradientScores, hidden_states
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate, scorer_of
from semgrad_guard.engine.scores.tape import Row, unless_memory_runs_out
from semgrad_guard.errors import EmptyPromptError, EmptyResponseError, InputError, ScoringError


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
    try:
        single = np.ndim(next(iter(cast(Any, prompt_ids)), 0)) == 0
    except TypeError:
        raise InputError(_IDS) from None
    prompts, responses = (_rows(ids, single=single) for ids in (prompt_ids, response_ids))
    places: Any = semantic_token if np.ndim(semantic_token) else [semantic_token] * len(prompts)
    offsets = plain("semantic_token", places, tuple[int, ...])
    scorer = scorer_of(model)
    objective = Objective(variant, cast(Any, layers))  # which makes a tuple of them
    with scorer.lock:  # one turn, in which the model is looked at once
        unless_memory_runs_out(scorer.exactness)  # a reason that rules every score out comes first
        objective.span(scorer.architecture.n_layers)
        embedding: Any = model.get_input_embeddings()
        vocabulary = min(int(embedding.weight.shape[0]), scorer.vocabulary)
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
        texts = zip(prompts, responses, offsets, strict=True)
        scores = scorer.score([Row.of(*text, objective) for text in texts], objective)
    return scores[0] if single else scores


def _rows(ids: Sequence[int] | Sequence[Sequence[int]], *, single: bool) -> list[list[int]]:
    """One row, or one per prompt, of plain ints (NumPy's count as such)."""
    rows = cast("Sequence[Sequence[int]]", [ids] if single else ids)
    try:
        return [[operator.index(token) for token in row] for row in rows]
    except TypeError:
        raise InputError(_IDS) from None


_IDS = "token ids must be a list of ints, or a list of such lists for a batch"


@dataclass
class SemanticPreservation:
    """Sums over the queries seen so far, in double precision; more can be added at any time.

    `within` [layers, tokens] adds up each query's mean cosine, `direction` [layers, tokens, d] the unit vectors of the
    queries' own wordings and `squares` [layers, tokens] their squared lengths (1, or 0 for a zero vector, whose cosines
    count as 0); `queries` counts.
    """

    within: torch.Tensor
    direction: torch.Tensor
    squares: torch.Tensor
    queries: int = 0

    @classmethod
    def empty(cls, layers: int, tokens: int, width: int) -> SemanticPreservation:
        """Nothing seen yet."""
        sums = torch.zeros(layers, tokens, dtype=torch.float64)
        return cls(sums, torch.zeros(layers, tokens, width, dtype=torch.float64), sums.clone())

    def add(self, states: torch.Tensor) -> None:
        """Take in one query: the hidden states of its own wording and of its paraphrases, [1 + K, layers, tokens, d].

        Raises:
            InputError: there is no paraphrase.
            ScoringError: a state is not finite.
        """
        wordings = len(states)
        if wordings < 2:
            raise InputError("a query without a paraphrase has no wordings to compare")
        if not states.isfinite().all():
            raise ScoringError(
                "the model's hidden states are not finite: its weights are broken, or its dtype too narrow"
            )
        units = torch.nn.functional.normalize(states.to("cpu", torch.float64), dim=-1)
        squares = units.square().sum(-1)
        pairs = units.sum(0).square().sum(-1) - squares.sum(0)
        self.within += pairs / (wordings * (wordings - 1))
        self.direction += units[0]
        self.squares += squares[0]
        self.queries += 1

    @property
    def similarity_within(self) -> torch.Tensor:
        """S_within [layers, tokens], in [-1, 1]."""
        return self.within / self._enough(1)

    @property
    def similarity_across(self) -> torch.Tensor:
        """S_across [layers, tokens], in [-1, 1]."""
        n = self._enough(2)
        return (self.direction.square().sum(-1) - self.squares) / (n * (n - 1))

    @property
    def scores(self) -> torch.Tensor:
        """SPS [layers, tokens], in [-2, 2].

        Raises:
            InputError: fewer than two queries, so that nothing is across.
        """
        return self.similarity_within - self.similarity_across

    def _enough(self, fewest: int) -> int:
        if self.queries < fewest:
            raise InputError(
                f"the Semantic Preservation Score needs two queries with paraphrases; there is {self.queries}"
            )
        return self.queries


def last_states(scorer: Scorer, prompts: Sequence[Prompt], count: int) -> torch.Tensor:
    """Hidden states h^(0) .. h^(L-1) of the prompts' last `count` tokens, [prompts, L, count, d].

    Raises:
        InputError: a prompt has fewer tokens.
    """
    shortest = min(len(prompt.ids) for prompt in prompts)
    if not 1 <= count <= shortest:
        raise InputError(f"the last {count} tokens are asked for, and the shortest prompt has {shortest}")
    with scorer.lock, clean_slate():
        return torch.stack([hidden_states(scorer.twin, prompt.ids)[:, -count:] for prompt in prompts])
