"""A tiny random model of every causal-LM architecture that the installed transformers knows: without a list of them.

A config class tells its own settings; what is a size there is made small by its name (`SIZES`). Only where settings
depend on each other in a way that no name tells, `DIFFERENCES` describes it, by the type of model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 211
MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS = 4

SIZES: Mapping[int, tuple[str, ...]] = {
    VOCABULARY: ("vocab_size", "audio_vocab_size", "decoder_vocab_size", "unpadded_vocab_size"),
    128: ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions", "prompt_length"),
    64: ("vocab_size_per_layer_input", "max_source_positions", "encoder_hash_byte_group_vocab"),
    48: (
        *("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dim_ff", "dff"),
        *("intermediate_size_mlp", "dense_intermediate_size", "d_inner", "mlp_dim", "expert_ffn_hidden_size"),
    ),
    32: (
        *("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim", "dim", "embed_dim"),
        *("hidden_size_global", "attention_hidden_size", "mamba_d_ssm", "lru_width", "out_hidden_size", "hc_lowrank"),
        *("vision_output_dim", "output_channels", "adapter_out_dim", "adapter_in_dim", "backbone_hidden_size"),
        *("projector_input_dim", "projector_output_dim", "adapter_input_size", "output_proj_dims", "mm_embed_dim"),
        *("audio_embed_dim", "ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"),
        *("input_size", "downsample_hidden_size", "base_channels", "prompt_mid_dim", "ple_embed_dim"),
        *("image_size", "crop_size", "num_centroids"),
    ),
    24: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size"),
        *("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    ),
    16: (
        *("q_lora_rank", "kv_lora_rank", "index_topk", "sliding_window", "sliding_window_size", "local_attention"),
        *(
            "attention_window_size",
            "attention_chunk_size",
            "window_size",
            "num_buckets",
            "time_step_rank",
            "ngram_size",
        ),
        *("relative_max_distance", "o_lora_rank", "keep_window_size", "block_size", "laurel_rank", "rel_extent"),
        *("local_attention_window_len", "mamba_dt_rank", "kv_channels", "patch_size", "index_topk_blocks"),
        *("position_bias_num_buckets", "num_mel_bins", "feature_size", "input_feat_size", "block_multiple_of"),
        *("attn_module_chunk", "codebook_size", "hidden_size_per_layer_input", "num_position_embeddings"),
    ),
    8: (
        *("head_dim", "v_head_dim", "qk_nope_head_dim", "index_head_dim", "linear_key_head_dim", "linear_head_dim"),
        *("linear_value_head_dim", "dim_head", "state_size", "mamba_d_state", "ssm_state_size", "mamba_d_head"),
        *("mamba_head_dim", "swa_head_dim", "d_kv", "attention_head_size", "chunk_size", "mamba_chunk_size", "d_rel"),
        *("global_head_dim", "swa_v_head_dim", "rotary_dim", "index_block_size", "floor_scale", "embed_dim_head"),
    ),
    4: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth"),
        *("num_encoder_layers", "num_decoder_layers", "conf_num_hidden_layers", "num_global_layers", "num_blocks"),
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"),
        *("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "index_n_heads"),
        *("swa_num_attention_heads", "linear_num_heads", "linear_num_value_heads", "qk_rope_head_dim"),
        *("conf_num_attention_heads", "mamba_n_heads", "num_experts", "n_routed_experts", "num_local_experts"),
        *("moe_num_experts", "mamba_num_heads", "n_mamba_heads", "gated_norm_rank", "adapter_rank", "hc_mult"),
        *("zero_expert_num", "global_attn_every_n_layers", "num_random_blocks_", "max_num_tiles"),
    ),
    2: (
        *("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "linear_num_key_heads"),
        *("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "num_layers_per_stack"),
        *("num_global_key_value_heads", "hc_count", "heads_per_ngram", "o_groups", "num_codebooks"),
    ),
    1: ("n_group", "topk_group", "n_groups", "mamba_n_groups", "first_k_dense_replace", "num_dense_layers"),
}
_SIZE_OF = {name: size for size, names in SIZES.items() for name in names}

_MLA = {"num_key_value_heads": 4}
_MAMBA_HEADS = {"mamba_n_heads": 8}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Above the layers that keep keys of their own, what a token passes on to later ones ends, and with it every gradient.
_SHARED_KEYS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 1,
}
_GEMMA_3N = {**_SHARED_KEYS, "activation_sparsity_pattern": [0.95, *[0.0] * 5]}
_GEMMA_4 = {"vocab_size_per_layer_input": VOCABULARY, **_SHARED_KEYS}
_STUDENT = {
    "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
}
_DOTS_3 = {"layer_types": ["indexed_attention", "sliding_attention"] * 2, "num_key_value_heads": 4}
_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"] * 2}
_NEAR_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_INKLING = {"layer_types": ["hybrid_sliding", "hybrid"] * 2}
_QWEN_4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}

DIFFERENCES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": _LINEAR_AND_FULL,
    "bamba": {**_MAMBA_HEADS, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [2, 1, 1]}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 2.0}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"text_config": _DOTS_3, "vision_config": {"pyramid_num_routed": [-1, -1, 2, 2]}},
    "dots3_note_text": _DOTS_3,
    "gemma3": {"text_config": _NEAR_AND_FULL},
    "gemma3_text": _NEAR_AND_FULL,
    "gemma3n": {"text_config": _GEMMA_3N},
    "gemma3n_text": _GEMMA_3N,
    "gemma4": {"text_config": _GEMMA_4},
    "gemma4_text": _GEMMA_4,
    "gemma4_assistant": _STUDENT,
    "gemma4_unified_assistant": _STUDENT,
    # attention last: an mlp, the default's last layer, passes nothing on from token to token
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "mlp", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_MAMBA_HEADS, "layer_types": ["mamba", "attention"] * 2},
    "inkling2_loop_text": _INKLING,
    "inkling2_text": _INKLING,
    "inkling_text": _INKLING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR_AND_FULL,
    "kolibri1": _NEAR_AND_FULL,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 16},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8},
    # a layer that looks at pictures, and none where there is only text
    "mllama": {"text_config": {"num_hidden_layers": 5, "cross_attention_layers": [1]}},
    "minicpm3": {"dim_model_base": 24},
    "qwen4_exp": {"text_config": _QWEN_4},
    "qwen4_exp_text": _QWEN_4,
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "lsh"] * 2,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "hash_seed": 0,
        "feed_forward_size": 48,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the names of a config's settings do not tell: how one depends on another."""

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


VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "falcon, 40B's layers": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "granitemoehybrid, attention only": ("granitemoehybrid", {"layer_types": ["attention"] * 4}),
    "gemma2, deeper": ("gemma2", {"num_hidden_layers": 7}),
    "bert, both directions": ("bert", {"is_decoder": False}),
    "llama, dynamic positions": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}},
    ),
    "phi3, long positions": ("phi3", LONG_ROPE),
    "qwen3, with a window": ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}),
    "mixtral, tied": ("mixtral", {"tie_word_embeddings": True}),
}
"""Settings of an architecture that make its code take another path."""


SINCE = {"gemma3n_text": "5.21"}
"""The release of transformers from which on a tiny model of this kind runs by itself."""


def require_known(name: str) -> None:
    """Skip a test of an architecture that the installed transformers does not know, or not well enough."""
    kind = name.partition(",")[0]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or Version(transformers.__version__) < Version(
        SINCE.get(kind, "0")
    ):
        pytest.skip(f"transformers {transformers.__version__} has no {name} that runs")


def tiny_config(name: str) -> PreTrainedConfig:
    """A config of that type, or variant, whose model has some ten thousand weights."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    return tiny(CONFIG_MAPPING[model_type], {**DIFFERENCES.get(model_type, {}), **changes})


def tiny(kind: type[PreTrainedConfig], differences: Mapping[str, Any]) -> PreTrainedConfig:
    """A config of that class with small sizes, but for what differs."""
    names = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "args", "kwargs")]
    aliases = {own: common for common, own in kind.attribute_map.items()}
    settings: dict[str, Any] = {}
    for name in names:
        size = _SIZE_OF.get(name, _SIZE_OF.get(aliases.get(name, "")))
        if size is not None:
            settings[name] = size
        elif name.endswith(("_token_id", "_token_index")):
            settings[name] = 0
        elif name == "is_decoder":
            settings[name] = True
    if "kv_lora_rank" in names:
        settings |= _MLA
    for name, sub in _parts(kind).items():
        settings[name] = tiny(sub, differences.get(name, {}))
    return kind(**{**settings, **{name: value for name, value in differences.items() if name not in kind.sub_configs}})


def _parts(kind: type[PreTrainedConfig]) -> Mapping[str, type[PreTrainedConfig]]:
    """The kinds of a config's parts; where any is allowed, that of the default."""
    if AutoConfig not in kind.sub_configs.values():
        return kind.sub_configs
    defaults = {name: spec.model_type for name, spec in kind.sub_configs_defaults.items() if spec.model_type}
    return {name: CONFIG_MAPPING[model_type] for name, model_type in defaults.items()}


def build(name: str, *, seed: int = 0) -> PreTrainedModel:
    """A model of that type, or variant, in float32, whose weights make attention and logits far from uniform."""
    config = tiny_config(name)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if not isinstance(config, kind.config_class):  # of the whole of which the class is a part
        config = next((part for part in vars(config).values() if isinstance(part, kind.config_class)), config)
    _without_timm(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = kind._from_config(config, dtype=torch.float32)
        spread_weights(model)
    return model.eval()


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


def _without_timm(config: Any) -> None:
    """Another tower for pictures where transformers would take one from a library that is not installed."""
    vision = getattr(config, "vision_config", None)
    towers = AutoModel._model_mapping
    if type(vision) in towers and towers[type(vision)].__name__ == "TimmWrapperModel":
        tower: Any = tiny(CONFIG_MAPPING["siglip_vision_model"], {})
        for name in ("vocab_size", "vocab_offset", "rms_norm_eps"):
            setattr(tower, name, getattr(vision, name))
        vars(config)["vision_config"] = tower  # past the check of its type
