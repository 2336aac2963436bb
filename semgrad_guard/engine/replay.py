"""The forward pass again, with a graph only where a gradient is wanted.

Three ways ("tiers"), from cheap to general:

    captured   the upper layers over positions >= t*, from h^(k) kept while generating and a cut of the KV cache
    prefix     one no-gradient pass up to t*, then every layer over positions >= t* (texts from anywhere)
    full       the whole sequence with the model's own code and plain autograd (states that cannot be cut at t*)

Only positions >= t* can carry gradient to h_{t*}; all earlier ones are constants that a KV cache holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from semgrad_guard.engine.architecture import Architecture, submodule_setter
from semgrad_guard.engine.hidden_states import Capture, Tap, taps
from semgrad_guard.engine.prefix_cache import can_be_cut, cut, growing_cache
from semgrad_guard.engine.shadow import shadow_of
from semgrad_guard.engine.stand_ins import Bypass, HeadTap, restride
from semgrad_guard.engine.token_batch import TokenBatch
from semgrad_guard.errors import UnsupportedModelError


@dataclass(frozen=True)
class Trace:
    """What a generation leaves behind for scoring: its KV cache and h^(layer) from the earliest t* on."""

    cache: Cache
    layer: int
    states: torch.Tensor

    def fits(self, batch: TokenBatch) -> bool:
        """Whether these states reach from the batch's cut to its end, row for row (beams have more rows)."""
        if not can_be_cut(self.cache, batch.end) or len(self.states) != len(batch.segments):
            return False
        return self.begins <= batch.cut and self.begins + self.states.shape[1] >= batch.end

    @property
    def begins(self) -> int:
        """The column of the first state."""
        return self.cache.get_seq_length() - self.states.shape[1]


