"""What tells a model's weights from others."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLES = 1024


def weight_fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits that change when the weights do: names, shapes and up to 1,024 values of every tensor.

    The values are read in float32, so that the same checkpoint loaded in bfloat16 and float32 agrees.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)]
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if sample.dtype.is_floating_point:
            sample = sample.to(torch.float32)
        digest.update(sample.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
