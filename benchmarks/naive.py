"""The official algorithm as published, row after row: the engine's speed is compared with it.

One forward pass over prompt and response with a graph through everything, gradients with respect to all hidden states
and to the head, autograd through the T x V logits. Nothing more is kept than that needs: only the head's weight asks
for a gradient, through a leaf of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def naive_scores(model: Any, ids: torch.Tensor, prompt_length: int, semantic_token: int) -> tuple[float, float]:
    """SemGrad and ParaGrad (official variant) of one sequence [1, N] of prompt and response."""
    head = model.get_output_embeddings()
    weight = head.weight.detach().requires_grad_()
    handles = [
        head.register_forward_hook(lambda _, args, __: F.linear(args[0], weight)),
        model.get_input_embeddings().register_forward_hook(lambda *call: call[2].requires_grad_()),
    ]
    try:
        with torch.enable_grad():
            output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
            log_p = output.logits[0, prompt_length - 1 : -1].float().log_softmax(-1)
            entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
            log_probs = log_p.gather(1, ids[0, prompt_length:, None]).squeeze(1)
            loss = (entropies * log_probs).mean()
        states = output.hidden_states[:-1]
        paragradient, *gradients = torch.autograd.grad(loss, [weight, *states])
    finally:
        for handle in handles:
            handle.remove()
    upper = gradients[-(len(states) // 2) :]
    at_token = torch.stack([gradient[0, prompt_length + semantic_token] for gradient in upper])
    return float(at_token.float().abs().mean()), float(paragradient.abs().mean(dtype=torch.float32))
