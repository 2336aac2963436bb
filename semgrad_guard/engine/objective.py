"""The objective: which tokens' likelihood is differentiated by which hidden states, and how that becomes a number.

The likelihood is read off the output head through a `LogitTransform`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from semgrad_guard.declared import require_valid
from semgrad_guard.errors import EmptyLayerSpanError, InputError
from semgrad_guard.settings import Variant

if TYPE_CHECKING:
    import torch

Norm = Literal["l1", "l2"]


@dataclass(frozen=True)
class Objective:
    """The differentiated quantity, sum_t w_t log p(y_t), and the hidden states it is differentiated by.

    `variant="paper"` sums over the response's tokens and takes layers floor(L/2)+1 .. L-1 (Eq. 4);
    `variant="official"` averages over the tokens and takes the last floor(L/2) of layers 0 .. L-1, as the paper's
    published code does. `layers` overrides the span: layer 0 is the embedding output, layer l the output of the
    l-th decoder layer; the final, normalised state (layer L) is never part of it.

    `norm` makes a number of a gradient g of n entries: "l1" its mean absolute value, ||g||_1 / n, "l2" its root mean
    square, ||g||_2 / sqrt(n). (The paper's Table 2 replaces the norm and does not give the divisor; for one
    model every choice ranks answers alike, and this one stays on the scale of "l1", on which HybridGrad's mixture
    depends.) `weighted=False` sets w_t = 1. `token` takes another prompt token than t*, counted from the prompt's end
    (-1 is its last). `last_tokens` is how many of the prompt's last tokens `GradientScores.grid` covers; by default
    it begins at the differentiated token, which costs nothing.

    With `gradients=False` nothing is differentiated: the answer is only observed (`Evidence.observed`), and its
    generation keeps no more than that takes.
    """

    variant: Variant = "paper"
    layers: tuple[int, ...] | None = None
    _: KW_ONLY
    norm: Norm = "l1"
    weighted: bool = True
    token: int | None = None
    last_tokens: int | None = None
    gradients: bool = True

    def __post_init__(self) -> None:
        require_valid(self)
        if self.token is not None and self.token >= 0:
            raise InputError(f"token counts from the prompt's end, -1 being its last token; it is {self.token}")
        if self.last_tokens is not None and self.last_tokens < 1:
            raise InputError(f"last_tokens must be at least 1, not {self.last_tokens}")

    @property
    def averages(self) -> bool:
        """Whether the tokens' terms are averaged (official) or summed (paper)."""
        return self.variant == "official"

    def positions(self, semantic_token: int, length: int) -> tuple[int, int]:
        """The differentiated token and the grid's first, from the end of a prompt of `length` tokens with this t*.

        A grid that would reach beyond the prompt begins with it.

        Raises:
            InputError: `token` lies outside the prompt.
        """
        token = semantic_token if self.token is None else self.token
        if token < -length:
            raise InputError(f"token={token} lies outside a prompt of {length} tokens: use -{length} .. -1")
        return token, token if self.last_tokens is None else -min(self.last_tokens, length)

    def span(self, n_layers: int) -> tuple[int, ...]:
        """The layers of a model with `n_layers` decoder layers, ascending.

        Raises:
            EmptyLayerSpanError: the span is empty for this depth (paper: L <= 2; official: L <= 1).
            InputError: `layers` holds a number outside 0 .. L-1.
        """
        if self.layers is not None:
            span = tuple(sorted(set(self.layers)))
            if not span:
                raise EmptyLayerSpanError(f"layers= names no layer of this model's {n_layers}")
            if span[0] < 0 or span[-1] >= n_layers:
                raise InputError(f"layers= must lie within 0 .. {n_layers - 1} for this model, not {span}")
            return span
        first = n_layers // 2 + 1 if self.variant == "paper" else n_layers - n_layers // 2
        if first >= n_layers:
            raise EmptyLayerSpanError(
                f"the {self.variant} variant has no hidden state to differentiate by in a model of {n_layers} decoder "
                f"layer(s); name the layers yourself, for example layers=({n_layers - 1},)"
            )
        return tuple(range(first, n_layers))


@dataclass(frozen=True)
class LogitTransform:
    """logits = softcap(scale * z) for z = H W^T + b: the elementwise step between head and softmax.

    Gemma 2 caps (`final_logit_softcapping`), Cohere multiplies (`logit_scale`), Granite divides (`logits_scaling`).
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else (z / self.softcap).tanh() * self.softcap

    def derivative(self, logits: torch.Tensor) -> torch.Tensor | float:
        """d logits / d z, from the logits: same shape, or a plain factor where it is constant."""
        if self.softcap is None:
            return self.scale
        return (1 - (logits / self.softcap).square()) * self.scale
