"""What scores take from vLLM, here without vLLM: states on tapes, keys and values in pages, weights.

However vLLM runs requests, in pieces or again, a tape holds the states of its own positions.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from semgrad_guard import GenerationOptions
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import UnsupportedModelError
from semgrad_guard.vllm.engine import WrittenAnswers
from semgrad_guard.vllm.listener import Listener, VLLMAnswer
from semgrad_guard.vllm.paged_cache import PagedCache
from semgrad_guard.vllm.shared_weights import SUPPORTED, twin_of
from semgrad_guard.vllm.vllm_language_model import TwinLanguageModel
from tests.random_llama import byte_tokenizer, random_llama

from .conftest import SIZES
from .passes import shared

QUESTIONS = ("Who?", "What is it, and where?", "Is it so?")
MODEL = TwinLanguageModel.from_transformers(random_llama(), byte_tokenizer(), name="tiny")


class Block(nn.Module):
    """A layer whose output and residual add up to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.attn = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "ANOTHER"))  # type: ignore[assignment]

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states - 1, torch.ones_like(states)


class Runner:
    """Runs requests side by side as vLLM does; the state at a position names the request and the position."""

    def __init__(self) -> None:
        blocks = [Block() for _ in range(MODEL.n_layers)]
        self.model: Any = SimpleNamespace(
            model=SimpleNamespace(layers=blocks), compute_logits=lambda states: 2 * states
        )
        processors = SimpleNamespace(non_argmax_invariant=[])
        self.input_batch: Any = SimpleNamespace(logitsprocs=processors)

    def execute_model(self, scheduled: Any) -> None:
        """One pass; the scheduler's record also says where each request begins."""
        counts: dict[str, int] = scheduled.num_scheduled_tokens
        self.input_batch.req_ids = list(counts)
        self.input_batch.req_id_to_index = {name: row for row, name in enumerate(counts)}
        self.input_batch.num_computed_tokens_cpu = [first for _, first, _ in scheduled.spans]
        states = [state(*span) for span in scheduled.spans]
        for block in self.model.model.layers:
            block(torch.cat(states))
        self.model.compute_logits(torch.stack([own[-1] for own in states]))

    def run(self, spans: list[tuple[int, int, int]]) -> None:
        """A pass over so many positions of each request, from its first on."""
        counts = {f"{request}-0a1b": count for request, _, count in spans}
        self.execute_model(SimpleNamespace(num_scheduled_tokens=counts, spans=spans))


def state(request: int, first: int, count: int) -> torch.Tensor:
    return torch.tensor([[float(request), float(place)] for place in range(first, first + count)])


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", SimpleNamespace(get_forward_context=lambda: context))


@given(st.data())
def test_a_tape_holds_its_own_positions(data: st.DataObject) -> None:
    runner = Runner()
    listener = Listener(runner)
    listener.record(MODEL.scorer)
    batch = WrittenAnswers(MODEL, Objective(), listener=listener)
    rows = [batch.answer(MODEL.render(q), GenerationOptions(), name=str(n)) for n, q in enumerate(QUESTIONS)]
    batch.join(rows)
    begins = [row.begin for row in rows]
    # positions in vLLM's cache: a prefix that another request has left
    computed = [data.draw(st.integers(0, len(row.prompt.ids) - 1)) for row in rows]
    begun = set[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        spans = list[tuple[int, int, int]]()
        for number in data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]:
            if data.draw(st.integers(0, 9)) == 0:  # preempted
                computed[number] = data.draw(st.integers(0, computed[number]))
            if number not in begun:  # states of that prefix are nowhere
                begins[number] = max(begins[number], computed[number])
            begun.add(number)
            left = len(rows[number].prompt.ids) + len(rows[number].ids) - computed[number]
            spans.append(
                (number, computed[number], left if data.draw(st.booleans()) else data.draw(st.integers(1, left)))
            )
        runner.run(spans)
        for number, first, count in spans:
            computed[number] = first + count
            if computed[number] == len(rows[number].prompt.ids) + len(rows[number].ids):
                rows[number].ids.append(5)
    for number, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        holds(listener, row, number, begin)


