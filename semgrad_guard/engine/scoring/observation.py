"""The evidence of an answer's own tokens without a gradient: likelihoods, and a middle layer's states.

Generating computes both. They are read off the states that a generation has left, or one pass over prompt and answer.

Why: docs/adr/0107-observing-without-a-replay.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from semgrad_guard.engine.objective import LogitTransform
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.hooks import by_token
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scoring.head import Logits


@dataclass(frozen=True)
class Observation:
    """One answer as its model sees it.

    `log_probs` and `entropies` hold one value per response token, in nats. `state` is the mean of h^(k) [d] over the
    positions that predict the response tokens, or of the tokens' own (`own`), k = `observed_layer(L)`, with a model's
    several residual streams side by side; empty where the model's layers are not known. Where a number is not finite
    there is nothing but the `reason`.
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
    """The layer whose states are averaged: the first of the paper's span, which generations keep anyway."""
    return min(n_layers // 2 + 1, n_layers - 1)


@torch.no_grad()
def observe(
    batch: TokenBatch,
    replayer: Replayer,
    n_layers: int,
    transform: LogitTransform,
    captured: CapturedStates | None = None,
    *,
    own: bool = False,
) -> tuple[Observation, ...]:
    """Observe every part of every row of a batch; `captured` is left by its generation and spares the pass.

    `transform` follows the model's head. `own`: the tokens' own states are averaged. An answer that a limit cut off has
    left none of its last token, and then it takes the pass.
    """
    if own and captured is not None and not captured.holds_answers(batch):
        captured = None
    states, start, final, raw = _seen(batch, replayer, n_layers, captured, whole=own)
    averaged = batch.answering(states, start) if own else batch.predicting(states, start)
    surveys = None if raw is not None or captured is None else captured.surveyed(batch)
    logits = Logits(final, batch.targets(), replayer.head, transform=transform, raw=raw)
    distribution, aims = logits.survey() if surveys is None else logits.surveyed(surveys)
    parts = zip(
        distribution.log_probs(aims).double().split(batch.parts),
        distribution.entropies.double().split(batch.parts),
        (states.mean(0) for states in averaged.double().split(batch.parts)),
        strict=True,
    )
    found: list[Observation] = []
    for log_probs, entropies, state in parts:
        if all(bool(series.isfinite().all()) for series in (log_probs, entropies, state)):
            numbers, uncertainties, means = (tuple(series.tolist()) for series in (log_probs, entropies, state))
            found.append(Observation(numbers, uncertainties, means))
        else:
            found.append(Observation((), (), reason="the model's logits or hidden states are not finite"))
    return tuple(found)


def _seen(
    batch: TokenBatch, replayer: Replayer, n_layers: int, captured: CapturedStates | None, *, whole: bool = False
) -> tuple[torch.Tensor, int, torch.Tensor, list[torch.Tensor] | None]:
    """h^(k) [B, columns, d] and its first column; for each response token the state before the head that predicted it
    [n, d], and the head's output. `whole`: h^(k) up to the last tokens."""
    layer = observed_layer(n_layers)
    final = None if captured is None or captured.layer != layer else captured.final_states(batch)
    if captured is not None and final is not None:
        return by_token(captured.states_of(batch, whole=whole), 1), batch.cut, final, captured.raw_logits(batch)
    start, hidden, final = replayer.observed(batch, layer, whole=whole)
    return hidden, start, batch.predicting(final, start), None
