"""A transformers model on vLLM's own weights: every parameter is a view of them, so that scoring takes no second copy.

vLLM fuses the projections of queries, keys and values into one matrix, and those of gate and up into another; it may
pad the vocabulary. All else has the name and the shape that transformers gives it.

Why: docs/adr/0165-a-twin-on-vllms-weights.md
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from semgrad_guard.errors import InputError, UnsupportedModelError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
"""`model_type` of the configurations whose layouts are known, and tested."""

_FUSED = {
    "q_proj": ("qkv_proj", ()),
    "k_proj": ("qkv_proj", ("q_proj",)),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj")),
    "gate_proj": ("gate_up_proj", ()),
    "up_proj": ("gate_up_proj", ("gate_proj",)),
}
"""Which of vLLM's matrices holds a projection, and which others are above it there."""


def library(module: str = "vllm") -> Any:
    """A module of vLLM's.

    Raises:
        InputError: it is not installed, or does not load.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(f"vLLM does not load ({error}); docs/vllm.md says what to install") from error


def twin_of(served: nn.Module, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The transformers model of `config` on the weights of vLLM's `served` model.

    Raises:
        UnsupportedModelError: its layout is not known, or a weight of it is not there in full (quantized, packed,
            spread over processes).
    """
    if config.model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} is not scored inside vLLM; known are {', '.join(SUPPORTED)}. Serve "
            "it with vLLM alone, and score its answers with `semgrad-guard serve --upstream`"
        )
    with torch.inference_mode(False):
        with _parameters_on_meta():
            model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
        theirs = {name: weight.data for name, weight in served.named_parameters(remove_duplicate=False)}
        wanted = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in wanted.items():
            module, _, leaf = name.rpartition(".")
            view = nn.Parameter(_view(name, wanted, theirs, parameter.dtype), requires_grad=False)
            setattr(model.get_submodule(module), leaf, view)
        return model.eval()


def keep_weights() -> Callable[[], None]:
    """From now on vLLM keeps a linear layer's weight next to the packed copy that a CPU computes with; how to undo it.

    On a CPU vLLM empties it after packing. (On CUDA nothing is packed: read in the code of vLLM 0.32, not run.)
    """
    utils: Any = library("vllm.model_executor.layers.utils")
    dispatch: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def keeping(layer: nn.Module, remove_weight: bool) -> None:
        dispatch(layer, remove_weight=False)

    def undo() -> None:
        utils.dispatch_cpu_unquantized_gemm = dispatch

    utils.dispatch_cpu_unquantized_gemm = keeping
    return undo


def parts_of(fused: str) -> tuple[str, ...]:
    """The maps that one of vLLM's holds, in their order; none where it is not a fused one."""
    return tuple(part for part, (whole, _) in _FUSED.items() if whole == fused)


@contextmanager
def _parameters_on_meta() -> Generator[None]:
    """For the time of a block, new parameters keep no memory; buffers (rotary frequencies) are computed as usual."""
    register: Any = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _view(
    name: str, wanted: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The part of vLLM's weights that is this parameter of the twin."""
    for whole, first in _places(name, wanted, theirs):
        view = whole[first : first + len(wanted[name])]
        if view.shape == wanted[name].shape and view.dtype == dtype:
            return view
    raise UnsupportedModelError(
        f"vLLM holds no {name} of shape {tuple(wanted[name].shape)} in {str(dtype).removeprefix('torch.')}: scoring "
        "inside vLLM takes weights that are neither quantized nor spread over processes (tensor_parallel_size=1)"
    )


def _places(
    name: str, wanted: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, int]]:
    """Where it may be: a weight of vLLM's, and the first row."""
    if name in theirs:
        yield theirs[name], 0  # a vocabulary may be padded at its end
    for part, (fused, above) in _FUSED.items():
        there = name.replace(f".{part}.", f".{fused}.")
        if there != name and there in theirs:
            yield theirs[there], sum(len(wanted[name.replace(f".{part}.", f".{other}.")]) for other in above)
    if name == "lm_head.weight":
        yield theirs["model.embed_tokens.weight"], 0  # tied
