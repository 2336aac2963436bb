"""The identity of a model: its weights, and all that its owner has changed in it, the same in every process.

Two records are compared. The attributes, buffers, configuration and code that a model had when it was first met are its
own; a later difference is a departure. Adapters that are switched off, merged or scaled anew always are departures, for
no checkpoint brings them. Code that cannot be compared (see `own_code`) makes every identity another one.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from semgrad_guard.engine.models.architecture import adapters_of
from semgrad_guard.engine.replay.model_state import NO_MATTER, Snapshot, version_of
from semgrad_guard.engine.replay.own_code import (
    ATOMS,
    HOOKS,
    LIBRARIES,
    Code,
    attributes_of,
    innermost,
    is_container,
    is_holder,
    package_of,
)
from semgrad_guard.records import OWN_CODE

# Left behind by a model's own passes, or of no effect on one in evaluation mode.
_TRANSIENT = NO_MATTER | {
    "_parameters",
    "_buffers",
    "_modules",
    "rope_deltas",
    "recurrent_states",
    "conv1d_state",
    "layers_are_rescaled",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "generation_config",
    "_is_hf_initialized",
    "_require_grads_hook",
    "_require_grads_hooks",
    "_hf_peft_config_loaded",
    "peft_config",
    "active_adapter",
}
# Of a configuration: settings that no pass reads, and the kind of attention, whose kernels agree up to rounding.
_CONFIG_TRANSIENT = frozenset({"use_cache", "return_dict", "dtype", "torch_dtype", "architectures", "problem_type"})
_CONFIG_ENDS = ("_token_id", "_token_ids", "2label", "2id", "_version")
_LENGTH_ROPE = ("dynamic", "longrope")  # kinds whose frequencies follow the length of the last sequence:
_OF_LENGTH = ("inv_freq", "max_seq_len_cached", "attention_scaling")
_ADAPTED = ("base_layer", "original_module")  # the modules that PEFT has put an adapter around


@dataclass(frozen=True)
class _Conduct:
    """`ordinary` counts where it differs from before, `extra` always; both from a place in the model to its digest."""

    ordinary: Mapping[str, str]
    extra: Mapping[str, str]
    versions: Mapping[str, tuple[weakref.ref[torch.Tensor], int]]
    code: Code


_firsts: weakref.WeakKeyDictionary[nn.Module, _Conduct] = weakref.WeakKeyDictionary()
_firsts_lock = threading.Lock()


def remember_first(model: nn.Module) -> None:
    """Note the conduct of a model that was not met before."""
    with _firsts_lock:
        if model not in _firsts:
            _firsts[model] = _conduct_of(model)


def uncertain_code(snapshot: Snapshot, model: nn.Module) -> str | None:
    """The reason, in words, why a change of the model could stay unseen; None where it could not."""
    first = _firsts.get(model)
    replaced = None if first is None else snapshot.code.replaced_since(first.code)
    return snapshot.own_code or snapshot.code.unseen or (f"{replaced} was replaced" if replaced else None)


def fingerprint_of(model: nn.Module, *, comparable: bool = True) -> str:
    """Sixteen hex digits for the model as it is: those of its weights, as long as it behaves as at first.

    Where its code is not `comparable`, a mark follows that is never the same twice.
    """
    now, first = _conduct_of(model), _firsts[model]
    changed = {place: digest for place, digest in now.ordinary.items() if first.ordinary.get(place) != digest}
    gone = dict.fromkeys(first.ordinary.keys() - now.ordinary.keys(), "gone")
    departures = {**changed, **gone, **now.extra, **_edited(model, first)}
    found = weight_fingerprint(model)
    if departures:
        listed = "\n".join(f"{place}={departures[place]}" for place in sorted(departures))
        found = hashlib.sha256(f"{found}\n{listed}".encode()).hexdigest()[:16]
    return found if comparable else f"{found}{OWN_CODE}{secrets.token_hex(8)}"


def _edited(model: nn.Module, first: _Conduct) -> dict[str, str]:
    """Weights edited in place, all their numbers read: an edit of few may escape a sample."""
    found = dict[str, str]()
    for name, parameter in model.named_parameters():
        known, version = first.versions.get(name, (None, 0))
        leaves_out = parameter.numel() >= 2 * _SAMPLES  # `sampled_bytes` of it
        if leaves_out and known is not None and known() is parameter and version_of(parameter) != version:
            values: Any = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            found[f"weight {name}"] = hashlib.sha256(values).hexdigest()
    return found


def _conduct_of(model: nn.Module) -> _Conduct:
    ordinary, extra = dict[str, str](), dict[str, str]()
    modules, adapters = list(_modules(model, "", set())), adapters_of(model)
    paths = {id(module): path for path, module in modules}
    for path, module in modules:
        if is_adapted(module):
            extra.update(_switched(path, module, adapters))
        elif package_of(type(module)) != "peft":  # whose own modules count their adapters, and have weights
            ordinary[f"{path}: class"] = _name(type(module))
            # Its attributes and buffers that its own passes do not change, methods aside.
            rotates = any(kind in str(getattr(module, "rope_type", None)) for kind in _LENGTH_ROPE)
            for name, value in (*vars(module).items(), *module._buffers.items()):
                computed = rotates and name.endswith(_OF_LENGTH) and "original" not in name
                ignored = name in _TRANSIENT or name in HOOKS or callable(getattr(type(module), name, None))
                if not computed and not ignored:
                    ordinary[f"{path}.{name}"] = _digest(value, paths)
    code = Code(model.modules())
    ordinary.update({place: _digest(value, paths) for place, value in code.settings()})
    if len(adapters) > 1:
        extra["adapter"] = repr(getattr(model, "active_adapter", None))
    versions: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {
        name: (weakref.ref(weight), version_of(weight)) for name, weight in model.named_parameters()
    }
    return _Conduct(ordinary, extra, versions, code)


def _switched(path: str, layer: Any, adapters: Mapping[str, Any]) -> dict[str, str]:
    """An adapter as its folder brings it is ordinary: the only one, on, not merged, at its own scale."""
    active, merged = list(layer.active_adapters), list(getattr(layer, "merged_adapters", ()))
    scales = {name: scale for name in active if (scale := _own_scale(layer, name, adapters)) is not None}
    if len(adapters) == 1 and not (layer._disable_adapters or merged or scales):
        return {}
    return {f"{path}: adapters": repr((bool(layer._disable_adapters), active, merged, scales))}


def _digest(value: Any, paths: Mapping[int, str]) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(value, paths, {}):
        digest.update(piece)
        digest.update(b";")
    return digest.hexdigest()[:16]


def _pieces(value: Any, paths: Mapping[int, str], seen: dict[int, int]) -> Iterator[bytes]:
    """A value and its parts, without addresses: a value that is met again is named by its place."""
    value = innermost(value)
    if type(value) in ATOMS:
        yield repr(value).encode()
    elif id(value) in seen:
        yield b"%d" % seen[id(value)]
    elif id(value) in paths:
        yield paths[id(value)].encode()
    else:
        seen[id(value)] = len(seen)
        yield _name(type(value)).encode()
        if isinstance(value, torch.Tensor):
            yield repr(tuple(value.shape)).encode() + sampled_bytes(value)
        elif isinstance(value, (type, FunctionType)):
            yield _name(value).encode()
        elif isinstance(value, (set, frozenset)) and is_container(value):
            yield from sorted(b"".join(_pieces(part, paths, {})) for part in value)
        for part in _parts(value):
            yield from _pieces(part, paths, seen)


def _parts(value: Any) -> list[Any]:
    """The values that a value holds, in an order that is the same in every process; keys before values."""
    if isinstance(value, nn.Module):
        return [part for named in (*value.named_parameters(), *value.named_buffers()) for part in named]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, value.keywords]
    if isinstance(value, dict) and is_container(value):
        named = {repr(key) if type(key) in ATOMS else _name(type(key)): part for key, part in value.items()}
        return [part for name in sorted(named) for part in (name, named[name])]
    if is_container(value):
        return [] if isinstance(value, (set, frozenset)) else list(value)
    if not is_holder(value):
        return []
    held = dict(attributes_of(value))
    if hasattr(value, "to_diff_dict"):
        held = {
            name: part
            for name, part in held.items()
            if not (name.startswith("_") or name in _CONFIG_TRANSIENT or name.endswith(_CONFIG_ENDS))
        }
    elif package_of(type(value)) in LIBRARIES:  # a kernel's own state, which its passes change
        return []
    return [part for name in sorted(held) for part in (name, held[name])]


def _modules(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules, each once. A compiled module counts as its original, and a layer with an adapter has the path
    of the layer that it adapts, whose conduct is the same with and without it."""
    compiled = module._modules.get("_orig_mod")
    if compiled is not None:
        yield from _modules(compiled, path, seen)
    elif id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is None or (is_adapted(module) and name not in _ADAPTED):
                continue
            place = path if is_adapted(module) else f"{path}.{name}" if path else name
            yield from _modules(child, place, seen)


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put this in the place of a layer that it adapts."""
    return "_disable_adapters" in vars(module) and package_of(type(module)) == "peft"


def _own_scale(layer: Any, adapter: str, adapters: Mapping[str, Any]) -> float | None:
    """The factor of an adapter, where it is not the one that its configuration gives.

    Only LoRA's formula is known here; of any other kind of adapter the factor always counts.
    """
    scale, rank, alpha = (getattr(layer, name, {}).get(adapter) for name in ("scaling", "r", "lora_alpha"))
    if scale is None or not rank:
        return None
    divisor = math.sqrt(rank) if getattr(adapters.get(adapter), "use_rslora", False) else rank
    return None if alpha is not None and scale == alpha / divisor else float(scale)


def _name(thing: type | FunctionType) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


_SAMPLES = 1024


def weight_fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits that change when the weights do: names, shapes and up to 1,024 values of every tensor.

    The values are read in float32, so that the same checkpoint loaded in bfloat16 and float32 agrees, and under the
    names that they have in a model that is not compiled.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name.replace('_orig_mod.', '')}{tuple(parameter.shape)}".encode())
        digest.update(sampled_bytes(parameter))
    return digest.hexdigest()[:16]


def sampled_bytes(tensor: torch.Tensor) -> bytes:
    """Up to some 1,024 of a tensor's values; floating-point numbers in float32."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLES)]
    if sample.dtype.is_floating_point:
        sample = sample.to(torch.float32)
    return sample.cpu().contiguous().numpy().tobytes()
