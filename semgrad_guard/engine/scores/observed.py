"""The evidence of an answer's own tokens without a gradient: likelihoods, and a middle layer's states.

Writing an answer computes them. They are read off the tape that it leaves, or off one pass over a text from elsewhere.

Why: docs/decisions.md#0107
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from semgrad_guard.engine.objective import LogitTransform
from semgrad_guard.engine.replay.tape import Row, Tape
from semgrad_guard.engine.replay.twin import Twin
from semgrad_guard.engine.scores.head import Logits


@dataclass(frozen=True)
class Observation:
    """One answer as its model sees it.

    `log_probs` and `entropies` hold one value per response token, in nats. `state` is the mean of h^(k) [d] over the
    positions that predict the response tokens, or of the tokens' own (`own`), k = `observed_layer(L)`; empty where the
    model's layers are not known. Where a number is not finite there is nothing but the `reason`.
    """

    log_probs: tuple[float, ...]
    entropies: tuple[float, ...]
    state: tuple[float, ...] = ()
    reason: str | None = None

    @property
    def greedy_nll(self) -> float | None:
        """The response's negative log-likelihood in nats, >= 0."""
        return -math.fsum(self.log_probs) if self.log_probs else None

    @property
    def mean_entropy(self) -> float | None:
        """The mean of the tokens' entropies in nats, >= 0."""
        return math.fsum(self.entropies) / len(self.entropies) if self.entropies else None


def observed_layer(n_layers: int) -> int:
    """The layer whose states are averaged: the first of the paper's span, which writing keeps anyway."""
    return min(n_layers // 2 + 1, n_layers - 1)


@torch.no_grad()
def observe(twin: Twin, row: Row, transform: LogitTransform, *, own: bool = False) -> Observation:
    """One row, whose tape holds the states before the head and h^(k) at its positions (`can_be_observed`)."""
    tape, begin, end = row.taped, row.begin - 1, row.end - 1
    finals = torch.stack(tape.steps("finals", begin, end) or [])
    targets = torch.tensor(row.targets, device=finals.device)
    logits = Logits(finals, targets, twin.head, transform=transform, raw=tape.steps("logits", begin, end))
    distribution, aims = logits.survey()
    state = tape.hidden([(begin + own, end + own)]).double().mean(0)
    series = [distribution.log_probs(aims).double(), distribution.entropies.double(), state]
    if not all(bool(numbers.isfinite().all()) for numbers in series):
        return Observation((), (), reason="the model's logits or hidden states are not finite")
    log_probs, entropies, mean = (tuple(numbers.tolist()) for numbers in series)
    return Observation(log_probs, entropies, mean)


def can_be_observed(row: Row, tape: Tape, layer: int, *, own: bool = False) -> bool:
    """Whether a tape has all that `observe` reads; a limit cuts an answer off before its last token is read."""
    if tape.layer != layer or tape.begin > row.begin - 1 or tape.end < row.end - 1 + own:
        return False
    return tape.steps("finals", row.begin - 1, row.end - 1) is not None
