"""The Semantic Preservation Score: at which layer and token a model keeps a prompt's meaning (paper, section 3.2).

With h_n^(i) the hidden state of the i-th wording of query n (0 its own, 1 .. K_n paraphrases) at one layer and token,

    S_within = mean over n of the mean cosine of h_n^(i) and h_n^(j), i != j
    S_across = mean cosine of h_m^(0) and h_n^(0), m != n
    SPS      = S_within - S_across

The cosines of all pairs of m unit vectors add up to ||sum of them||^2 - m. So one pass over the queries is enough, and
its size does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scores.ordinary import hidden_states
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate
from semgrad_guard.errors import InputError, ScoringError


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
