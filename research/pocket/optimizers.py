"""The optimizers of the Llama's training: they change only the learnable blocks (`reader.memory`).

Muon, for the layers' matrices, is momentum made orthogonal, here in float32 and batched by shape. torch.optim.Muon
orthogonalises in bfloat16, one matrix at a time; on a processor without bfloat16 instructions that takes as long as
the training step itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from research.pocket.reader.memory import Free
from research.pocket.team import Team

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al., "Muon: an optimizer for hidden layers", 2024
MOMENTUM = 0.95


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """Matrices (n, a, b) with a <= b, singular values pushed towards one by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = stack / stack.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled to the size of an AdamW update."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault((min(p.shape), max(p.shape)), []).append(p)
            for same in shapes.values():
                self._step(same, group["lr"])

    def _step(self, same: list[Tensor], rate: float) -> None:
        updates = []
        for p in same:
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - MOMENTUM)  # type: ignore[arg-type]
            update = p.grad.lerp(buffer, MOMENTUM)  # type: ignore[union-attr]
            updates.append(update if p.shape[0] <= p.shape[1] else update.mT)
        scale = 0.2 * max(same[0].shape) ** 0.5
        for p, update in zip(same, orthogonal(torch.stack(updates)), strict=True):
            p.add_(update if p.shape[0] <= p.shape[1] else update.mT, alpha=-rate * scale)


class Optimizers:
    """Muon for the layers' matrices, AdamW for the head; neither decays weights it does not change.

    `blocks`: by name of a weight, its learnable block.
    """

    def __init__(self, model: LlamaForCausalLM, blocks: dict[str, Free]) -> None:
        weights = dict(model.named_parameters())
        self.blocks = [(weights[name], block) for name, block in blocks.items()]
        self.parameters = [weight for weight, _ in self.blocks]
        head = model.lm_head.weight
        self.all = [
            Muon([p for p in self.parameters if p is not head]),
            torch.optim.AdamW([head], lr=0.0, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def share(self, team: Team, scale: float = 1.0) -> None:
        """Add up the team's gradients, times `scale`."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        team.add(gradients)
        for gradient in gradients:
            gradient.mul_(scale)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for weight, block in self.blocks:  # held entries must not weigh in the norm, nor in Muon's orthogonal matrix
            if weight.grad is not None:
                weight.grad = block(weight.grad)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
