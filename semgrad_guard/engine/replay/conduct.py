"""What a model does beyond its weights, in words that are the same in every process: a calibration is bound to it.

Two notes are compared. What a model was like when it was first met is its ordinary conduct, and is not named; what has
become of it since is a departure. Some things are departures whenever they are met, because no checkpoint brings them:
hooks, patched methods, adapters that are switched off or merged.
"""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import unwrap
from operator import itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from semgrad_guard.engine.models.fingerprint import is_sampled, sampled_bytes, weight_fingerprint, whole_digest
from semgrad_guard.engine.replay.held_values import (
    ATOMS,
    LIBRARIES,
    attributes_of,
    held_by,
    innermost,
    is_container,
    is_holder,
    names_in,
    package_of,
)
from semgrad_guard.engine.replay.model_state import HOOKS, NO_MATTER, is_inert
from semgrad_guard.engine.replay.watching import version_of

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
# Of a configuration: what no forward pass reads, and the kind of attention, whose kernels agree up to rounding.
_CONFIG_TRANSIENT = frozenset({"use_cache", "return_dict", "dtype", "torch_dtype", "architectures", "problem_type"})
_CONFIG_ENDS = ("_token_id", "_token_ids", "2label", "2id", "_version")
_LENGTH_ROPE = ("dynamic", "longrope")  # kinds whose frequencies follow the length of the last sequence:
_OF_LENGTH = ("inv_freq", "max_seq_len_cached", "attention_scaling")
_ADAPTED = ("base_layer", "original_module")  # what PEFT has put an adapter around
_DEEPEST = 40


@dataclass(frozen=True)
class Conduct:
    """`ordinary` counts where it differs from before, `extra` always; both from a place in the model to its digest."""

    ordinary: Mapping[str, str]
    extra: Mapping[str, str]
    versions: Mapping[str, tuple[weakref.ref[torch.Tensor], int]]

    @classmethod
    def of(cls, model: nn.Module) -> Conduct:
        """What a model does now; its weights' numbers are not read."""
        return _Notes(model).conduct

    def departures(self, model: nn.Module, first: Conduct) -> dict[str, str]:
        """In what this conduct of the model is no longer the `first`, or never was a checkpoint's own."""
        changed = {place: each for place, each in self.ordinary.items() if first.ordinary.get(place) != each}
        gone = dict.fromkeys(first.ordinary.keys() - self.ordinary.keys(), "gone")
        return {**changed, **gone, **self.extra, **self._edited(model, first)}

    def _edited(self, model: nn.Module, first: Conduct) -> dict[str, str]:
        """Weights edited in place, all their numbers read: an edit of few may escape a sample."""
        found = dict[str, str]()
        for name, parameter in model.named_parameters():
            known, version = first.versions.get(name, (None, 0))
            if (
                is_sampled(parameter)
                and known is not None
                and known() is parameter
                and version_of(parameter) != version
            ):
                found[f"weight {name}"] = whole_digest(parameter)
        return found


_firsts: weakref.WeakKeyDictionary[nn.Module, Conduct] = weakref.WeakKeyDictionary()
_firsts_lock = threading.Lock()


def remember_first(model: nn.Module) -> None:
    """Note a model's ordinary conduct, where it was not met before."""
    with _firsts_lock:
        if model not in _firsts:
            _firsts[model] = Conduct.of(model)


def fingerprint_of(model: nn.Module) -> str:
    """Sixteen hex digits for the model as it is: those of its weights, as long as it does what it did at first."""
    remember_first(model)
    weights, departures = weight_fingerprint(model), Conduct.of(model).departures(model, _firsts[model])
    if not departures:
        return weights
    listed = "\n".join(f"{place}={departures[place]}" for place in sorted(departures))
    return hashlib.sha256(f"{weights}\n{listed}".encode()).hexdigest()[:16]


