"""The forward pass again, with a graph only where a gradient is wanted.

Three ways ("tiers"), from cheap to general:

    captured   the upper layers over positions >= t*, from h^(k) kept while generating, or in one pass over a text for
               all its sentences, and a cut of the KV cache
    prefix     one no-gradient pass up to t*, then every layer over positions >= t* (texts from anywhere); where states
               cannot be cut at t* (`whole`), one pass over the whole sequence, with a graph from the span's first layer
    full       the whole sequence by the model's own ordinary call and plain autograd

Only positions >= t* can carry gradient to h_{t*}; all earlier ones are constants that a KV cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from semgrad_guard.engine.models.architecture import Architecture, virtual_tokens
from semgrad_guard.engine.replay.batch import (
    CACHE,
    Memory,
    PrefixLayer,
    TokenBatch,
    cache_bytes,
    cut,
    growing_cache,
    kept,
)
from semgrad_guard.engine.replay.captured_states import Capture, CapturedStates, Replayed
from semgrad_guard.engine.replay.context import ContextRows, Held
from semgrad_guard.engine.replay.hooks import (
    InputHook,
    LayerInputs,
    ModuleSwaps,
    activation_bytes,
    by_token,
    checkpointed,
    input_hooks,
    stoppable,
)
from semgrad_guard.engine.replay.kernels import Attentions, Outputs, Projections
from semgrad_guard.engine.replay.own_code import WithoutOriginals


class Replayer:
    """Runs the weight-sharing copy of one model. Not re-entrant: callers hold the engine's lock.

    `originals` are the weights of the user's model, where code of the user's could run them in the copy's place.
    """

    def __init__(
        self, model_copy: nn.Module, architecture: Architecture, originals: Iterable[torch.Tensor] = ()
    ) -> None:
        self.memory = Memory()
        originals = tuple(originals)
        self._guarded = WithoutOriginals(originals) if originals else nullcontext()
        self._bytes_per_position: dict[int, int] = {}  # from a first layer on; a walk over all weights otherwise
        self._architecture = architecture
        self._copy = model_copy
        for module in model_copy.modules():  # `generate` takes options that it is not given from there
            if "generation_config" in vars(module):
                vars(module)["generation_config"] = GenerationConfig()
        self._swaps = ModuleSwaps(self._copy, architecture)
        self._projections, self._attentions = Projections(self.layers), Attentions(self.layers)
        self._positioned = [module for module in model_copy.modules() if "rope_deltas" in vars(module)]
        self.token_axis = 1
        self._virtual = virtual_tokens(self._copy)

    @property
    def head(self) -> nn.Linear:
        """The output head, its weight not requiring a gradient."""
        return self._swaps.head

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The copy's decoder layers that text passes through; none where the architecture has no known list of them."""
        return self._swaps.layers

    @property
    def plain(self) -> bool:
        """Whether replays keep closer to the model's own code: with its attention, and with outputs that it may change.

        Some models read their configuration in the middle of their attention, or change the output of a map in place.
        """
        return self._projections.copies

    @plain.setter
    def plain(self, plain: bool) -> None:
        self._projections.copies, self._attentions.used = plain, not plain

    @property
    def layers_return_tuples(self) -> bool:
        """Whether a decoder layer answers with a tuple."""
        return self._swaps.layers_return_tuples()

    def captured(self, batch: TokenBatch, span: Sequence[int], captured: CapturedStates) -> Replayed:
        """Upper layers only, from the states and the cache of a generation (`captured.layer` <= the span's first)."""
        states = captured.states_of(batch)
        with self._swaps.bypassing(captured.layer):
            prefix, known = cut(captured.cache, batch.cut), captured.known_outputs(batch)
            replayed = self._run(batch, span, prefix, injected=(captured.layer, states), known=known)
        return replace(replayed, kept_logits=captured.raw_logits(batch))

    def in_context(
        self, batch: TokenBatch, span: Sequence[int], sources: Sequence[CapturedStates], *, bypasses: bool, merges: bool
    ) -> Replayed:
        """Rows whose context is constant, from what is known of each (`ContextRows`); `bypasses`: upper layers only.

        `merges`: both passes in one, where no layer has a window that is shorter than the rows.
        """
        layer = sources[0].layer if bypasses else 0
        rows, prompts, first = ContextRows(batch, sources, bypassed=layer), batch.prompts, batch.prompt_columns - 1
        hidden, table = self._leaf_hooks(span)

        def run(
            columns: Callable[[Held], torch.Tensor], table: dict[int, InputHook], live: slice, **called: Any
        ) -> torch.Tensor:
            if bypasses:
                above: InputHook = table.get(layer, lambda given: given)
                table[layer] = lambda _: above(columns(CapturedStates.states_between))
            return self._pass(table, span[0], partial(self._replaying, rows.outputs(columns), live), **called)

        with self._swaps.bypassing(layer):
            if merges and batch.longest <= (self._architecture.window or batch.longest):
                both = run(rows.of_both, table, slice(0), inputs=rows.inputs_of_both(), cache=rows.before_both())
                final = both[:, rows.prompt_columns :]
            else:
                cache, inputs = rows.before_prompts(), prompts.inputs(prompts.cut, prompts.prompt_columns)
                run(rows.of_prompts, table, slice(0), inputs=inputs, cache=cache)
                inputs, cache = batch.inputs(first, batch.end), rows.before_responses(cache)
                final = run(rows.of_responses, {}, rows.live, inputs=inputs, cache=cache)
        states = tuple(hidden[layer] for layer in span)
        steps = [source.steps(*of) for source, *of in zip(sources, batch.context, batch.lengths, strict=True)]
        logits = [step for row in steps for step in row] if all(steps) else None
        return Replayed(prompts.cut, final, states, first, kept_logits=logits, token_axis=self.token_axis)

    def with_keys(self, row: TokenBatch, captured: CapturedStates) -> CapturedStates:
        """The states of a row whose cache has the keys of all its columns up to the end, as far as layers need them."""
        layers: list[Any] = captured.cache.layers[captured.layer :]
        if all(layer.get_seq_length() >= row.end for layer in layers):
            return captured
        cache, states = kept(captured.cache, [0], 0, row.cut), captured.states_of(row)
        with (
            torch.no_grad(),
            self._swaps.bypassing(captured.layer),
            self._swaps.headless() as recorder,
            input_hooks(self.layers, {captured.layer: lambda _: states}),
            self._projections.replaying(captured.known_outputs(row)),
        ):
            self._call(row.inputs(row.cut, row.end), cache=cache)
            recorder.take()
        return replace(captured, cache=cache)

    def prefix(self, batch: TokenBatch, span: Sequence[int]) -> Replayed:
        """Prefill up to t* without a graph, then replay every layer from there."""
        cache: Cache | None = None
        if batch.cut > 0:
            cache = growing_cache()
            with torch.no_grad(), self._swaps.headless() as recorder, self._projections.replaying():
                self._call(batch.inputs(0, batch.cut), cache=cache)
                recorder.take()
            cache = cut(cache, batch.cut)
        return self._run(batch, span, cache, injected=None)

    def whole(self, row: TokenBatch, span: Sequence[int]) -> Replayed:
        """One pass over a row from its first token on, by the model's ordinary call, up to the head."""
        hidden, table = self._leaf_hooks(span)
        with torch.enable_grad(), self._swaps.headless() as recorder, input_hooks(self.layers, table):
            self._ordinary(row)
        final, states, columns = recorder.take(), tuple(hidden[layer] for layer in span), row.end + 1
        start, head_start = columns - states[0].shape[self.token_axis], columns - final.shape[1]
        return Replayed(start, final, states, head_start, token_axis=self.token_axis)

    def full(self, batch: TokenBatch, span: Sequence[int]) -> Replayed:
        """A row by the model's own ordinary call, with its tokens alone; nothing is cut, cached or left out.

        Keys and values of its context pass through a cache, which lets no gradient through them.

        Raises:
            UnsupportedModelError: there is context, and a layer has no keys and values by tokens.
        """
        raw: list[torch.Tensor] = []
        inputs = LayerInputs(self.layers, self._architecture.n_layers, span)
        embedding: Any = self._copy.get_input_embeddings()  # pyright: ignore
        with ExitStack() as stack:
            # A copy of the tensor with a gradient: some models scale it in place.
            began = embedding.register_forward_hook(lambda *call: call[2].detach().requires_grad_().clone())
            stack.callback(began.remove)
            stack.callback(self.head.register_forward_hook(lambda *call: raw.append(call[2].detach())).remove)
            weight = stack.enter_context(self._swaps.with_a_weight_of_its_own())
            stack.enter_context(inputs.watched())
            stack.enter_context(torch.enable_grad())
            options: dict[str, Any] = {"output_hidden_states": True}
            if self._architecture.takes_logits_to_keep:
                options["logits_to_keep"] = max(batch.lengths) + 1
            if batch.context:
                cache: Any = growing_cache()
                columns = slice(batch.prompt_columns - batch.context[0], batch.prompt_columns)
                cache.layer_class_to_replicate = partial(PrefixLayer, constant=columns)
                options |= {"use_cache": True, CACHE: cache}
            output = self._ordinary(batch, **options)
        columns = batch.end + 1
        hidden, self.token_axis = self._verified(inputs, output, columns)
        return Replayed(
            columns - hidden[0].shape[self.token_axis],
            None,
            hidden,
            columns - output.logits.shape[1],
            logits=output.logits,
            raw_logits=raw[-1] if raw else None,
            head_weight=weight,
            token_axis=self.token_axis,
        )

    def last_states(self, batch: TokenBatch, count: int) -> torch.Tensor:
        """h^(l) of the prompts for l = 0 .. L-1 at their last `count` tokens, without a graph: [B, L, count, d]."""
        n_layers = self._architecture.n_layers
        inputs = LayerInputs(self.layers, n_layers, range(n_layers))
        options = {"logits_to_keep": 1} if self._architecture.takes_logits_to_keep else {}
        with torch.no_grad(), inputs.watched():
            columns = batch.inputs(0, batch.prompt_columns)
            output = self._call(columns, cache=None, output_hidden_states=True, **options)
        hidden, axis = self._verified(inputs, output, batch.prompt_columns)
        return torch.stack([by_token(states, axis)[:, -count:] for states in hidden], dim=1)

    def generate(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        capture: Capture | None = None,
        *,
        cache: Cache | None = None,
        **options: Any,
    ) -> Any:
        """`model.generate` on the copy: no mode, hook or generation default of the user's model plays a part.

        With `capture`, the cache keeps every key, so that `captured` can replay from the states left. A `cache`
        (see `prefilled`) spares the columns that it holds.
        """
        if capture is not None:
            cache = growing_cache()
        with torch.no_grad(), self._capturing(capture), self._guarded, stoppable(self._stages()):
            model: Any = self._copy
            return model.generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **options)

    def step(self, ids: torch.Tensor, mask: torch.Tensor, cache: Cache, capture: Capture | None) -> torch.Tensor:
        """Read `ids` [B, n], the columns behind those of `cache`, which grows by them: the head's output [B, V] then.

        `mask` [B, N] tells of all columns, the new ones included.
        """
        positions = (mask.cumsum(1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        options = {"logits_to_keep": 1} if self._architecture.takes_logits_to_keep else {}
        with torch.no_grad(), self._capturing(capture):
            return self._call(inputs, cache=cache, **options).logits[:, -1]

    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        one, cache = torch.ones(1, 1, dtype=torch.long, device=self.head.weight.device), growing_cache()
        self.step(one, one, cache, None)
        return cache_bytes(cache)

    @contextmanager
    def _capturing(self, capture: Capture | None) -> Iterator[None]:
        """For the time of a block, `capture` sees what passes."""
        if capture is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(input_hooks(self.layers, {capture.layer: capture}))
            hook = self.head.register_forward_hook(lambda *call: capture.see_head(call[1][0], call[2]))
            stack.callback(hook.remove)
            stack.enter_context(self._projections.listening(capture.see_output))
            yield

    def prefilled(self, batch: TokenBatch, end: int, rows: Sequence[int]) -> Cache:
        """A cache of columns [0, end) > 0 for several continuations: its row i continues the batch's row `rows[i]`."""
        cache = growing_cache()
        with torch.no_grad(), self._swaps.headless() as recorder:
            self._call(batch.inputs(0, end), cache=cache)
            recorder.take()
        cache.reorder_cache(cast(torch.LongTensor, torch.tensor(rows, device=batch.ids.device)))
        return cache

    def read(
        self, batch: TokenBatch, start: int, *, cache: Cache | None, layer: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The model's own logits [B, T + 1, V], and h^(layer), from the column before the first scored token on.

        `cache` holds the columns before `start`, if there are any.
        """
        seen: list[torch.Tensor] = []
        table: dict[int, InputHook] = {} if layer is None else {layer: seen.append}
        keep = batch.end + 2 - batch.first
        options = {"logits_to_keep": keep} if self._architecture.takes_logits_to_keep else {}
        with torch.no_grad(), input_hooks(self.layers if table else [], table):
            inputs = batch.inputs(start, batch.end + 1)
            output = self._call(inputs, cache=cache, **options)
        return output.logits[:, -keep:], seen[0][:, -keep:] if seen else None

    def observed(self, batch: TokenBatch, layer: int, *, whole: bool = False) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The first of the columns, then h^(layer) and the states before the head, [B, columns, d] each.

        By one pass up to the batch's end, without a graph; a row by itself goes by the model's ordinary call. That
        reads the last token as well; with `whole` every pass does.
        """
        seen: list[torch.Tensor] = []
        with torch.no_grad(), self._swaps.headless() as recorder, input_hooks(self.layers, {layer: seen.append}):
            if alone := len(batch.lengths) == 1:
                self._ordinary(batch)
            else:
                self._call(batch.inputs(0, batch.end + whole))
        final = recorder.take()
        return batch.end + (alone or whole) - final.shape[1], by_token(seen[0], self.token_axis), final

    def record(self, batch: TokenBatch, layer: int) -> CapturedStates:
        """The states that a generation of this batch would have left (for self-checks)."""
        capture, cache = Capture(layer, batch.cut, memory=self.memory), growing_cache()
        with torch.no_grad(), self._swaps.headless() as recorder, input_hooks(self.layers, {layer: capture}):
            with self._projections.listening(capture.see_output):
                self._call(batch.inputs(0, batch.end, as_generated=True), cache=cache)
            recorder.take()
        return CapturedStates.of(cache, capture)

    def _run(
        self,
        batch: TokenBatch,
        span: Sequence[int],
        prefix: Cache | None,
        injected: tuple[int, torch.Tensor] | None,
        known: Outputs | None = None,
    ) -> Replayed:
        """Columns [cut, end) with the graph beginning at the span's first layer."""
        hidden, table = self._leaf_hooks(span)
        if injected is not None:
            layer, kept = injected
            above: InputHook = table.get(layer, lambda given: given)
            table[layer] = lambda _: above(kept)
        inputs = batch.inputs(batch.cut, batch.end)
        final = self._pass(table, span[0], partial(self._replaying, known), inputs=inputs, cache=prefix)
        states = tuple(hidden[layer] for layer in span)
        return Replayed(batch.cut, final, states, batch.cut, token_axis=self.token_axis)

    def most_positions(self, first: int) -> int:
        """At how many positions the states of the layers from `first` on are kept for a backward pass."""
        if first not in self._bytes_per_position:
            self._bytes_per_position[first] = activation_bytes(list(self.layers)[first:], 1)
        return self.memory.activations // self._bytes_per_position[first]

    def _pass(
        self,
        table: Mapping[int, InputHook],
        first: int,
        replaying: Callable[[], AbstractContextManager[None]],
        *,
        inputs: dict[str, torch.Tensor],
        cache: Cache | None,
    ) -> torch.Tensor:
        """The states before the head, with a graph from layer `first` on.

        Where it would not fit, no more of it is kept than the layers' inputs.
        """
        layers = list(self.layers)[first:]
        fits = inputs["input_ids"].numel() <= self.most_positions(first)
        graph = nullcontext() if fits else checkpointed(layers, replaying)
        with (
            torch.enable_grad(),
            graph,
            self._swaps.headless() as recorder,
            input_hooks(self.layers, table),
            replaying(),
        ):
            self._call(inputs, cache=cache)
        return recorder.take()

    def _leaf_hooks(self, span: Sequence[int]) -> tuple[dict[int, torch.Tensor], dict[int, InputHook]]:
        """Hooks for a replay whose graph begins at the span's first layer, and where they put its hidden states."""
        hidden: dict[int, torch.Tensor] = {}

        def leaf(states: torch.Tensor) -> torch.Tensor:
            hidden[span[0]] = states.detach().requires_grad_()
            return hidden[span[0]]

        return hidden, {**{layer: partial(hidden.__setitem__, layer) for layer in span[1:]}, span[0]: leaf}

    @contextmanager
    def _replaying(self, known: Outputs | None, live: slice | None = None) -> Iterator[None]:
        """The faster ways of a replay, for the time of a block."""
        with self._projections.replaying(known), self._attentions.replaying(live):
            yield

    def _ordinary(self, row: TokenBatch, **options: Any) -> Any:
        """The model's ordinary call: with a row's tokens alone, to the last, which predicts nothing but has a place in
        a sequence on whose length rotary frequencies may depend."""
        with self._guarded, stoppable(self._stages()):
            return self._copy(input_ids=row.ids[:, : row.end + 1], **{"use_cache": False, **options})

    def _call(self, inputs: dict[str, torch.Tensor], *, cache: Cache | None = None, **options: Any) -> Any:
        if not self._architecture.takes_positions:
            inputs.pop("position_ids", None)
        for module in self._positioned:  # the values of a generation belong to its own positions
            cast(Any, module).rope_deltas = None
        with self._guarded, stoppable(self._stages()):
            held = {"use_cache": False} if cache is None else {"use_cache": True, CACHE: cache}
            return self._copy(**inputs, **held, **options)

    def _verified(self, inputs: LayerInputs, output: Any, columns: int) -> tuple[tuple[torch.Tensor, ...], int]:
        # Columns of the model's own may precede the batch's: the virtual tokens of a tuned prompt.
        known = {columns + own for own in self._virtual}
        return inputs.verified(output.hidden_states, type(self._copy).__name__, known)

    def _stages(self) -> Sequence[nn.Module]:
        """The modules before which a pass may be interrupted: the decoder layers and the head."""
        return [*self.layers, self.head]
