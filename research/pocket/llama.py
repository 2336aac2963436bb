"""The plain Llama that every pocket model is: an untied head, and norms whose scales stay at one."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def plain_llama(
    vocabulary: int, *, width: int, inner: int, layers: int, heads: int, groups: int, head: int, theta: float, seed: int
) -> LlamaForCausalLM:
    """Initialised from the seed. `groups`: key-value heads; `head`: a head's size; `theta`: the rotary base."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    model = LlamaForCausalLM(config)
    for p in model.parameters():
        p.requires_grad_(p.ndim == 2)
    return model
