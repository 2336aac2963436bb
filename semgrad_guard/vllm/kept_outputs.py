"""`KeptOutputs`: the outputs of vLLM's linear maps, so that a replay of the upper layers does not multiply again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from semgrad_guard.engine.replay.kernels import Outputs, Place
from semgrad_guard.vllm.shared_weights import parts_of


@dataclass(eq=False)
class PassOutputs:
    """Outputs of maps in one pass, by their number, at the `rows` that are kept: [rows, out] each."""

    rows: torch.Tensor
    given: dict[int, torch.Tensor]


Piece = tuple[PassOutputs, int, int]
"""A record's positions in a pass: the first of its rows, and how many."""


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
        self._itemsize = next((weight.element_size() for _, module in found for weight in module.parameters()), 0)
        self._used = 0
        self._now: PassOutputs | None = None
        for number, (_, module) in enumerate(found):
            module.register_forward_hook(partial(self._see, number))

    def begin(self, rows: torch.Tensor, held: Iterable[Sequence[Piece]], budget: int) -> PassOutputs:
        """Keep the maps' outputs at these rows of the pass that has begun, in addition to those `held`."""
        passes = _passes(held)
        positions = sum(len(seen_pass.rows) for seen_pass in passes)
        self._used = len(self._maps) if positions == 0 else self._used
        while self._used and (positions + len(rows)) * self._widths[self._used] * self._itemsize > budget:
            self._used -= 1
            for seen_pass in passes:
                seen_pass.given.pop(self._used, None)
        self._now = PassOutputs(rows, {})
        return self._now

    def end(self) -> None:
        """The pass has ended."""
        self._now = None

    def _see(self, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._now is not None and number < self._used:
            self._now.given[number] = output[0].index_select(0, self._now.rows)

    def joined(self, rows: Sequence[Sequence[Piece]], longest: int) -> Outputs:
        """The outputs of the twin's maps at the positions of several answers: [rows, longest, out].

        Without maps of which outputs are missing. Beyond an answer's end they are zero.
        """
        passes = _passes(rows)
        if not passes:
            return {}
        starts = dict(
            zip(map(id, passes), accumulate([0, *(len(seen_pass.rows) for seen_pass in passes)]), strict=False)
        )
        nothing = sum(len(seen_pass.rows) for seen_pass in passes)
        index = torch.full((len(rows), longest), nothing)
        for row, pieces in zip(index, rows, strict=True):
            own = torch.cat([torch.arange(count) + starts[id(seen_pass)] + begin for seen_pass, begin, count in pieces])
            row[: len(own)] = own
        outputs: dict[Place, torch.Tensor] = {}
        for number, linear_map in enumerate(self._maps):
            given = [seen.given[number] for seen in passes if number in seen.given]
            if len(given) < len(passes):
                continue
            every = torch.cat([*given, given[0].new_zeros(1, given[0].shape[1])])
            whole = every.index_select(0, index.flatten().to(every.device)).view(*index.shape, -1)
            for (path, _), part in zip(
                linear_map.parts, whole.split([width for _, width in linear_map.parts], 2), strict=True
            ):
                outputs[linear_map.layer, path] = part
        return outputs


def _passes(records: Iterable[Sequence[Piece]]) -> list[PassOutputs]:
    """The passes that some records have positions in, each once."""
    return list({id(seen_pass): seen_pass for pieces in records for seen_pass, *_ in pieces}.values())
