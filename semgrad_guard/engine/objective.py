"""What is differentiated: which layers at t*, and whether tokens are summed or averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from semgrad_guard.errors import EmptyLayerSpanError, InputError

Variant = Literal["paper", "official"]


@dataclass(frozen=True)
class Objective:
    """The differentiated quantity, sum_t w_t log p(y_t), and the hidden states it is differentiated by.

    `variant="paper"` sums over the response's tokens and takes layers floor(L/2)+1 .. L-1 (Eq. 4);
    `variant="official"` averages over the tokens and takes the last floor(L/2) of layers 0 .. L-1, as the paper's
    published code does. `layers` overrides the span: layer 0 is the embedding output, layer l the output of the
    l-th decoder layer; the final, normalised state (layer L) is never part of it.
    """

    variant: Variant = "paper"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.variant not in ("paper", "official"):
            raise InputError(f"variant must be 'paper' or 'official', not {self.variant!r}")

    @property
    def averages(self) -> bool:
        """Whether the tokens' terms are averaged (official) or summed (paper)."""
        return self.variant == "official"

    def span(self, n_layers: int) -> tuple[int, ...]:
        """The layers of a model with `n_layers` decoder layers, ascending.

        Raises:
            EmptyLayerSpanError: the span is empty for this depth (paper: L <= 2; official: L <= 1).
            InputError: `layers` holds a number outside 0 .. L-1.
        """
        if self.layers is not None:
            return self._explicit_span(n_layers)
        first = n_layers // 2 + 1 if self.variant == "paper" else n_layers - n_layers // 2
        if first >= n_layers:
            raise EmptyLayerSpanError(
                f"the {self.variant} variant has no hidden state to differentiate by in a model of {n_layers} decoder "
                f"layer(s); name the layers yourself, for example layers=({n_layers - 1},)"
            )
        return tuple(range(first, n_layers))

    def _explicit_span(self, n_layers: int) -> tuple[int, ...]:
        span = tuple(sorted(set(self.layers or ())))
        if not span:
            raise EmptyLayerSpanError(f"layers= names no layer of this model's {n_layers}")
        if span[0] < 0 or span[-1] >= n_layers:
            raise InputError(f"layers= must lie within 0 .. {n_layers - 1} for this model, not {span}")
        return span