class _Notes:
    """One walk over a model."""

    def __init__(self, model: nn.Module) -> None:
        self._ordinary: dict[str, str] = {}
        self._extra: dict[str, str] = {}
        modules, adapters = list(_modules(model, "", set())), _adapters_of(model)
        self._paths = {id(module): path for path, module in modules}
        for path, module in modules:
            self._note_behaviour(path, module)
            if is_adapted(module):
                self._note_adapters(path, module, adapters)
            elif package_of(type(module)) != "peft":  # whose own modules count their adapters, and have weights
                self._note_attributes(path, module)
        if len(adapters) > 1:
            self._extra["adapter"] = repr(getattr(model, "active_adapter", None) if adapters else None)
        self._note_classes([module for _, module in modules])
        for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
            for place, hook in enumerate(hooks.values()):
                self._extra[f"hook on all modules {place}"] = self._digest(hook)
        self.conduct = Conduct(
            self._ordinary,
            self._extra,
            {name: (weakref.ref(each), version_of(each)) for name, each in model.named_parameters()},
        )

    def _note_behaviour(self, path: str, module: nn.Module) -> None:
        """What no checkpoint brings: hooks, and methods of one object's own."""
        for name, value in vars(module).items():
            if name in HOOKS:
                self._note_hooks(path, name, module)
            elif name not in _TRANSIENT and _is_patched(module, name, value):
                self._extra[f"{path}: patched {name}"] = self._digest(value)

    def _note_attributes(self, path: str, module: nn.Module) -> None:
        self._ordinary[f"{path}: class"] = _name(type(module))
        rotates = any(kind in str(getattr(module, "rope_type", None)) for kind in _LENGTH_ROPE)
        own = {name: value for name, value in vars(module).items() if name not in _TRANSIENT and name not in HOOKS}
        for name, value in (*own.items(), *module._buffers.items()):
            computed = rotates and name.endswith(_OF_LENGTH) and "original" not in name
            if not computed and not callable(getattr(type(module), name, None)):
                self._ordinary[f"{path}.{name}"] = self._digest(value)

    def _note_hooks(self, path: str, name: str, module: nn.Module) -> None:
        place = 0
        for number, hook in getattr(module, name).items():
            if is_inert(hook):
                continue
            flags = [number in getattr(module, table) for table in HOOKS[name]]
            self._extra[f"{path}: {name} {place}"] = f"{flags} {self._digest(hook)}"
            place += 1

    def _note_adapters(self, path: str, layer: Any, adapters: Mapping[str, Any]) -> None:
        """An adapter as its folder brings it is ordinary: the only one, on, beside the weights, at its own scale."""
        named = len(adapters) != 1
        active, merged = list(layer.active_adapters), list(getattr(layer, "merged_adapters", ()))
        scales = {each: scale for each in active if (scale := _own_scale(layer, each, adapters)) is not None}
        if named or layer._disable_adapters or merged or scales:
            self._extra[f"{path}: adapters"] = repr((bool(layer._disable_adapters), active, merged, scales))

    def _note_classes(self, modules: Iterable[nn.Module]) -> None:
        """The code that classes bring, of which somebody may put another in its place."""
        for kind in {kind: None for module in modules for kind in type(module).__mro__ if kind is not object}:
            if package_of(kind) == "peft":
                continue
            own = package_of(kind) not in LIBRARIES
            for name, value in vars(kind).items():
                if isinstance(value, FunctionType) and (own or name == "forward"):
                    self._ordinary[f"{_name(kind)}.{name}"] = self._digest(value)
                    inner: Any = unwrap(value)
                    for named in names_in(inner.__code__) if isinstance(inner, FunctionType) else ():
                        found = inner.__globals__.get(named)
                        if isinstance(found, FunctionType):
                            self._ordinary[f"{inner.__module__}.{named}"] = self._digest(found)

    def _digest(self, value: Any) -> str:
        digest = hashlib.sha256()
        for piece in self._pieces(value, {}, 0):
            digest.update(piece)
            digest.update(b";")
        return digest.hexdigest()[:16]

    def _pieces(self, value: Any, seen: dict[int, int], depth: int) -> Iterator[bytes]:
        """A value and what it holds, without addresses: what is met again is named by its place."""
        value = innermost(value)
        if type(value) in ATOMS:
            yield repr(value).encode()
        elif id(value) in seen or depth > _DEEPEST:
            yield b"%d" % seen.get(id(value), -1)
        else:
            seen[id(value)] = len(seen)
            yield _name(type(value)).encode()
            yield from self._pieces_within(value, seen, depth)

    def _pieces_within(self, value: Any, seen: dict[int, int], depth: int) -> Iterator[bytes]:
        if isinstance(value, nn.Module):
            yield from self._pieces_of_module(value, seen, depth)
        elif isinstance(value, torch.Tensor):
            yield repr(tuple(value.shape)).encode() + sampled_bytes(value)
        elif isinstance(value, type):
            yield _name(value).encode()
        elif is_container(value):
            yield from self._pieces_of_container(value, seen, depth)
        elif isinstance(value, FunctionType):
            yield value.__qualname__.encode()
            yield from _code_of(value.__code__)
            yield from self._pieces_of(held_by(value), seen, depth)
        elif is_holder(value):
            yield from self._pieces_of_holder(value, seen, depth)
        else:
            yield from self._pieces_of(held_by(value), seen, depth)

    def _pieces_of(self, values: Iterable[Any], seen: dict[int, int], depth: int) -> Iterator[bytes]:
        for each in values:
            yield from self._pieces(each, seen, depth + 1)

    def _pieces_of_container(self, value: Any, seen: dict[int, int], depth: int) -> Iterator[bytes]:
        if isinstance(value, dict):
            for key, each in sorted(((_key(key), each) for key, each in value.items()), key=itemgetter(0)):
                yield key.encode()
                yield from self._pieces(each, seen, depth + 1)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(b"".join(self._pieces(each, {}, depth + 1)) for each in value)
        else:
            yield from self._pieces_of(value, seen, depth)

    def _pieces_of_module(self, module: nn.Module, seen: dict[int, int], depth: int) -> Iterator[bytes]:
        if id(module) in self._paths:
            yield self._paths[id(module)].encode()
            return
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield name.encode()
            yield from self._pieces(tensor, seen, depth + 1)

    def _pieces_of_holder(self, holder: Any, seen: dict[int, int], depth: int) -> Iterator[bytes]:
        config = hasattr(holder, "to_diff_dict")
        if package_of(type(holder)) in LIBRARIES and not config:  # a kernel's own state, which its passes change
            return
        for name, value in sorted(attributes_of(holder).items()):
            if config and (name.startswith("_") or name in _CONFIG_TRANSIENT or name.endswith(_CONFIG_ENDS)):
                continue
            yield name.encode()
            yield from self._pieces(value, seen, depth + 1)
        if not config:
            for name, value in sorted(vars(type(holder)).items()):
                if isinstance(value, FunctionType):
                    yield name.encode()
                    yield from _code_of(value.__code__)


