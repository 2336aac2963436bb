"""The optimizers of the Llama's training, which leave the reader's circuits as they are."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from semgrad_guard.pocket.muon import Muon
from semgrad_guard.pocket.reader.layout import LAYERS
from semgrad_guard.pocket.reader.to_llama import hold
from semgrad_guard.pocket.settings import Settings
from semgrad_guard.pocket.team import Team


class Optimizers:
    """Muon for the layers' matrices, AdamW for embeddings and head; what the reader has learnt moves more slowly."""

    def __init__(self, model: LlamaForCausalLM, settings: Settings) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        last = f"layers.{len(LAYERS)}."

        def group(share: float, *of: str) -> dict[str, Any]:
            return {"params": [p for n, p in named.items() if any(part in n for part in of)], "share": share}

        read = [f"layers.{number}." for number in range(len(LAYERS))]
        self.all = [
            Muon([group(settings.reader_rate, *read), group(1.0, last)], settings.rate, settings.decay),
            torch.optim.AdamW(
                [group(settings.reader_rate, "embed_tokens"), group(1.0, "lm_head")],
                lr=settings.rate,
                betas=(0.9, 0.98),
                weight_decay=0.0,
            ),
        ]
        masks = hold(model)
        self.free = [(p, masks[name].bool()) for name, p in named.items() if not masks[name].all()]

    def share(self, team: Team, scale: float = 1.0) -> None:
        """Add up the team's gradients, times `scale`."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        team.add(gradients)
        for gradient in gradients:
            gradient.mul_(scale)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for p, free in self.free:  # what is held must not weigh in the norm, nor in what Muon makes orthogonal
            if p.grad is not None:
                p.grad.mul_(free)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        before = [p.clone() for p, _ in self.free]
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("share", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for (p, free), kept in zip(self.free, before, strict=True):
            p.copy_(torch.where(free, p, kept))  # nor decay