@dataclass(frozen=True)
class Replayed:
    """A forward pass with a graph: h^(l) of the span and `final` states before the head, [B, columns, d] each.

    `hidden` begins at column `start`, `final` at column `head_start`. Where the pass went through the head (full
    tier), `raw_logits` is the head's own output and `logits` the model's, both from `head_start`.
    """

    start: int
    final: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    head_start: int
    raw_logits: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Replayer:
    """Runs the shadow of one model. Not re-entrant: callers hold the engine's lock."""

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self._architecture = architecture
        self._shadow = shadow_of(model)
        self._head = self._shadow.get_submodule(architecture.head)
        self._head.register_forward_pre_hook(restride)
        self._tap = HeadTap()
        self._put_head = submodule_setter(self._shadow, architecture.head)
        self._returns_tuple: bool | None = None

    @property
    def head(self) -> nn.Linear:
        """The output head, its weight not requiring a gradient."""
        return cast(nn.Linear, self._head)

    @property
    def layers(self) -> nn.ModuleList:
        """The shadow's decoder layers (only where the architecture has a known list of them)."""
        return cast(nn.ModuleList, self._shadow.get_submodule(cast(str, self._architecture.layers)))

    def captured(self, batch: TokenBatch, span: Sequence[int], trace: Trace) -> Replayed:
        """Upper layers only, from the states and the cache of a generation (`trace.layer` <= the span's first)."""
        states = trace.states[:, batch.cut - trace.begins : batch.end - trace.begins]
        if states.is_inference():
            states = states.clone()
        with self._bypassing(trace.layer):
            return self._run(batch, span, cut(trace.cache, batch.cut), injected=(trace.layer, states))

    def prefix(self, batch: TokenBatch, span: Sequence[int]) -> Replayed:
        """Prefill up to t* without a graph, then replay every layer from there."""
        cache: Cache | None = None
        if batch.cut > 0:
            cache = growing_cache()
            with torch.no_grad(), self._headless():
                self._call(batch.inputs(0, batch.cut), past_key_values=cache, use_cache=True)
                self._tap.take()
            cache = cut(cache, batch.cut)
        return self._run(batch, span, cache, injected=None)

    def full(self, batch: TokenBatch, span: Sequence[int]) -> Replayed:
        """One pass over the whole sequence with the model's own code; nothing is cut, cached or left out."""
        seen: dict[str, torch.Tensor] = {}
        inputs_of: dict[int, torch.Tensor] = {}

        def remember(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            seen["final"], seen["raw"] = args[0], output

        layers, table = self._watching(inputs_of, span)
        embedding: Any = self._shadow.get_input_embeddings()  # pyright: ignore
        with ExitStack() as stack:
            stack.callback(embedding.register_forward_hook(lambda *call: call[2].requires_grad_()).remove)
            stack.callback(self._head.register_forward_hook(remember).remove)
            stack.enter_context(taps(layers, table))
            stack.enter_context(torch.enable_grad())
            # The last token predicts nothing, but rotary frequencies may depend on the length of the sequence.
            end = batch.end + 1
            options = {"logits_to_keep": max(batch.lengths) + 1} if self._architecture.takes_logits_to_keep else {}
            output = self._call(batch.inputs(0, end), use_cache=False, output_hidden_states=True, **options)
        hidden = self._recorded(output.hidden_states, inputs_of, span)
        head_start = end - output.logits.shape[1]
        return Replayed(0, seen["final"], hidden, head_start, raw_logits=seen["raw"], logits=output.logits)

    def last_states(self, batch: TokenBatch, count: int) -> torch.Tensor:
        """h^(l) of the prompts for l = 0 .. L-1 at their last `count` tokens, without a graph: [B, L, count, d]."""
        inputs_of: dict[int, torch.Tensor] = {}
        span = range(self._architecture.n_layers)
        options = {"logits_to_keep": 1} if self._architecture.takes_logits_to_keep else {}
        with torch.no_grad(), taps(*self._watching(inputs_of, span)):
            inputs = batch.inputs(0, batch.prompt_columns)
            output = self._call(inputs, use_cache=False, output_hidden_states=True, **options)
        hidden = self._recorded(output.hidden_states, inputs_of, span)
        return torch.stack([states[:, -count:] for states in hidden], dim=1)

    def _watching(
        self, inputs_of: dict[int, torch.Tensor], span: Sequence[int]
    ) -> tuple[Sequence[nn.Module] | nn.ModuleList, dict[int, Tap]]:
        """Layers, and taps that note what those of the span receive (and the last one, which vouches for the rest)."""
        if self._architecture.layers is None:
            return (), {}

        def keep(layer: int) -> Tap:
            return lambda states: inputs_of.__setitem__(layer, states)

        return self.layers, {layer: keep(layer) for layer in {*span, self._architecture.n_layers - 1}}

    def _recorded(
        self, recorded: Sequence[torch.Tensor] | None, inputs_of: dict[int, torch.Tensor], span: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """h^(l) as the decoder layers received it, vouched for by the model's own record; else from that record.

        (Some models, Mamba for one, record the layers' outputs without the embedding: their numbering is off by one.)
        """
        record = recorded or ()
        beyond_embedding = [states for layer, states in inputs_of.items() if layer]
        if beyond_embedding and all(any(states is other for other in record) for states in beyond_embedding):
            return tuple(inputs_of[layer] for layer in span)
        if len(record) != self._architecture.n_layers + 1:
            raise UnsupportedModelError(
                f"{type(self._shadow).__name__} reports {len(record)} hidden states for its "
                f"{self._architecture.n_layers} decoder layers; which one belongs to which layer is not known"
            )
        return tuple(record[layer] for layer in span)

    def generate(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        capture: Capture | None = None,
        *,
        cache: Cache | None = None,
        **options: Any,
    ) -> Any:
        """`model.generate` on the shadow: no mode, hook or generation default of the user's model plays a part.

        With `capture`, the cache keeps every key, so that `captured` can replay from what is left behind. A `cache`
        (see `prefilled`) spares the columns that it holds.
        """
        table: dict[int, Tap] = {} if capture is None else {capture.layer: capture}
        if capture is not None:
            cache = growing_cache()
        layers = self.layers if table else []
        with torch.no_grad(), taps(layers, table):
            shadow: Any = self._shadow
            return shadow.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)

    def prefilled(self, batch: TokenBatch, end: int, rows: Sequence[int]) -> Cache:
        """A cache of columns [0, end) > 0 for several continuations: its row i continues the batch's row `rows[i]`."""
        cache = growing_cache()
        with torch.no_grad(), self._headless():
            self._call(batch.inputs(0, end), past_key_values=cache, use_cache=True)
            self._tap.take()
        cache.reorder_cache(cast(torch.LongTensor, torch.tensor(rows, device=batch.ids.device)))
        return cache

    def read(
        self, batch: TokenBatch, start: int, *, cache: Cache | None, layer: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The model's own logits [B, T + 1, V], and h^(layer), from the column before the responses to their end.

        T is the longest response's length. `cache` holds the columns before `start`, if there are any.
        """
        seen: list[torch.Tensor] = []
        table: dict[int, Tap] = {} if layer is None else {layer: seen.append}
        keep = max(batch.lengths) + 1
        options = {"logits_to_keep": keep} if self._architecture.takes_logits_to_keep else {}
        with torch.no_grad(), taps(self.layers if table else [], table):
            inputs = batch.inputs(start, batch.end + 1)
            output = self._call(inputs, past_key_values=cache, use_cache=cache is not None, **options)
        return output.logits[:, -keep:], seen[0][:, -keep:] if seen else None

    def record(self, batch: TokenBatch, layer: int) -> Trace:
        """The trace that a generation of this batch would have left (for self-checks)."""
        capture, cache = Capture(layer, batch.cut), growing_cache()
        with torch.no_grad(), self._headless(), taps(self.layers, {layer: capture}):
            self._call(batch.inputs(0, batch.end), past_key_values=cache, use_cache=True)
            self._tap.take()
        return Trace(cache, layer, capture.states())

    def _run(
        self, batch: TokenBatch, span: Sequence[int], prefix: Cache | None, injected: tuple[int, torch.Tensor] | None
    ) -> Replayed:
        """Columns [cut, end) with the graph beginning at the span's first layer."""
        hidden: dict[int, torch.Tensor] = {}

        def leaf(states: torch.Tensor) -> torch.Tensor:
            hidden[span[0]] = states.detach().requires_grad_()
            return hidden[span[0]]

        def keep(layer: int) -> Tap:
            return lambda states: hidden.__setitem__(layer, states)

        table: dict[int, Tap] = {layer: keep(layer) for layer in span[1:]}
        table[span[0]] = leaf
        if injected is not None:
            layer, states = injected
            table[layer] = (lambda _: leaf(states)) if layer == span[0] else (lambda _: states)
        with torch.enable_grad(), self._headless(), taps(self.layers, table):
            self._call(batch.inputs(batch.cut, batch.end), past_key_values=prefix, use_cache=prefix is not None)
        return Replayed(batch.cut, self._tap.take(), tuple(hidden[layer] for layer in span), batch.cut)

    def _call(self, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        if not self._architecture.takes_positions:
            del inputs["position_ids"]
        return self._shadow(**inputs, **options)

    @contextmanager
    def _headless(self) -> Iterator[None]:
        self._put_head(self._tap)
        try:
            yield
        finally:
            self._put_head(self._head)

    @contextmanager
    def _bypassing(self, count: int) -> Iterator[None]:
        """The first `count` decoder layers stand aside for the time of a block."""
        layers = self.layers
        lower = list(layers)[:count]
        for index, layer in enumerate(lower):
            layers[index] = Bypass.of(layer, returns_tuple=self._layers_return_tuples())
        try:
            yield
        finally:
            for index, layer in enumerate(lower):
                layers[index] = layer

    def _layers_return_tuples(self) -> bool:
        """Whether a decoder layer answers with a tuple; seen once on a single token."""
        if self._returns_tuple is None:
            seen: list[bool] = []
            hook = self.layers[0].register_forward_hook(lambda *call: seen.append(isinstance(call[2], tuple)))
            try:
                with torch.no_grad(), self._headless():
                    self._shadow(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.head.weight.device))
                    self._tap.take()
            finally:
                hook.remove()
            self._returns_tuple = seen[0]
        return self._returns_tuple
