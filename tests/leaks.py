"""Leaks of a process that other parts of it share: what grows every time, not what there is."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise

import torch


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def smallest_growth(counts: Sequence[int]) -> int:
    """The growth that every round has: another part of the process may make or drop things at any time."""
    return min(after - before for before, after in pairwise(counts))
