"""The replay: rows of live positions once more, with a graph, over constants that a tape holds.

A whole answer, a sentence of one, and a batch of either are rows of one replay:

- the keys of a row are its constants and its live positions, by position; a query sees keys at no later position than
  its own, and in a layer with a window, or with chunks, no further back than that. Rows are padded, and padding sees
  padding alone;
- layers below k hand on their input, and layer k gets the kept h^(k). The graph begins with the span's first layer;
- attention takes a few queries over keys of which most are constants: the library's differentiates all keys, and
  repeats those that several query heads share (135M parameters, 1,000 tokens and 8: a score takes .6 of its time);
- linear maps answer with what they answered when the text was read (their backward is the product by the weight);
- the head is not run: its share of the gradient is computed from the states before it (`scores/head.py`).

Models whose layers hold a state, or share the keys of others, have no constants by position. Of a whole answer the live
positions are one run: there the model's own call continues from a cache that ends before the first (`continued`).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from semgrad_guard.engine.scores.head import precise_dtype
from semgrad_guard.engine.scores.tape import Recorder, Row, Span, Tape
from semgrad_guard.engine.scores.twin import ATTENTION, CACHE, InputHook, Place, Twin, replaced

Graph = tuple[torch.Tensor, list[torch.Tensor]]
"""The states [n, d] that predict the scored tokens, row after row; and h^(l) at the live positions of each row
[B, columns, width], for each layer of a span, from which these were computed."""

_NEVER = 1 << 30  # the position of padding


class FixedLayer(DynamicLayer):
    """Keys and values [B, heads, n, d] before the live ones, which `update` joins and does not keep.

    At the columns where `still` [B, columns] is true the new ones let no gradient pass.
    """

    def __init__(self, fixed: Sequence[torch.Tensor] = (), still: torch.Tensor | None = None) -> None:
        super().__init__()
        self._fixed, self._still = fixed, still
        if fixed:
            self.keys, self.values = fixed
            self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = [key_states, value_states]
        if self._still is not None:
            new = [torch.where(self._still[:, None, :, None], x.detach(), x) for x in new]
        if self._fixed:
            new = [torch.cat(halves, dim=-2) for halves in zip(self._fixed, new, strict=True)]
        return new[0], new[1]


@contextmanager
def replay(twin: Twin, rows: Sequence[Row], span: Sequence[int], *, fits: bool = True) -> Iterator[Graph]:
    """The graph of rows whose tapes hold what they need (`Row.is_on`). The backward pass belongs into the block.

    Where the graph does not fit, nothing but the layers' inputs is kept for that.
    """
    device, outputs = twin.device, _KnownOutputs(rows)
    live = [_positions(row.live) for row in rows]
    before = [_positions(row.constants) for row in rows]
    width = max(map(len, before))
    queries = pad_sequence(live, batch_first=True, padding_value=_NEVER)
    fixed = torch.stack([F.pad(places, (width - len(places), 0), value=_NEVER) for places in before])
    states = pad_sequence([row.taped.hidden(row.live) for row in rows], batch_first=True)
    hidden, table = _leaves(span, states)
    still = None
    if any(row.in_context for row in rows):
        # The last constant token predicts the first scored one: live as a query, and not as a key.
        marks = torch.tensor([row.begin - 1 if row.in_context else -1 for row in rows])
        still = (queries == marks[:, None]).to(device)
    cache = Cache(layers=list(_fixed_layers(twin, rows, width, still)))
    ids = pad_sequence(
        [torch.tensor(row.ids)[places] for row, places in zip(rows, live, strict=True)], batch_first=True
    )
    inputs = {
        "attention_mask": _masks(twin, queries, fixed, states),
        "position_ids": queries.masked_fill(queries == _NEVER, 0).to(device),
    }
    twin.reset()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(nullcontext() if fits else _checkpointed(twin.layers[span[0] :]))
        stack.enter_context(twin.with_maps(knows=outputs))
        stack.enter_context(attending(twin.attention_configs))
        found = stack.enter_context(twin.headless())
        with twin.above(span[0]), twin.watching(table), outputs.in_no_graph():
            twin.call(ids.to(device), cache=cache, **inputs)
        final, counts = found.pop(), list(map(len, live))
        ends = zip(final, rows, counts, strict=True)
        predicting = torch.cat([own[count - row.length : count] for own, row, count in ends])
        yield predicting, [hidden[layer] for layer in span]


@contextmanager
def continued(twin: Twin, row: Row, span: Sequence[int]) -> Iterator[Graph]:
    """The graph of a whole answer by the model's own call, from a cache that ends where live positions begin.

    It begins with the span's first layer where a tape holds the states that this was given.
    """
    ids = torch.tensor([row.ids[: row.end]], device=twin.device)
    (begin, end) = row.live[0]
    is_kept = row.tape is not None and row.tape.cut is not None and row.tape.begin == begin
    kept = row.taped.hidden(row.live)[None] if is_kept and row.taped.layer == span[0] and row.taped.end >= end else None
    twin.reset()
    cache = copy.deepcopy(row.taped.cut) if is_kept else cut_cache(twin, ids[:, :begin])
    for layer in getattr(cache, "layers", ()):
        states = {name: value for name, value in vars(layer).items() if name in _STATES}
        vars(layer).update({name: _Copies(value) for name, value in states.items()})
    hidden, table = _leaves(span, kept)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(twin.above(0 if kept is None else span[0]))
        found = stack.enter_context(twin.headless())
        with twin.watching(table):
            twin.call(ids[:, begin : row.end if kept is None else end], cache=cache)
        yield found[0][0, row.begin - 1 - begin : end - begin], [hidden[layer] for layer in span]


@torch.no_grad()
def written(twin: Twin, row: Row, layer: int) -> Row:
    """A whole answer on the tape that writing it leaves for `continued`: h^(k) of its live positions, k = `layer`."""
    ids, recorder = torch.tensor([row.ids[: row.end]], device=twin.device), Recorder(layer)
    (begin, end) = row.live[0]
    twin.reset()
    cut = cut_cache(twin, ids[:, :begin])
    with twin.headless(), twin.watching({layer: recorder.see_hidden}):
        twin.call(ids[:, begin:end], cache=copy.deepcopy(cut))
    return replace(row, tape=Tape(((recorder, 0),), begin, row.prompt - 1, (), cut=cut))


_STATES = ("conv_states", "recurrent_states")  # of a layer of transformers' caches


class _Copies(dict[int, "torch.Tensor | None"]):
    """A layer's states, handed out as copies.

    The library writes a new state over the one before, which the backward pass needs; a single call needs no new one.
    """

    def __getitem__(self, number: int) -> torch.Tensor | None:
        state = super().__getitem__(number)
        return None if state is None else state.clone()


@torch.no_grad()
def cut_cache(twin: Twin, ids: torch.Tensor) -> Cache | None:
    """A cache of the model's own kind behind token ids [1, n]; None where n is 0."""
    if not ids.shape[1]:
        return None
    with twin.headless():
        found: Cache = getattr(twin.call(ids, use_cache=True), CACHE)
    return found


