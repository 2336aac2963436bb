"""The identity of a model: a fingerprint of its weights, and the changes of it that are noticed without being told.

A guarded model belongs to its guard: its owner calls `refresh()` after a change. Noticed without that are switched,
added and merged adapters, weights edited in place or replaced, replaced modules, hooks, and a `forward` of one object's
own.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from semgrad_guard.engine.models.architecture import adapters_of
from semgrad_guard.records import OWN_CODE

_SAMPLES, _SHARED_BUFFER = 1024, 1 << 16
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""The tables of a module that hold the hooks of its forward pass."""
# transformers leaves hooks of this module on a model at its first `output_hidden_states=True`; they change no number,
# nor does the one of this name, which requires gradients.
_INERT_MODULE, _INERT_NAME = "transformers.utils.output_capturing", "make_inputs_require_grads"


class Identity:
    """What a model was when it was first met, and its fingerprint since."""

    def __init__(self, model: nn.Module) -> None:
        self._versions = {name: _version(weight) for name, weight in model.named_parameters()}
        self._config = _config_of(model)

    def fingerprint(self, model: nn.Module) -> str:
        """Sixteen hex digits: those of the weights, as long as the model is as it was loaded and has no adapter.

        Weights edited in place are read as a whole, for an edit of few numbers may escape a sample. A hook, or a method
        of one object's own, may read what nothing shows: then a mark follows that is never the same twice.
        """
        departures = {**_adapters(model), **_hooked(model)}
        if _config_of(model) != self._config:
            departures["config"] = _config_of(model)
        for name, weight in model.named_parameters():
            if _version(weight) != self._versions.get(name, 0) and weight.numel() >= 2 * _SAMPLES:
                values: Any = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                departures[f"weight {name}"] = hashlib.sha256(values).hexdigest()
        found = weight_fingerprint(model)
        if departures:
            listed = "\n".join(f"{place}={departures[place]}" for place in sorted(departures))
            found = hashlib.sha256(f"{found}\n{listed}".encode()).hexdigest()[:16]
        return f"{found}{OWN_CODE}{secrets.token_hex(8)}" if _hooked(model) else found


def state_of(model: nn.Module) -> tuple[Hashable, ...]:
    """All that a twin is made of: modules, hooks, weights and torch's counts of their edits, adapters that are on."""
    found: list[Hashable] = []
    for module in model.modules():
        found += [id(module), type(module), id(vars(module).get("forward"))]
        found += [None if weight is None else _place_of(weight) for weight in module._parameters.values()]
        shared = (buffer for buffer in module._buffers.values() if buffer is not None and not is_own(buffer))
        found += [_version(buffer) for buffer in shared]
        for table in HOOKS:
            found += [id(hook) for hook in getattr(module, table).values() if not is_inert(hook)]
        if is_adapted(module):
            found.append(repr(_adapter_state(module)))
    return tuple(found)


def is_own(buffer: torch.Tensor) -> bool:
    """Whether a twin has a copy of its own of this buffer, a small one: rotary frequencies are rewritten in passes."""
    return buffer.nbytes <= _SHARED_BUFFER


def is_inert(hook: object) -> bool:
    """Whether a forward hook changes no number of a forward pass."""
    return getattr(hook, "__module__", None) == _INERT_MODULE or getattr(hook, "__name__", "") == _INERT_NAME


def is_hooked(model: nn.Module) -> bool:
    """Whether hooks of the user's run in the model's passes."""
    return bool(_hooked(model))


def weight_fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits that change when the weights do: names, shapes and up to 1,024 values of every tensor.

    The values are read in float32, so that the same checkpoint loaded in bfloat16 and float32 agrees.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        sample = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // _SAMPLES)]
        sample = sample.to(torch.float32) if sample.dtype.is_floating_point else sample
        digest.update(sample.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put this in the place of a layer that it adapts."""
    return "_disable_adapters" in vars(module)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _place_of(weight: torch.Tensor) -> Hashable:
    """Where a weight's numbers lie, or which tensor it is where that is a wrapper of others; and how often edited."""
    try:
        return weight.data_ptr(), weight.dtype, tuple(weight.shape), _version(weight)
    except RuntimeError:
        return id(weight), _version(weight)


def _config_of(model: Any) -> str:
    """The configuration that passes read, without the kind of attention, whose kernels agree up to rounding."""
    config: Any = getattr(model, "config", None)
    text: str = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else repr(config)
    return "\n".join(
        line for line in text.splitlines() if "_attn_implementation" not in line and "use_cache" not in line
    )


def _hooked(model: nn.Module) -> dict[str, str]:
    """The hooks of each module, and a `forward` of its own, by name."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        hooks = [hook for table in HOOKS for hook in getattr(module, table).values() if not is_inert(hook)]
        own = vars(module).get("forward")
        code = [*hooks, *([own] if own is not None else [])]
        if code:
            names = [getattr(one, "__qualname__", type(one).__qualname__) for one in code]
            found[f"{path}: code"] = repr(names)
    return found


def _adapters(model: nn.Module) -> dict[str, str]:
    """The state of each adapted layer, and of several adapters the one in use."""
    layers = ((path, layer) for path, layer in model.named_modules() if is_adapted(layer))
    found = {f"{path}: adapters": repr(_adapter_state(layer)) for path, layer in layers}
    return {**found, "adapter": repr(getattr(model, "active_adapter", None))} if adapters_of(model) else found


def _adapter_state(layer: Any) -> tuple[bool, list[str], list[str], dict[str, float]]:
    scales: Mapping[str, Any] = getattr(layer, "scaling", {})
    known = {name: float(scale) for name, scale in scales.items() if isinstance(scale, (int, float))}
    return (
        bool(layer._disable_adapters),
        list(layer.active_adapters),
        list(getattr(layer, "merged_adapters", ())),
        known,
    )
