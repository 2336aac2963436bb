"""`PagedCache`: keys and values read back from vLLM's paged cache, where our replay wants them without reading again.

The order of a block's numbers is found by a trial: vLLM's own code writes numbered keys and values into a block
of ours. Its kernels order a block's entries as suits them (on a CPU, its instructions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from semgrad_guard.engine.scores.tape import KeysValues

_BASE = 128  # bfloat16 and float16 hold every whole number up to it


class PagedCache:
    """The pages of some attention layers, all of one shape. `attentions` are vLLM's modules, `first` the first's layer.

    `places` [size, 2, H, d]: where in its block the key and the value of a position lie.
    """

    def __init__(self, attentions: Sequence[Any], first: int, places: torch.Tensor) -> None:
        self._attentions, self._first, self._places = list(attentions), first, places
        windows: list[int | None] = [getattr(attention.impl, "sliding_window", None) for attention in attentions]
        self._windows = [window for window in windows if window is not None and window > 0]

    @classmethod
    def of(cls, attentions: Sequence[Any], first: int) -> Self | None:
        """Pages that can be read back.

        None where they hold another number format than the model's or an order that is none, and where the states above
        them are less exact than float32: vLLM's attention on a CPU approximates the tanh of a soft cap (Gemma 2).
        """
        pages: list[Any] = [attention.kv_cache for attention in attentions]
        first_page, are_whole = pages[0], all(isinstance(page, torch.Tensor) and page.is_contiguous() for page in pages)
        approximates = any(getattr(attention.impl, "logits_soft_cap", None) for attention in attentions)
        if not are_whole or any(page.shape != first_page.shape for page in pages):
            return None
        places = None if approximates and first_page.dtype == torch.float32 else _places(attentions[0], first_page)
        return None if places is None else cls(attentions, first, places)

    def holds_all(self, positions: int) -> bool:
        """Whether so many positions are in the windows of all layers: vLLM gives the pages of others to other rows."""
        return all(positions <= window for window in self._windows)

    @torch.inference_mode(False)
    def read(self, tables: Mapping[str, Any], row: int, positions: int) -> list[KeysValues]:
        """The keys and values of the first positions of a row of a pass, by layer; None below the first.

        `tables` is the attention metadata of the pass, by layer. What is outside a layer's window is zero.
        """
        size, *shape = self._places.shape
        found: list[KeysValues] = [None] * self._first
        for attention in self._attentions:
            page: torch.Tensor = attention.kv_cache
            blocks = tables[attention.layer_name].block_table[row, : -(-positions // size)].long()
            whole = page.flatten(1)[blocks].index_select(1, self._places.flatten())
            whole.masked_fill_((blocks == 0)[:, None], 0)  # block 0 is in the place of those that are gone
            keys, values = whole.view(-1, *shape)[:positions].permute(1, 2, 0, 3)
            found.append((keys, values))
        return found


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
