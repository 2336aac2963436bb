"""Fingerprints of a model's weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

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


def is_sampled(tensor: torch.Tensor) -> bool:
    """Whether `sampled_bytes` leaves values out."""
    return tensor.numel() >= 2 * _SAMPLES


def whole_digest(tensor: torch.Tensor) -> str:
    """Of all of a tensor's values, as they are."""
    values: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(values).hexdigest()