def _positions(spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([torch.arange(*span) for span in spans])


def _leaves(
    span: Sequence[int], kept: torch.Tensor | None = None
) -> tuple[dict[int, torch.Tensor], dict[int, InputHook]]:
    """Hooks for a graph that begins at the span's first layer, there with what was kept, and its hidden states."""
    hidden: dict[int, torch.Tensor] = {}

    def leaf(states: torch.Tensor) -> torch.Tensor:
        hidden[span[0]] = (states if kept is None else kept).detach().requires_grad_()
        return hidden[span[0]]

    return hidden, {**{layer: partial(hidden.__setitem__, layer) for layer in span[1:]}, span[0]: leaf}


class _KnownOutputs:
    """The outputs of linear maps that all tapes hold at the live positions: [B, columns, out], where one is known.

    Together they are the most of what a tape holds. Each is put together when its layer runs, and a graph that is made
    `in_no_graph` holds none: its backward pass has them put together once more.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._places = set[Place].intersection(*(row.taped.places(row.live) for row in rows))
        self._latest = deque[tuple[Place, torch.Tensor]](maxlen=2)  # a product takes two

    def __call__(self, place: Place) -> torch.Tensor | None:
        if place not in self._places:
            return None
        output = self._together(place)
        self._latest.append((place, output))
        return output

    @contextmanager
    def in_no_graph(self) -> Iterator[None]:
        """For the time of a block, graphs refer to these outputs by their place."""
        with saved_tensors_hooks(self._packed, self._unpacked):
            yield
        self._latest.clear()

    def _packed(self, saved: torch.Tensor) -> Any:
        address = saved.untyped_storage().data_ptr()
        known = (place for place, output in self._latest if output.untyped_storage().data_ptr() == address)
        place = next(known, None)
        return saved if place is None else (place, saved.shape, saved.stride(), saved.storage_offset())

    def _unpacked(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else self._together(packed[0]).as_strided(*packed[1:])

    def _together(self, place: Place) -> torch.Tensor:
        own = [row.taped.output(place, row.live) for row in self._rows]
        return own[0][None] if len(own) == 1 else pad_sequence(own, batch_first=True)


def _masks(twin: Twin, queries: torch.Tensor, fixed: torch.Tensor, states: torch.Tensor) -> Any:
    """What each query sees [B, 1, queries, keys]; by the kind of layer, where a model has layers of several kinds."""
    keys = torch.cat([fixed, queries], dim=1)[:, None]
    places = queries[:, :, None]
    padding = (places == _NEVER) & (keys == _NEVER)  # so that no row of the softmax is empty
    sees = ((keys <= places) & (keys != _NEVER)) | padding

    def mask(allowed: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(allowed.shape, dtype=states.dtype).masked_fill_(~allowed, torch.finfo(states.dtype).min)
        return found[:, None].to(states.device)

    kinds, window, chunk = twin.architecture.kinds, twin.architecture.window, twin.architecture.chunk
    if chunk is not None and "chunked_attention" in kinds:
        kind, near = "chunked_attention", keys // chunk == places // chunk
    elif window is not None and (not kinds or "sliding_attention" in kinds):
        kind, near = "sliding_attention", keys > places - window
    else:
        return mask(sees)
    some = mask(sees & (near | padding))
    return {"full_attention": mask(sees), kind: some} if len(kinds) > 1 else some


def _fixed_layers(twin: Twin, rows: Sequence[Row], width: int, still: torch.Tensor | None) -> Iterator[DynamicLayer]:
    """The cache's layers: of those below the tape's, of which nothing is read, as many columns of zeros."""
    tapes = [row.taped for row in rows]
    lowest = twin.places[tapes[0].layer]
    for number, layers in enumerate(zip(*(tape.keys for tape in tapes), strict=True)):
        known = [keys for keys in layers if keys is not None]
        if number < lowest:
            nothing = torch.zeros(1, device=twin.device).expand(len(rows), 1, width, 1)
            yield FixedLayer((nothing, nothing))
        elif not known:
            yield DynamicLayer()
        else:
            yield FixedLayer([_laid_out(half, rows, width) for half in zip(*known, strict=True)], still)


def _laid_out(half: Sequence[torch.Tensor], rows: Sequence[Row], width: int) -> torch.Tensor:
    """The constants of rows' keys, or values, [heads, positions, d]: below each other, padded on the left."""
    own: list[torch.Tensor] = []
    for keys, row in zip(half, rows, strict=True):
        first, *others = [keys[:, begin:end] for begin, end in row.constants]
        own.append(torch.cat([first, *others], dim=1) if others else first)
    if len(own) == 1:
        return own[0][None]
    return torch.stack([F.pad(keys, (0, 0, width - keys.shape[1], 0)) for keys in own])


@contextmanager
def _checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """For the time of a block, the backward pass included, layers keep nothing but their inputs."""
    with ExitStack() as stack:
        for layer in layers:
            # Evaluation mode draws no random numbers; the caller's generators are left alone.
            frugal = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            stack.enter_context(replaced(layer, frugal))
        yield


# Attention of few queries over long rows.

_NAME = "semgrad_guard_replay"
_MORE = ("position_bias", "softcap", "s_aux", "cache")  # options that some models pass to attention as well
_WEIGHTS = 1 << 22  # entries of one layer's attention weights, which are kept for the backward pass


@contextmanager
def attending(configs: Iterable[Any]) -> Iterator[None]:
    """For the time of a block the modules of these configurations, a twin's own, attend by `attend`."""
    try:
        for config in configs:
            config._attn_implementation_internal = _NAME
        yield
    finally:
        for config in configs:
            config._attn_implementation_internal = ATTENTION


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, H, n, d], key [B, G, N, d], value [B, G, N, e] to [B, n, H, e].

    The queries are the last n of the N positions. Where they are many, where the mask has a gradient of its own, or
    where a model needs more than a mask, the library's own attention answers. Products and softmax are taken in float32
    (float64 for float64), whatever the model's dtype is.
    """
    batch, heads, n, d = query.shape
    plain = attention_mask is None or attention_mask.requires_grad or batch * heads * n * key.shape[2] > _WEIGHTS
    if plain or any(options.get(name) is not None for name in _MORE):
        return ALL_ATTENTION_FUNCTIONS[ATTENTION](module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = d**-0.5 if scaling is None else scaling
    output: Any = _Attended.apply(scale, query, key, value, attention_mask)
    return output.transpose(1, 2).contiguous(), None


class _Attended(torch.autograd.Function):
    """softmax(Q K^T + mask) V, which is computed again for its backward pass: a graph would hold the most for this."""

    @staticmethod
    def forward(ctx: Any, scale: float, *inputs: Any) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.scale = scale
        return _attended(*inputs, scale=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *inputs, mask = ctx.saved_tensors
        inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            output = _attended(*inputs, mask, scale=ctx.scale)
        return (None, *torch.autograd.grad(output, inputs, gradients), None)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """[B, H, n, e]; keys and values before the queries' own let no gradient pass."""
    (batch, heads, n, _), groups, first = query.shape, key.shape[1], key.shape[2] - query.shape[2]
    dtype = precise_dtype(query)
    rows = (query.to(dtype) * scale).reshape(batch, groups, n * heads // groups, -1)
    fixed = [half[:, :, :first].detach().to(dtype) for half in (key, value)]
    live = [half[:, :, first:].to(dtype) for half in (key, value)]
    scores = torch.cat([rows @ keys.transpose(2, 3) for keys in (fixed[0], live[0])], dim=3)
    # One mask for all heads, or one for each: those of the heads that share keys lie side by side.
    mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (groups, -1))
    shares = (scores.view(batch, groups, heads // groups, n, -1) + mask).softmax(-1).view(scores.shape)
    found = shares[..., :first] @ fixed[1] + shares[..., first:] @ live[1]
    return found.view(batch, heads, n, -1).to(query.dtype)


AttentionInterface.register(_NAME, attend)
