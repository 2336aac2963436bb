"""`PagedCache`: keys and values read back from vLLM's paged cache, where our replay wants them without reading again.

The order of a block's numbers is found by a trial: vLLM's own code writes numbered keys and values into a block
of ours. Its kernels order a block's entries as suits them (on a CPU, its instructions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

_BASE = 128  # bfloat16 and float16 hold every whole number up to it
_AT_ONCE = 1 << 22  # entries that are looked up at a time: their places take eight bytes each


class PagedCache:
    """The pages of some attention layers, all of one shape. `attentions` are vLLM's modules, `first` the first's layer.

    `places` [size, 2, H, d]: where in its block the key and the value of a position lie.
    """

    def __init__(self, attentions: Sequence[Any], first: int, places: torch.Tensor) -> None:
        self._attentions, self._first, self._places = list(attentions), first, places

    @classmethod
    def of(cls, attentions: Sequence[Any], first: int) -> Self | None:
        """Pages that can be read back.

        None where they hold another number format than the model's or an order that is none, and where the states above
        them are less exact than float32: vLLM's attention on a CPU approximates the tanh of a soft cap (Gemma 2).
        """
        pages: list[Any] = [attention.kv_cache for attention in attentions]
        if not all(
            isinstance(page, torch.Tensor) and page.shape == pages[0].shape and page.is_contiguous() for page in pages
        ):
            return None
        if pages[0].dtype == torch.float32 and any(
            getattr(attention.impl, "logits_soft_cap", None) for attention in attentions
        ):
            return None
        places = _places(attentions[0], pages[0])
        return None if places is None else cls(attentions, first, places)

    @property
    def bytes_per_position(self) -> int:
        """The bytes of a position in all of the layers."""
        return len(self._attentions) * self._places[0].numel() * self._attentions[0].kv_cache.itemsize

    def holds_all(self, positions: int) -> bool:
        """Whether so many positions are in the windows of all layers: vLLM gives the pages of others to other rows."""
        windows: list[int] = [getattr(attention.impl, "sliding_window", None) or -1 for attention in self._attentions]
        return all(window < 0 or positions <= window for window in windows)

    def read(self, tables: Mapping[str, Any], wanted: Sequence[tuple[int, int, int]]) -> Sequence[torch.Tensor]:
        """The n positions from `first` on of the rows of a pass, for each wanted (row, first, n): [layers, n, 2, H, d].

        `tables` is the attention metadata of the pass, by layer.
        """
        rows = torch.cat([torch.full((count,), row) for row, _, count in wanted])
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in wanted])
        shape = self._places.shape[1:]
        found = self._attentions[0].kv_cache.new_empty(len(self._attentions), len(rows), shape.numel())
        for begin in range(0, len(rows), max(1, _AT_ONCE // shape.numel())):
            part = slice(begin, begin + max(1, _AT_ONCE // shape.numel()))
            self._read(tables, rows[part], positions[part], found[:, part])
        counts = [count for *_, count in wanted]
        # A copy of each: a view would keep the others' alive.
        return [values.clone().unflatten(2, shape) for values in found.split(counts, dim=1)]

    def _read(
        self, tables: Mapping[str, Any], rows: torch.Tensor, positions: torch.Tensor, found: torch.Tensor
    ) -> None:
        size, known = len(self._places), dict[int, tuple[torch.Tensor, torch.Tensor]]()
        for number, attention in enumerate(self._attentions):
            table, page = tables[attention.layer_name].block_table, attention.kv_cache
            if id(table) not in known:  # layers of one group share it
                blocks = table[rows.to(table.device), (positions // size).to(table.device)].long()
                inside = self._places.flatten(1)[positions % size].to(blocks.device)
                known[id(table)] = blocks, blocks[:, None] * page[0].numel() + inside
            blocks, index = known[id(table)]
            found[number].copy_(torch.take(page, index))
            # Block 0 replaces those outside a layer's window, which are never read.
            found[number].masked_fill_((blocks == 0)[:, None], 0)

    def joined(self, rows: Sequence[torch.Tensor]) -> DynamicCache:
        """The read keys and values of several rows as a cache of transformers', padded with zeros on the left.

        Layers before the first have its length, and no memory.
        """
        longest, shape = max(values.shape[1] for values in rows), rows[0].shape
        whole = rows[0].new_zeros(shape[0], 2, len(rows), shape[3], longest, shape[4])
        for row, values in enumerate(rows):
            whole[:, :, row, :, longest - values.shape[1] :] = values.permute(0, 2, 3, 1, 4)
        nothing = whole.new_zeros(1).expand(whole.shape[2:])
        cache: Any = DynamicCache()
        cache.layers = [_layer(nothing, nothing) for _ in range(self._first)] + [_layer(*halves) for halves in whole]
        return cache


def _places(attention: Any, page: torch.Tensor) -> torch.Tensor | None:
    """Where a block [..] of `page` keeps each number: [size, 2, H, d], as offsets among its entries."""
    heads, width = int(attention.num_kv_heads), int(attention.head_size)
    entries = page[0].numel()
    size, rest = divmod(entries, 2 * heads * width)
    if rest or not page.dtype.is_floating_point or page.dtype.itemsize < 2:
        return None
    numbers = torch.arange(entries, device=page.device).view(size, 2, heads, width)
    block, slots = torch.zeros_like(page[:1]), torch.arange(size, device=page.device)
    found, unit = torch.zeros(entries, dtype=torch.long, device=page.device), 1
    while unit < entries:
        keys, values = (numbers // unit % _BASE).to(page.dtype).unbind(1)
        attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), block, slots)
        found += block.flatten().long() * unit
        unit *= _BASE
    if not torch.equal(found.sort().values, numbers.flatten()):
        return None
    return found.argsort().view(numbers.shape)


def _layer(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    layer: Any = DynamicLayer()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    return layer