def holds(listener: Listener, row: VLLMAnswer, number: int, begin: int) -> None:
    """Whether all states of an answer are on its tape, and no other's."""
    if not row.ids:
        return
    tape, length = listener.tape(row), len(row.prompt.ids)
    assert tape is not None
    assert (tape.begin, tape.end) == (begin, length + len(row.ids) - 1)
    torch.testing.assert_close(tape.hidden([(tape.begin, tape.end)]), state(number, begin, tape.end - begin))
    finals, predicting = tape.steps("finals", length - 1, tape.end), state(number, length - 1, len(row.ids))
    assert finals is not None
    torch.testing.assert_close(torch.stack(finals), predicting)
    if (logits := tape.steps("logits", length - 1, tape.end)) is not None:
        torch.testing.assert_close(torch.stack(logits), 2 * predicting)


def test_what_was_not_recorded_is_no_tape() -> None:
    """A pass that guesses ahead has other rows before the head than requests."""
    runner = Runner()
    listener = Listener(runner)
    listener.record(MODEL.scorer)
    batch = WrittenAnswers(MODEL, Objective(), listener=listener)
    row = batch.answer(MODEL.render("Who?"), GenerationOptions(), name="0")
    batch.join([row])
    runner.run([(0, 0, len(row.prompt.ids))])
    row.ids.append(5)
    assert listener.tape(row) is not None
    row.ids.append(5)
    assert listener.tape(row) is None


# Keys and values read back from pages whose order is unknown.


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


# The scoring model on weights as vLLM holds them: fused, padded, tied.


PADDING = 5


def config_of(kind: str, **given: Any) -> Any:
    """A small configuration of that type."""
    return AutoConfig.for_model(kind, **{**SIZES, "vocab_size": 300, **given})


def as_vllm_holds_it(model: nn.Module) -> nn.Module:
    """A module with the parameters of a transformers model under vLLM's names: fused, and the vocabulary padded."""
    held, parameters = nn.Module(), dict(model.named_parameters())
    for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        for name in [name for name in parameters if f".{parts[0]}." in name]:
            pieces = [parameters.pop(name.replace(parts[0], part)) for part in parts]
            parameters[name.replace(parts[0], whole)] = nn.Parameter(torch.cat(list(pieces)))
    for name, parameter in parameters.items():
        at, *path = (held, *name.split("."))
        for part in path[:-1]:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        rows = nn.functional.pad(parameter, (0, 0, 0, PADDING)) if len(parameter) == 300 else parameter
        at.register_parameter(path[-1], nn.Parameter(rows.detach().clone()))
    return held


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_layout_computes_the_same_on_shared_weights(kind: str, tied: bool) -> None:
    torch.manual_seed(0)
    config = config_of(kind, tie_word_embeddings=tied)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    held = as_vllm_holds_it(model)
    twin: Any = twin_of(held, config, torch.float32)
    assert shared(twin, held) == len(list(twin.parameters()))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=0, atol=0)
        held.get_parameter("model.norm.weight").add_(1)  # one memory, and no copy of it
        assert not torch.equal(twin(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["opt", "gpt2", "gemma3", "mixtral"])
def test_an_unknown_layout_is_refused_with_what_to_do(kind: str) -> None:
    """Gemma 3 with pictures is one: its text part has a name of its own."""
    with pytest.raises(UnsupportedModelError, match=rf"type '{kind}' .*serve --upstream"):
        twin_of(nn.Module(), AutoConfig.for_model(kind), torch.float32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: p.to(torch.bfloat16), "in float32"),
        (lambda p: p[: len(p) // 2], "shape"),
        (lambda p: p.new_zeros(0), "shape"),
    ],
    ids=["another number format", "a part", "emptied after packing"],
)
def test_weights_that_are_not_whole_are_refused(change: Any, named: str) -> None:
    config = config_of("llama")
    held = as_vllm_holds_it(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    layer: Any = held.get_submodule("model.layers.2.mlp.down_proj")
    layer.weight = nn.Parameter(change(layer.weight.detach()))
    with pytest.raises(UnsupportedModelError, match=rf"layers.2.mlp.down_proj.weight.*{named}"):
        twin_of(held, config, torch.float32)
