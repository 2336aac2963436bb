"""A copy of a model that shares every weight and nothing else, so that the user's model is never touched."""

from __future__ import annotations

import copy
from collections.abc import Hashable

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


# transformers leaves these on a model at its first `output_hidden_states=True`; they do nothing of themselves.
_INERT_HOOKS = "transformers.utils.output_capturing"

# Some rotary embeddings rewrite their frequencies in place on every forward pass: two threads must not share those.
_OWN_BUFFER_BYTES = 1 << 16


def weight_sharing_copy(model: nn.Module) -> nn.Module:
    """A structural copy in evaluation mode: shared weights, no parameter requiring a gradient, own hook tables.

    The user's forward hooks are kept (a steered model is scored as it answers); backward hooks are dropped. Adding
    hooks to the copy, replacing its modules or switching its mode leaves the original as it was.
    """
    return _copy(model, {}, {})


def fingerprint(model: nn.Module) -> Hashable:
    """What must be unchanged for a copy to stay valid: storages, dtypes, gradient flags and hooks."""
    tensors = tuple((p.data_ptr(), p.dtype, p.device, p.requires_grad) for p in model.parameters())
    hooks = tuple(
        (index, name, identity)
        for index, module in enumerate(model.modules())
        for name in _HOOKS
        for identity, hook in (getattr(module, name, None) or {}).items()
        if getattr(hook, "__module__", None) != _INERT_HOOKS
    )
    return tensors, hooks


def edits(model: nn.Module) -> int:
    """A number that grows with every edit of weights in place (by training, say): copies follow, caches do not."""
    return sum(0 if p.is_inference() else p._version for p in model.parameters())


def _copy(module: nn.Module, done: dict[int, nn.Module], parameters: dict[int, nn.Parameter]) -> nn.Module:
    """`done` and `parameters` map originals to copies: what is used in two places stays one."""
    if id(module) in done:
        return done[id(module)]
    twin = copy.copy(module)
    done[id(module)] = twin
    state = vars(twin)
    state["training"] = False
    state["_parameters"] = {name: _detached(p, parameters) for name, p in module._parameters.items()}
    state["_buffers"] = {name: _own(module, name, b) for name, b in module._buffers.items()}
    state["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    state.pop("forward", None)  # a compiled or wrapped method is bound to the original
    for name in _HOOKS:
        state[name] = copy.copy(state[name])
    for name in ("_backward_hooks", "_backward_pre_hooks"):
        state[name] = type(state[name])()
    state["_modules"] = {
        name: None if child is None else _copy(child, done, parameters) for name, child in module._modules.items()
    }
    return twin


def _own(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
    """Small scratch buffers are copied; what a checkpoint holds (quantized weights, say) is shared."""
    if buffer is None or name not in module._non_persistent_buffers_set or buffer.nbytes > _OWN_BUFFER_BYTES:
        return buffer
    return buffer.detach().clone()


def _detached(parameter: nn.Parameter | None, done: dict[int, nn.Parameter]) -> nn.Parameter | None:
    if parameter is None or not parameter.requires_grad:
        return parameter
    return done.setdefault(id(parameter), nn.Parameter(parameter.detach(), requires_grad=False))
