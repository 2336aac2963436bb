"""Keys and values read back from pages whose order is unknown: here without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from semgrad_guard.vllm.paged_cache import PagedCache

HEADS, WIDTH, SIZE, PAGES = 2, 8, 4, 6


class Attention:
    """A layer that keeps keys across and values along, as kernels of a CPU do; `lossy` ones keep no values."""

    def __init__(self, name: str, dtype: torch.dtype, *, lossy: bool = False, cap: float = 0) -> None:
        self.layer_name, self.num_kv_heads, self.head_size, self.lossy = name, HEADS, WIDTH, lossy
        self.kv_cache = torch.full((PAGES, HEADS, SIZE, 2 * WIDTH), torch.nan, dtype=dtype)
        self.impl: Any = self
        self.logits_soft_cap, self.sliding_window = cap, -1

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        across = pages.view(len(pages), HEADS, 2, WIDTH, SIZE)[:, :, 0]
        along = pages.view(len(pages), HEADS, 2, SIZE, WIDTH)[:, :, 1]
        for place, k, v in zip(slots.tolist(), key, value, strict=True):
            across[place // SIZE, :, :, place % SIZE] = k
            along[place // SIZE, :, place % SIZE] = 0 if layer.lossy else v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_written_is_read(dtype: torch.dtype) -> None:
    """Of rows of unequal length, over pages in any order; a page that is gone reads as zeros."""
    layers = [Attention(f"layer {number}", dtype) for number in range(3)]
    pages = PagedCache.of(layers, 5)
    assert pages is not None
    tables = torch.tensor([[3, 1, 0], [5, 2, 4], [0, 2, 0]])
    written = torch.randn(3, 2, 10, HEADS, WIDTH, dtype=dtype)  # layers, halves, positions
    slots = torch.tensor([int(tables[1, n // SIZE]) * SIZE + n % SIZE for n in range(10)])
    other = torch.tensor([3 * SIZE + n for n in range(3)])
    for layer, (keys, values) in zip(layers, written, strict=True):
        layer.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
        layer.do_kv_cache_update(layer, keys[:3] + 1, values[:3] + 1, layer.kv_cache, other)
    metadata = {layer.layer_name: SimpleNamespace(block_table=tables) for layer in layers}
    long, short, gone = pages.read(metadata, 1, 10), pages.read(metadata, 0, 3), pages.read(metadata, 2, 6)
    assert [keys is None for keys in long] == [True] * 5 + [False] * 3
    expected = written.transpose(2, 3)  # layers, halves, heads, positions
    for number, halves in enumerate(expected, start=5):
        for half, own, other, lost in zip(halves, *(found[number] or () for found in (long, short, gone)), strict=True):
            torch.testing.assert_close(own, half, rtol=0, atol=0)
            torch.testing.assert_close(other, half[:, :3] + 1, rtol=0, atol=0)
            assert not lost[:, :4].any()
            torch.testing.assert_close(lost[:, 4:], half[:, 4:6], rtol=0, atol=0)  # the same page


def test_positions_beyond_a_window_are_not_all_there() -> None:
    """vLLM gives the pages behind a layer's window to other requests."""
    layers = [Attention(f"layer {number}", torch.float32) for number in range(2)]
    pages = PagedCache.of(layers, 0)
    assert pages is not None
    assert pages.holds_all(99)
    layers[1].sliding_window = 5
    pages = PagedCache.of(layers, 0)
    assert pages is not None
    assert pages.holds_all(5)
    assert not pages.holds_all(6)


def test_what_cannot_be_read_back_is_not() -> None:
    """An order in which numbers are lost, quantized pages, layers of several shapes, and attention with a soft cap."""
    float32, quantized = Attention("one", torch.float32), Attention("one", torch.float32)
    quantized.kv_cache = quantized.kv_cache.to(torch.float8_e4m3fn)
    smaller = Attention("two", torch.float32)
    smaller.kv_cache = smaller.kv_cache[:, :, :2]
    assert PagedCache.of([float32], 0) is not None
    assert PagedCache.of([Attention("one", torch.float32, lossy=True)], 0) is None
    assert PagedCache.of([quantized], 0) is None
    assert PagedCache.of([float32, smaller], 0) is None
    assert PagedCache.of([Attention("one", torch.float32, cap=50)], 0) is None
    assert PagedCache.of([Attention("one", torch.bfloat16, cap=50)], 0) is not None
