"""The optimizers of the Llama's training: they change only the learnable blocks (`reader.memory`)."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from research.pocket.muon import Muon
from research.pocket.reader.memory import Free
from research.pocket.team import Team


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
            Muon([p for p in self.parameters if p is not head], lr=0.0, weight_decay=0.0),
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
