"""`KeptOutputs`: the outputs of vLLM's linear maps, so that a replay of the upper layers does not multiply again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from semgrad_guard.engine.replay.kernels import Outputs
from semgrad_guard.vllm.shared_weights import parts_of


@dataclass(eq=False)
class PassOutputs:
    """Outputs of the first maps in one pass, side by side, at the `rows` that are kept: [rows, out of all]."""

    rows: torch.Tensor
    given: torch.Tensor


Piece = tuple[PassOutputs | None, int, int]
"""A record's positions in a pass: the first of its rows, and how many; None where nothing is kept of them any more."""


@dataclass(frozen=True)
class _Map:
    """A linear map of vLLM's: its layer's number, the twin's maps that it holds with their widths, and its input's."""

    layer: int
    parts: Sequence[tuple[str, int]]
    read: int

    @property
    def given(self) -> int:
        """The width of its output."""
        return sum(width for _, width in self.parts)


class KeptOutputs:
    """Listens to the linear maps of vLLM's decoder layers from `first` on; `twins` are the scoring model's layers.

    Outputs are kept of as many maps as stay within a budget, first of those that spare the most for a byte. A map that
    has no room any more is let go of everywhere, until nothing is kept.
    """

    def __init__(self, layers: Sequence[nn.Module], twins: Sequence[nn.Module], first: int) -> None:
        found: list[tuple[_Map, nn.Module]] = []
        for number in range(first, len(layers)):
            known = dict(twins[number].named_modules())
            for path, module in layers[number].named_modules():
                above, _, leaf = path.rpartition(".")
                names = [path] if path in known else [f"{above}.{part}" for part in parts_of(leaf)]
                linear: list[Any] = [known.get(name) for name in names]
                if linear and all(isinstance(linear_map, nn.Linear) for linear_map in linear):
                    widths = [(name, linear_map.out_features) for name, linear_map in zip(names, linear, strict=True)]
                    found.append((_Map(number, widths, linear[0].in_features), module))
        found.sort(key=lambda entry: -entry[0].read)
        self._maps = [linear_map for linear_map, _ in found]
        self._widths = [0, *accumulate(linear_map.given for linear_map in self._maps)]
        weights = (weight for _, module in found for weight in module.parameters())
        self._nothing = next((weight.new_empty(0) for weight in weights), torch.empty(0))
        self._used = 0
        self._now: PassOutputs | None = None
        for number, (_, module) in enumerate(found):
            module.register_forward_hook(partial(self._see, number))

    def begin(self, rows: torch.Tensor, held: Iterable[Sequence[Piece]], budget: int) -> PassOutputs:
        """Keep the maps' outputs at these rows of the pass that has begun, in addition to those `held`."""
        passes = list({id(seen): seen for pieces in held for seen, *_ in pieces if seen}.values())
        positions = sum(len(seen.rows) for seen in passes)
        self._used = len(self._maps) if positions == 0 else self._used
        bytes_each = (positions + len(rows)) * self._nothing.element_size()
        while self._used and bytes_each * self._widths[self._used] > budget:
            self._used -= 1
        width = self._widths[self._used]
        for seen in passes:
            if seen.given.shape[1] > width:
                seen.given = seen.given[:, :width].clone()
        self._now = PassOutputs(rows, self._nothing.new_empty(len(rows), width))
        return self._now

    def end(self) -> None:
        """The pass has ended."""
        self._now = None

    def _see(self, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._now is not None and number < self._used:
            columns = slice(self._widths[number], self._widths[number + 1])
            self._now.given[:, columns] = output[0].index_select(0, self._now.rows)

    def joined(self, rows: Sequence[Sequence[Piece]], longest: int) -> Outputs:
        """The outputs of the twin's maps at the positions of several answers: [rows, longest, out].

        Without maps of which outputs are missing, and without positions at which they are not kept any more. Beyond an
        answer's end they are zero.
        """
        width = min((seen.given.shape[1] for pieces in rows for seen, *_ in pieces if seen), default=0)
        if not width:
            return {}
        maps = self._maps[: self._widths.index(width)]
        parts = [(linear_map.layer, *part) for linear_map in maps for part in linear_map.parts]
        ends = [*accumulate((out for *_, out in parts), initial=0)]
        whole = self._nothing.new_empty(len(rows), longest, width)
        for row, pieces in enumerate(rows):
            reached = 0
            for seen, begin, count in pieces:
                if seen is not None:
                    whole[row, reached : reached + count] = seen.given[begin : begin + count, :width]
                    reached += count
            whole[row, reached:] = 0
        return {
            (layer, path): whole[:, :, begin:end]
            for (layer, path, _), (begin, end) in zip(parts, pairwise(ends), strict=True)
        }
