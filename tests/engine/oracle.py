"""The official algorithm, written naively: the reference that every tier must agree with.

One forward pass over prompt and response with a graph through everything, `output_hidden_states`, entropies detached,
one call of autograd with respect to all hidden states and to a fresh leaf in the head's place. Nothing here is shared
with the engine: no hooks of its kind, no cache, no blocks, no batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Reference:
    """The official algorithm's results for one response."""

    semgrad: float
    paragrad: float
    mean_entropy: float
    greedy_nll: float
    entropies: tuple[float, ...]
    log_probs: tuple[float, ...]
    grid: tuple[tuple[float, ...], ...]

    @property
    def hybridgrad(self) -> float:
        """(1 - a) SemGrad + a ParaGrad, a = exp(-mean entropy)."""
        balance = math.exp(-self.mean_entropy)
        return (1 - balance) * self.semgrad + balance * self.paragrad


def official_span(n_layers: int, variant: Literal["paper", "official"]) -> range:
    """The paper's floor(L/2)+1 .. L-1, or the published code's last floor(L/2) of layers 0 .. L-1."""
    return range(n_layers // 2 + 1, n_layers) if variant == "paper" else range(n_layers - n_layers // 2, n_layers)


def reference_scores(
    model: Any,
    prompt: Sequence[int],
    response: Sequence[int],
    semantic_token: int,
    variant: Literal["paper", "official"] = "paper",
    layers: Sequence[int] | None = None,
    *,
    first_recorded: int = 0,
    norm: Literal["l1", "l2"] = "l1",
    weighted: bool = True,
    grid_tokens: int | None = None,
    part: slice = slice(None),
    context: int = 0,
) -> Reference:
    """Score one response; works on a copy, so that the model under test stays as it was.

    `part` of the response alone makes up the sum. `grid_tokens` is how many of the prompt's last tokens the grid holds
    (by default, it begins at `semantic_token`). The keys and values of the first `context` tokens of the response are
    constants.

    `first_recorded` is the layer whose state the model's `hidden_states` begin with: 0, the embedding, for all but the
    Mamba family, which records from the first layer's output on.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    head: nn.Linear = model.get_output_embeddings()
    # The head alone, also where its weight is the input embedding's: a leaf of its own takes part in the product.
    weight = head.weight.detach().clone().requires_grad_()
    head.register_forward_hook(lambda _, args, __: F.linear(args[0], weight, head.bias))
    for name, module in model.named_modules():
        if context and (constant := _keys_and_values(name.rpartition(".")[2], module, model.config)) is not None:
            within = torch.zeros(len(prompt) + len(response), 1, dtype=torch.bool)
            within[len(prompt) : len(prompt) + context] = True
            module.register_forward_hook(
                lambda _, __, out, where=within & constant: torch.where(where, out.detach(), out)
            )
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())

    with torch.enable_grad():
        output = model(
            input_ids=torch.tensor([[*prompt, *response]]), output_hidden_states=True, use_cache=False, return_dict=True
        )
        first = len(prompt) - 1
        log_p = output.logits[0, first : first + len(response)].double().log_softmax(-1)
        entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
        log_probs = log_p[torch.arange(len(response)), torch.tensor(response)]
        entropies, log_probs = entropies[part], log_probs[part]
        terms = entropies * log_probs if weighted else log_probs
        loss = terms.mean() if variant == "official" else terms.sum()

    states = output.hidden_states[:-1]  # the last one is normalised, and none of the variants uses it
    paragradient, *gradients = torch.autograd.grad(loss, [weight, *states])
    span = official_span(model.config.num_hidden_layers, variant) if layers is None else layers
    prompt_part = torch.stack([gradients[layer - first_recorded][0, : len(prompt)] for layer in span])

    first = semantic_token if grid_tokens is None else -grid_tokens

    def number(gradient: torch.Tensor) -> float:
        entries = gradient.flatten()
        return float(entries.abs().mean() if norm == "l1" else entries.norm(2) / len(entries) ** 0.5)

    return Reference(
        semgrad=number(prompt_part[:, semantic_token]),
        paragrad=number(paragradient),
        mean_entropy=float(entropies.mean()),
        greedy_nll=float(-log_probs.detach().sum()),
        entropies=tuple(entropies.tolist()),
        log_probs=tuple(log_probs.tolist()),
        grid=tuple(map(tuple, prompt_part[:, first:].abs().mean(-1).tolist())),
    )


def _keys_and_values(name: str, module: Any, config: Any) -> torch.Tensor | None:
    """Which of a linear map's outputs are keys or values; None where it has none."""
    if name in ("k_proj", "v_proj"):
        return torch.ones(module.out_features, dtype=torch.bool)
    if name == "qkv_proj":
        return torch.arange(module.out_features) >= config.num_attention_heads * config.head_dim
    if name == "c_attn":
        return torch.arange(module.nf) >= config.hidden_size
    if name == "query_key_value":  # by head: query, key, value
        width = config.hidden_size // config.num_attention_heads
        return torch.arange(module.out_features) % (3 * width) >= width
    return None


def worst_relative_error(found: Any, expected: Reference) -> float:
    """The largest relative error over every figure of a score (the grid, entropies, log-probabilities included)."""
    names = ("semgrad", "paragrad", "hybridgrad", "mean_entropy", "greedy_nll")
    pairs = [(getattr(found, name), getattr(expected, name)) for name in names]
    for ours, theirs in zip(found.grid, expected.grid, strict=True):
        pairs += [*zip(ours, theirs, strict=True)]
    pairs += [*zip(found.entropies, expected.entropies, strict=True)]
    pairs += [*zip(found.log_probs, expected.log_probs, strict=True)]
    # Beyond the reach of sliding windows gradients are zero, exactly.
    return max(abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs)
