"""Muon for the layers' matrices: momentum, made orthogonal, in float32 and batched by shape.

torch.optim.Muon orthogonalises in bfloat16, one matrix at a time; on a processor without bfloat16 instructions that
takes as long as the training step itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al., "Muon: an optimizer for hidden layers", 2024


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """Matrices (n, a, b) with a <= b, singular values pushed towards one by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = stack / stack.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled to the size of an AdamW update; decoupled weight decay."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault((min(p.shape), max(p.shape)), []).append(p)
            for same in shapes.values():
                self._step(same, group["lr"], group["weight_decay"], group["momentum"])

    def _step(self, same: list[Tensor], rate: float, decay: float, momentum: float) -> None:
        updates = []
        for p in same:
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)  # type: ignore[arg-type]
            update = p.grad.lerp(buffer, momentum)  # type: ignore[union-attr]
            updates.append(update if p.shape[0] <= p.shape[1] else update.mT)
        scale = 0.2 * max(same[0].shape) ** 0.5
        for p, update in zip(same, orthogonal(torch.stack(updates)), strict=True):
            p.mul_(1 - rate * decay)
            p.add_(update if p.shape[0] <= p.shape[1] else update.mT, alpha=-rate * scale)