def _modules(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules, each once. A compiled module is what it was compiled from, and a layer with an adapter stands
    at the place of the layer that it adapts, whose conduct is the same with and without it."""
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


def _adapters_of(model: Any) -> Mapping[str, Any]:
    """PEFT's adapters by name, with their configurations."""
    known: Any = getattr(model, "peft_config", None)
    return known if isinstance(known, dict) else {}


def _own_scale(layer: Any, adapter: str, adapters: Mapping[str, Any]) -> float | None:
    """The factor of an adapter, where it is not the one that its configuration gives.

    Only LoRA's formula is known here; of any other kind of adapter the factor always counts.
    """
    scale, rank, alpha = (getattr(layer, name, {}).get(adapter) for name in ("scaling", "r", "lora_alpha"))
    if scale is None or not rank:
        return None
    divisor = math.sqrt(rank) if getattr(adapters.get(adapter), "use_rslora", False) else rank
    return None if alpha is not None and scale == alpha / divisor else float(scale)


def _is_patched(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute of one module stands in the place of a method of its class, and is another."""
    method: Any = getattr(type(module), name, None)
    if not callable(method) or not callable(value):
        return False
    plain = innermost(value)
    return not (isinstance(plain, MethodType) and plain.__self__ is module and plain.__func__ is method)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _key(key: Any) -> str:
    return repr(key) if type(key) in ATOMS else _name(type(key))


def _code_of(code: CodeType) -> Iterable[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_of(constant)
        elif isinstance(constant, frozenset):  # whose order is another in every process
            yield repr(sorted(map(repr, constant))).encode()
        else:
            yield repr(constant).encode()
