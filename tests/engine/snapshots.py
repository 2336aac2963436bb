"""Everything about a model, and about torch, that scoring must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def of_model(model: nn.Module) -> dict[str, Any]:
    """Per module: its attributes, mode, hooks and children; per tensor: identity, storage, version, flags, gradient.

    Attributes and the entries of containers among them count by identity, tensors' numbers by their bytes.
    """
    found: dict[str, Any] = {}
    for name in ("config", "generation_config"):
        settings = getattr(model, name, None)
        found[name] = None if settings is None else (id(settings), settings.to_dict())
    for path, module in model.named_modules():
        found[f"{path}: attributes"] = sorted(vars(module))
        found[f"{path}: mode"] = module.training
        found[f"{path}: hooks"] = {name: list(getattr(module, name).items()) for name in _HOOKS}
        found[f"{path}: children"] = [(name, id(child)) for name, child in module.named_children()]
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | None)}
        found[f"{path}: plain attributes"] = plain
        found[f"{path}: values"] = {name: identity(value) for name, value in vars(module).items()}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for path, tensor in tensors:
        gradient = None if tensor.grad is None else (id(tensor.grad), tensor.grad._version)
        found[f"{path}: tensor"] = (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad, gradient)
        found[f"{path}: form"] = (type(tensor), tensor.shape, tensor.stride(), tensor.device, attributes_of(tensor))
        found[f"{path}: version"] = tensor._version
        found[f"{path}: numbers"] = hash(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found


def identity(value: Any) -> Any:
    """What stays the same as long as a value is not changed; containers by what they hold."""
    if isinstance(value, dict):
        return {key: identity(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [identity(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else (id(value), attributes_of(value))


def attributes_of(value: Any) -> dict[str, int]:
    """The attributes of an object, by identity."""
    return {name: id(item) for name, item in getattr(value, "__dict__", {}).items()}


def of_torch() -> dict[str, Any]:
    """The switches of the calling thread and the global random state."""
    return {
        "rng": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The block leaves the model and torch as they were, whether or not it raises."""
    model_before, torch_before = of_model(model), of_torch()
    try:
        yield
    finally:
        model_after, torch_after = of_model(model), of_torch()
        changed = [key for key in model_before | model_after if model_before.get(key) != model_after.get(key)]
        assert not changed, changed[:5]
        assert torch_before == torch_after
