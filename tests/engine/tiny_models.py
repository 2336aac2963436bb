"""Real Hugging Face models, tiny and with random weights: one row per architecture, nothing downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 211
WINDOW = 6

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# name -> (model_type, what differs from _COMMON). Layer counts are odd and even on purpose.
ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": WINDOW, "num_hidden_layers": 5}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "layer_types": _MIXED_LAYERS,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "layer_types": _MIXED_LAYERS, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", {"num_hidden_layers": 5}),
    "phi": ("phi", {}),
    "olmo2": ("olmo2", {}),
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "num_hidden_layers": 5, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True},
    ),
    "gpt-neox": ("gpt_neox", {"num_hidden_layers": 5}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "tie_word_embeddings": True}),
    "cohere": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "granite": (
        "granite",
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
}
"""Attention-only architectures: all three tiers must be exact."""

STATEFUL: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"state_size": 4, "time_step_rank": 4, "intermediate_size": 64}),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "expand": 2,
            "chunk_size": 4,
            "intermediate_size": 64,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            **_EXPERTS,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 8}),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "llama4-chunked": (
        "llama4_text",
        {
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "moe_layers": [],
        },
    ),
    "recurrent-gemma": (
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    ),
}
"""Recurrent, convolutional, linear-attention or chunked layers: only the full replay is exact."""


LONG_ROPE: Mapping[str, Any] = {
    "original_max_position_embeddings": 20,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "rope_theta": 1e4,
    },
}
"""For phi3: rotary frequencies that change, in place, beyond 20 tokens."""


def build(
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    attention: str | None = None,
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """A model of its own, with weights of a size that makes attention and logits far from uniform."""
    model_type, differences = {**ARCHITECTURES, **STATEFUL}[name]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **differences, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # torch's grouped matrix product knows no float64
        experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in differences else {}
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **experts)
        spread_weights(model)
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def spread_weights(model: Any) -> None:
    """Replace the usual near-zero initialisation: matrices keep the size of their input, norms and biases vary."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        head: Any = model.get_output_embeddings()
        for parameter in head.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(2.5)


@cache
def shared(name: str) -> PreTrainedModel:
    """The float64 model of that name, built once per test run; for tests that only read it."""
    return build(name)


def token_ids(count: int, seed: int) -> list[int]:
    """Any tokens but the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
