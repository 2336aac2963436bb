"""What a GGUF file (llama.cpp's format) says of its model, and transformers leaves out.

transformers takes the numbers of its own table from a file and its classes' defaults for the rest. A model would then
load and be another one: Llama 3.1 with the frequencies of Llama 3, Phi-3 without its window. So the rest is filled in
here before the weights are read, and afterwards every number of the file must have its place in the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from semgrad_guard.errors import ModelNotFoundError, UnsupportedModelError, require_installed

READERS = ("gguf", "accelerate")
"""The packages with which transformers reads GGUF files."""

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
        UnsupportedModelError: there are such.
    """
    config: Any = model.config
    # No second copy of the embedding, and no blocks that guess further ahead.
    copies = (_ROPE_DIVISORS, "output.weight") if config.tie_word_embeddings else (_ROPE_DIVISORS,)
    held = 0
    for tensor in header.tensors:
        block = re.match(r"blk\.(\d+)", tensor.name)
        if tensor.name not in copies and (block is None or int(block[1]) < config.num_hidden_layers):
            held += int(tensor.n_elements)
    places = {id(value): value.numel() for value in model.state_dict(keep_vars=True).values()}
    if (surplus := held - sum(places.values())) > 0:
        raise UnsupportedModelError(
            f"{name!r} holds {surplus:,} numbers that transformers gives no place in {type(model).__name__}. The model "
            "would be another one. Load the folder with safetensors that the file was made from, or try a newer "
            "transformers."
        )


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (arrays of strings, such as the vocabulary, by their length) and tensors (gguf's `ReaderTensor`s)."""

    metadata: Mapping[str, Any]
    tensors: tuple[Any, ...] = ()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Every token that may end an answer: of the text, of a turn, of a message."""
        tokens = (self.number(f"tokenizer.ggml.{kind}_token_id", -1) for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(token for token in tokens if token >= 0))

    def number(self, key: str, default: int) -> int:
        """A whole number among the metadata."""
        value = self.metadata.get(key, default)
        return value if isinstance(value, int) else default


def read_header(path: Path) -> GgufHeader:
    """The header of a file that is there as a whole.

    Raises:
        MissingExtraError: the packages of the extra `gguf` are absent.
        ModelNotFoundError: the file is damaged, ends before its last tensor, or has another version of the format.
        UnsupportedModelError: a part of a split model, or no tokenizer inside.
    """
    require_installed(*READERS, extra="gguf")
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(path)
        strings = [GGUFValueType.ARRAY, GGUFValueType.STRING]
        metadata = {
            name: len(field.data) if field.types[:2] == strings else field.contents()
            for name, field in reader.fields.items()
        }
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise ModelNotFoundError(
            f"{str(path)!r} is cut off, damaged or no GGUF file: its header cannot be read ({error}). Download it "
            "again, to its end."
        ) from error
    header = GgufHeader(metadata, tuple(reader.tensors))
    if header.number("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{str(path)!r} is one part of a model that is split over several files, which transformers does not read. "
            f"Join them first: llama-gguf-split --merge {path.name} model.gguf, with the first part's name."
        )
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise UnsupportedModelError(
            f"{str(path)!r} holds no tokenizer. Convert the model again together with its tokenizer, or load the "
            "folder with safetensors that it was made from."
        )
    return header
