"""The part of a GGUF file that transformers leaves out: sizes, windows, and how rotary positions are stretched.

transformers takes the numbers of its own table from a file and its classes' defaults for the rest. A model would then
load and be another one: Llama 3.1 with the frequencies of Llama 3, Phi-3 without its window. So the rest is filled in
here before the weights are read, and afterwards every number of the file must have its place in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from semgrad_guard.engine.models.gguf_header import GgufHeader
from semgrad_guard.errors import UnsupportedModelError

_STATED = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of a file, below its architecture's name, and the configuration's names for them."""

_BY_TRANSFORMERS = ("gpt-oss", "gemma4", "qwen35", "qwen35moe", "lfm2", "minimax-m2")
"""Architectures whose configuration is complete, or whose numbers mean something else."""

_ROPE_DIVISORS = "rope_freqs.weight"


def complete_config(config: Any, header: GgufHeader) -> None:
    """Complete a configuration that transformers made from a file, by the file's own metadata.

    Raises:
        UnsupportedModelError: rotary positions are stretched, or restricted to a part, in a way that is not known here.
    """
    architecture = header.metadata["general.architecture"]
    if architecture in _BY_TRANSFORMERS:
        return
    stated = {key.removeprefix(f"{architecture}."): value for key, value in header.metadata.items()}
    for key, name in _STATED.items():
        value = header.number(f"{architecture}.{key}", 0)
        if value > 0 and getattr(config, name, None) != value:
            setattr(config, name, value)
    if rope := getattr(config, "rope_parameters", None):
        # Where windows have rotary positions of their own, these stay as they are.
        rope = rope.get("full_attention", rope)
        rope["rope_theta"] = stated.get("rope.freq_base", rope["rope_theta"])
        _rotate_a_part(config, rope, stated)
        _stretch(rope, stated)


def _rotate_a_part(config: Any, rope: dict[str, Any], stated: Mapping[str, Any]) -> None:
    """How many numbers of a head are rotated."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = stated.get("rope.dimension_count", width)
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        raise UnsupportedModelError(
            f"this GGUF file rotates {rotated} of a head's {width} numbers, and transformers' {config.model_type} all; "
            "load the folder with safetensors that the file was made from"
        )


def _stretch(rope: dict[str, Any], stated: Mapping[str, Any]) -> None:
    """Contexts longer than those of the training."""
    kind = stated.get("rope.scaling.type", "linear")
    factor = stated.get("rope.scaling.factor", stated.get("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"this GGUF file stretches its rotary positions ({kind}) in a way that transformers does not read from it; "
            "load the folder with safetensors that the file was made from"
        )
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn" and (original := stated.get("rope.scaling.original_context_length")) is not None:
        rope["original_max_position_embeddings"] = original


def divide_frequencies(model: nn.Module, header: GgufHeader, path: Path) -> None:
    """Llama 3.1 and later: the file holds a divisor for every rotary frequency."""
    stored = next((tensor for tensor in header.tensors if tensor.name == _ROPE_DIVISORS), None)
    if stored is None or header.metadata["general.architecture"] in _BY_TRANSFORMERS:
        return
    from gguf import dequantize

    divisors = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if not frequencies or any(buffer.shape != divisors.shape for buffer in frequencies):
        raise UnsupportedModelError(
            f"{str(path)!r} divides {stored.n_elements} rotary frequencies ({_ROPE_DIVISORS}), which this architecture "
            "has not; load the folder with safetensors that the file was made from"
        )
    for buffer in frequencies:
        buffer.div_(divisors.to(buffer))


def require_all_read(model: nn.Module, header: GgufHeader, name: str) -> None:
    """Refuse a file that holds more numbers than the model that was made of it: something was left out.

    Raises:
        UnsupportedModelError: there are such; the message names one.
    """
    config: Any = model.config
    tensors = list(_of_the_model(header, int(config.num_hidden_layers), tied=bool(config.tie_word_embeddings)))
    places = {id(value): value.numel() for value in model.state_dict(keep_vars=True).values()}
    surplus = sum(tensor.n_elements for tensor in tensors) - sum(places.values())
    if surplus <= 0:
        return
    left, without = list(places.values()), []
    for tensor in tensors:
        size = tensor.n_elements
        left.remove(size) if size in left else without.append(tensor.name)
    raise UnsupportedModelError(
        f"{name!r} holds {surplus:,} numbers that transformers gives no place in {type(model).__name__} "
        f"(of {', '.join(without[:2]) or 'merged tensors'}, it seems). The model would be another one. "
        "Load the folder with safetensors that the file was made from, or try a newer transformers."
    )


def _of_the_model(header: GgufHeader, n_layers: int, *, tied: bool) -> Iterator[Any]:
    """The tensors that make up the causal LM: no second copy of the embedding, no blocks that guess further ahead."""
    for tensor in header.tensors:
        block = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "0"
        if tensor.name == _ROPE_DIVISORS or (tied and tensor.name == "output.weight") or int(block) >= n_layers:
            continue
        yield tensor
