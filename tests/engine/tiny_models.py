"""Tiny models with random weights for tests that look closely: one row per architecture, nothing downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from .generated_models import DIFFERENCES, spread_weights, tiny
from .generated_models import LONG_ROPE as LONG_ROPE
from .generated_models import VOCABULARY as VOCABULARY

WINDOW = 6

_COMMON: dict[str, Any] = {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# name -> (model_type, what differs from _COMMON and the sizes of every tiny model). Layer counts are odd and even.
ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": WINDOW, "num_hidden_layers": 5}),
    "mixtral": ("mixtral", {"num_hidden_layers": 3}),
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
    "phi3": ("phi3", {"num_hidden_layers": 5, "sliding_window": None, "head_dim": 8}),
    "phi": ("phi", {}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "gpt-neox": ("gpt_neox", {"num_hidden_layers": 5}),
    "opt": ("opt", {"tie_word_embeddings": True}),
    "cohere": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "granite": (
        "granite",
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
}
"""Attention-only architectures, which are replayed as rows."""

STATEFUL: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "falcon-h1": ("falcon_h1", {}),
    "qwen3-next": ("qwen3_next", {}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "jamba": ("jamba", {}),
    "llama4-chunked": ("llama4_text", {"attention_chunk_size": 8, "moe_layers": []}),
    "recurrent-gemma": ("recurrent_gemma", {}),
}
"""Recurrent, convolutional, linear-attention or chunked layers: never rows."""


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
    known = DIFFERENCES.get(model_type, {})
    config = tiny(CONFIG_MAPPING[model_type], {**known, **_COMMON, **differences, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # torch's grouped matrix product knows no float64
        experts = {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **experts)
        spread_weights(model)
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


@cache
def shared(name: str) -> PreTrainedModel:
    """The float64 model of that name, built once per test run; for tests that only read it."""
    return build(name)


def token_ids(count: int, seed: int) -> list[int]:
    """Any tokens but the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
