"""GGUF files as llama.cpp's converter writes them: a tiny model's tensors under its names, a tokenizer, a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Quantized = Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType]]

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>")
TOKENS = (*sorted(pre_tokenizers.ByteLevel.alphabet()), "in", "Ġa", *SPECIAL)
MERGES = ("i n", "Ġ a")
END = len(TOKENS) - 1

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random model of that architecture, in float32, with a vocabulary for `TOKENS`."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        architecture,
        **{
            **sizes,
            "num_key_value_heads": 2,
            "vocab_size": len(TOKENS),
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            **changes,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


def as_floats(name: str, weight: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    return weight, GGMLQuantizationType.F32


def quantized(kind: GGMLQuantizationType) -> Quantized:
    """Matrices in that type, vectors in float32, as llama.cpp has it."""

    def quantize(name: str, weight: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        return as_floats(name, weight) if weight.ndim == 1 else (quants.quantize(weight, kind), kind)

    return quantize


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    quantize: Quantized = as_floats,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    template: str | None = TEMPLATE,
    tokenizer: bool = True,
) -> Path:
    """The model as a GGUF file; `metadata` are further numbers or texts, `extra` further tensors."""
    config: Any = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer, template)
    rotated = {f"{config.model_type}.rope.dimension_count": config.hidden_size // config.num_attention_heads}
    adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in {**rotated, **(metadata or {})}.items():
        adders[type(value)](key, value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, kind = quantize(name, _permuted(config, name, weight.numpy()))
        writer.add_tensor(gguf_name(name), values, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _permuted(config: Any, name: str, weight: np.ndarray) -> np.ndarray:
    """Rotary pairs are adjacent in llama's queries and keys."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if config.model_type == "llama" and part in name:
            halves = weight.reshape(count, 2, -1, *weight.shape[1:])
            return halves.swapaxes(1, 2).reshape(weight.shape).copy()
    return weight


def _add_tokenizer(writer: GGUFWriter, template: str | None) -> None:
    special = [TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL for token in TOKENS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types(special)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(TOKENS.index("<|im_start|>"))
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_pad_token_id(TOKENS.index("<|im_end|>"))
    writer.add_eot_token_id(END)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
