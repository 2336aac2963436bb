"""The least time that exact scores can take on a machine, from the unavoidable bytes and operations.

Scoring an answer of T tokens from its generation's states has to

    backward  read the upper layers' weights once and multiply them with T + 2 positions (t* .. the last but one);
              forward, generation has done so already
    head      read the head once for the seed A W, and multiply it with T rows (A itself needs no weights where the
              logits were kept)
    ParaGrad  multiply A^T H: as many operations, no weights (one token needs none: the product's norm factorises)

and each of the three takes at least its bytes at the machine's bandwidth and its operations at the machine's rate, both
measured. Attention, norms and the exponentials are left out, so it is a floor and no estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from machine import Rates
from shapes import SEMANTIC_TOKEN, Setting, layer_weights


@dataclass(frozen=True)
class ScoringFloor:
    """Seconds that each part of scoring a batch takes at least."""

    backward: float
    seed: float
    paragrad: float

    @property
    def total(self) -> float:
        return self.backward + self.seed + self.paragrad


def scoring_floor(config: Any, setting: Setting, rates: Rates, element: int) -> ScoringFloor:
    """The least work of scoring a batch."""
    first = config.num_hidden_layers - config.num_hidden_layers // 2
    upper = layer_weights(config) * (config.num_hidden_layers - first)
    head = config.vocab_size * config.hidden_size
    positions = setting.rows * (setting.answer - SEMANTIC_TOKEN - 1)
    tokens = setting.rows * setting.answer
    backward = max(upper * element / rates.bytes_per_second, 2.0 * positions * upper / rates.flops_per_second)
    seed = max(head * element / rates.bytes_per_second, 2.0 * tokens * head / rates.flops_per_second)
    products = 2.0 * tokens * head / rates.flops_per_second if setting.answer > 1 else 0.0
    return ScoringFloor(backward, seed, products)


def generation_floor(config: Any, setting: Setting, rates: Rates, element: int) -> float:
    """Seconds that generating a batch takes at least: one pass over the prompts, then one over all weights a token."""
    weights = layer_weights(config) * config.num_hidden_layers + config.vocab_size * config.hidden_size
    prompts = 2.0 * setting.rows * setting.prompt * weights / rates.flops_per_second
    step = max(weights * element / rates.bytes_per_second, 2.0 * setting.rows * weights / rates.flops_per_second)
    return prompts + setting.answer * step
