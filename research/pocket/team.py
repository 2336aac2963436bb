"""Several processes train one model: each works on its own part of every step, and their gradients are added up.

Two processes of one thread each are faster than one process of two threads (matrices this small do not split well), and
the result depends on nothing but their number: sums of two are the same in either order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Team:
    """This process's place among the `size` that train together."""

    rank: int = 0
    size: int = 1

    def add(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over the team."""
        if self.size > 1:
            flat = torch.cat([t.flatten() for t in tensors])
            dist.all_reduce(flat)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def total(self, *values: float) -> list[float]:
        """The sum of each value over the team."""
        sums = torch.tensor(values, dtype=torch.float64)
        self.add([sums])
        return sums.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every member's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def _meet(rank: int, size: int, meeting: str) -> None:
    # No step takes minutes: a member that is silent for so long has died, and waiting for it would last for ever.
    patience = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=patience)


def _member(rank: int, size: int, meeting: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    _meet(rank, size, meeting)
    try:
        work(Team(rank, size), *arguments)
    finally:
        dist.destroy_process_group()


@contextmanager
def team(size: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> Iterator[Team]:
    """This process as rank 0; the others run `work(team, *arguments)` meanwhile and are waited for at the end."""
    if size == 1:
        yield Team()
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        spawn = processes.get_context("spawn")
        others = [
            spawn.Process(target=_member, args=(rank, size, meeting, work, arguments), daemon=True)
            for rank in range(1, size)
        ]
        for other in others:
            other.start()
        _meet(0, size, meeting)
        try:
            yield Team(0, size)
            for other in others:
                other.join()
        finally:
            dist.destroy_process_group()
