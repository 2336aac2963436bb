"""A transformers model on vLLM's own weights: every parameter is a view of them, so that scoring takes no second copy.

vLLM fuses the projections of queries, keys and values into one matrix, and those of gate and up into another; it may
pad the vocabulary. All else has the name and the shape that transformers gives it.

Why: docs/decisions.md#0165
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from semgrad_guard.errors import InputError, UnsupportedModelError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
"""`model_type` of the configurations whose layouts are known, and tested."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's matrices that hold several projections, one above the other."""


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
        wanted = dict(model.named_parameters(remove_duplicate=False))
        theirs = _taken_apart(dict(served.named_parameters(remove_duplicate=False)), wanted)
        for name, parameter in wanted.items():
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, _view(name, parameter, theirs))
        return model.eval()


def keep_weights() -> ExitStack:
    """Have vLLM keep a linear layer's weight next to the packed copy that a CPU computes with, until this is closed.

    On a CPU vLLM empties it after packing. (On CUDA nothing is packed: read in the code of vLLM 0.32, not run.)
    """
    utils, undo = library("vllm.model_executor.layers.utils"), ExitStack()
    dispatch: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm
    undo.callback(setattr, utils, "dispatch_cpu_unquantized_gemm", dispatch)
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: dispatch(layer, remove_weight=False)
    return undo


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


def _taken_apart(theirs: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """vLLM's weights by name, and the projections of those that are fused."""
    found = {name: weight.data for name, weight in theirs.items()}
    for name, weight in theirs.items():
        fused = next((fused for fused in FUSED if f".{fused}." in name), "")
        parts = [name.replace(fused, part) for part in FUSED.get(fused, ())]
        sizes = [len(wanted[part]) for part in parts if part in wanted]
        if sizes and sum(sizes) == len(weight):
            found.update(zip(parts, weight.data.split(sizes), strict=True))
    return found


def _view(name: str, wanted: torch.Tensor, theirs: Mapping[str, torch.Tensor]) -> nn.Parameter:
    """The part of vLLM's weights that is this parameter of the twin."""
    tied = ["model.embed_tokens.weight"] if name == "lm_head.weight" else []
    for whole in (theirs[one] for one in (name, *tied) if one in theirs):
        view = whole[: len(wanted)]  # a vocabulary may be padded at its end
        if view.shape == wanted.shape and (view.dtype == wanted.dtype or name.endswith("bias")):  # AMX: in float32
            return nn.Parameter(view.to(wanted.dtype), requires_grad=False)
    raise UnsupportedModelError(
        f"vLLM holds no {name} of shape {tuple(wanted.shape)} in {str(wanted.dtype).removeprefix('torch.')}: scoring "
        "inside vLLM takes weights that are neither quantized nor spread over processes (tensor_parallel_size=1)"
    )
