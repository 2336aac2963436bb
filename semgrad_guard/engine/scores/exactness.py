"""Which ways of scoring are exact on a model: they are held against its own ordinary call and plain autograd.

This is done once, on short made-up prompts, in float32 (or float64) whatever the model's dtype is: bfloat16's own noise
hides errors of ten per cent and more. A model in half precision is checked by a copy in float32, or a few layers of it
where the copy would be large; in its own dtype it must then agree as far as that allows.

Code that branches on the length of its input can be exact there and wrong elsewhere: `scorer.py` compares real scores.

Why: docs/decisions.md#0095
Why: docs/decisions.md#0096
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from types import MethodType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from transformers import GenerationConfig

from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.replay.memory import Memory, is_out_of_memory
from semgrad_guard.engine.replay.tape import Row, cache_bytes, growing_cache, read
from semgrad_guard.engine.replay.twin import Twin, weight_sharing_copy
from semgrad_guard.engine.scores.gradients import (
    NO_GRADIENT,
    GradientScores,
    continued_scores,
    deviation,
    replayed,
    tolerance_of,
)
from semgrad_guard.engine.scores.observed import observed_layer
from semgrad_guard.engine.scores.ordinary import Ordinary, no_gradient
from semgrad_guard.errors import AnswerInterruptedError, SemGradGuardError, UnsupportedModelError

logger = logging.getLogger("semgrad_guard")

Way = Literal["rows", "continued", "ordinary"]
"""How whole answers are scored exactly: as rows over constants, from a cache that is cut, or by the ordinary call."""

T = TypeVar("T")

_PROMPT, _SHORT_PROMPT, _RESPONSE, _CONTEXT, _STEPS = 9, 5, 4, 2, 3


@dataclass(frozen=True)
class Exactness:
    """The result of a self-check.

    `way` is the cheapest that is exact for whole answers, `in_context` the one for a response with context, None where
    keys and values cannot be constants. `deviation` is how far it was off. `joins`: answers may join and leave a
    batch that is being written, and `stacks`: rows of equal length may be written together. `transform` follows the
    head, `token_axis` is that of hidden states. `failure` is the reason why nothing could be compared (broken weights).
    `token_bytes` is the size of a token's keys and values, where answers can join.
    """

    way: Way = "ordinary"
    in_context: Way | None = None
    joins: bool = False
    stacks: bool = False
    deviation: float = 0.0
    transform: LogitTransform = field(default_factory=LogitTransform)
    token_axis: int = 1
    failure: str | None = None
    token_bytes: int = 0

    def stepped_down(self) -> Exactness:
        """Nothing but the ordinary call is trusted."""
        context: Way | None = None if self.in_context is None else "ordinary"
        return replace(self, way="ordinary", in_context=context, joins=False, stacks=False, deviation=0.0)


def checked(twin: Twin, model: nn.Module) -> Exactness:
    """Which ways are exact on a model.

    Raises:
        UnsupportedModelError: the model's own ordinary call cannot be differentiated; the message gives the reason.
    """
    check = _Check(twin)
    _, expected = check.long
    if expected.reason is not None:
        return Exactness(transform=twin.architecture.transform, failure=expected.reason)
    if not twin.layers:
        found = Exactness(transform=twin.architecture.transform)
    elif twin.head.weight.dtype.itemsize < torch.float32.itemsize:
        found = _by_wide_copy(check, model)
    else:
        found = check.found()
    if found.way == "ordinary":
        logger.warning(
            "semgrad-guard scores this model by its ordinary call: %s", check.why or "its layers are unknown"
        )
    stacks = check.stands_alone(equal=True)
    joins = found.way == "rows" and check.stands_alone(equal=False)
    return replace(found, stacks=stacks or joins, joins=joins, token_bytes=token_bytes(twin) if joins else 0)


def _by_wide_copy(check: _Check, model: nn.Module) -> Exactness:
    """The result of a float32 copy, as far as the model in its own dtype does not contradict it."""

    def by_copy() -> Exactness:
        return _Check(wide_copy(model, torch.float32)).found()

    found = _attempted(
        by_copy, lambda error: logger.warning("semgrad-guard: no check in float32 is possible (%r)", error)
    )
    if found is None:  # an unchecked way is not used
        return Exactness(transform=check.transform)
    return found if check.agrees(found) else found.stepped_down()


class _Check:
    """The comparisons on one twin."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        n = twin.architecture.n_layers
        # A layer with others to leave out below it and to replay above, and the last.
        self._span = tuple(sorted({observed_layer(n), n - 1}))
        self._tolerance = tolerance_of(twin.head.weight.dtype)
        self.why = ""
        window = twin.architecture.window or twin.architecture.chunk or 0
        self._prompt = max(_PROMPT, window + 2) if window <= 2 * _PROMPT else _PROMPT  # rows that exceed a small window

    @cached_property
    def long(self) -> tuple[Ordinary, GradientScores]:
        """The model's ordinary call on the long prompt, and its scores by plain autograd; it settles the span."""
        call, expected = self._called(self._row(self._prompt))
        while expected.reason == NO_GRADIENT and self._span[0] > 0:
            # Nothing may come through an upper layer's state at t*: layers that attend to the keys of lower ones
            # alone pass nothing on from token to token. Lower layers do.
            self._span = (self._span[0] - 1,)
            call, expected = self._called(self._row(self._prompt))
        if expected.reason == NO_GRADIENT:
            raise no_gradient()
        return call, expected

    def found(self) -> Exactness:
        """The cheapest exact ways."""
        call, scores = self.long
        expected = [scores, self._ordinary(self._row(_SHORT_PROMPT))]
        self._tolerance = max(self._tolerance, tolerance_of(call.logits.dtype))  # some round them to float32
        transform = _measured(self._twin.architecture.transform, call.raw, call.logits.detach())
        basis = Exactness(transform=transform, token_axis=call.token_axis)
        rows = [self._row(self._prompt), self._row(_SHORT_PROMPT)]
        if (off := self._off("rows", rows, expected, basis)) is not None:
            found = replace(basis, way="rows", deviation=off)
        elif (off := self._off("continued", rows[:1], expected[:1], basis)) is not None:
            found = replace(basis, way="continued", deviation=off)
        else:
            found = basis
        return replace(found, in_context=self._in_context(found))

    @property
    def transform(self) -> LogitTransform:
        """What the configuration says of the step behind the head."""
        return self._twin.architecture.transform

    def agrees(self, found: Exactness) -> bool:
        """Whether a way agrees with plain autograd in this twin's dtype, as far as that allows."""
        rows = [self._row(self._prompt)]
        return found.way == "ordinary" or self._off(found.way, rows, [self.long[1]], found) is not None

    def _in_context(self, found: Exactness) -> Way | None:
        """How a response with context is scored exactly."""
        if not self._twin.architecture.attends:
            return None
        row = replace(self._row(self._prompt), begin=self._prompt + _CONTEXT, in_context=True)
        expected = _attempted(lambda: self._ordinary(row), lambda _: None)
        plain = self._ordinary(replace(row, in_context=False))
        # Of the numbers, context changes none but SemGrad.
        if (
            expected is None
            or deviation(replace(expected, semgrad=plain.semgrad, grid=plain.grid), plain) > self._tolerance
        ):
            return None
        return "rows" if found.way == "rows" and self._off("rows", [row], [expected], found) is not None else "ordinary"

    def stands_alone(self, *, equal: bool) -> bool:
        """Whether rows that are written together, padded on the left unless `equal`, give the logits that each gives
        alone, cached steps included; unknown is no."""
        agree = _attempted(lambda: self._rows_agree(equal), lambda error: setattr(self, "why", repr(error)))
        return bool(agree)

    def _rows_agree(self, equal: bool) -> bool:
        lengths = [_PROMPT, _PROMPT] if equal else [_PROMPT, _SHORT_PROMPT]
        rows = [list(self._row(_PROMPT, shift=place).ids[:length]) for place, length in enumerate(lengths)]
        steps = _written if equal else _steps
        together = steps(self._twin, rows)
        tolerance = tolerance_of(self._twin.head.weight.dtype)
        for place, row in enumerate(rows):
            for ours, alone in zip(together, steps(self._twin, [row]), strict=True):
                # NaN is no agreement
                if not bool((ours[place] - alone[0]).abs().max() <= tolerance * alone[0].abs().max()):
                    return False
                if ours[place].argmax() != alone[0].argmax():
                    break  # a tie that fell the other way: from here on texts may differ
        return True

    @property
    def _spanned(self) -> Objective:
        return Objective(layers=self._span)

    def _ordinary(self, row: Row) -> GradientScores:
        return self._called(row)[1]

    def _called(self, row: Row) -> tuple[Ordinary, GradientScores]:
        """The ordinary call on a row, and its scores.

        Raises:
            UnsupportedModelError: it fails, or cannot be differentiated.
        """
        try:
            call = Ordinary(self._twin, row, self._span)
            return call, call.scores(self._spanned)
        except SemGradGuardError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModelError(
                "this model's own ordinary call cannot be differentiated: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]} Check that model(input_ids=...) runs by "
                "itself; if it does, its code rules a gradient score out."
            ) from error

    def _off(self, way: Way, rows: Sequence[Row], expected: Sequence[GradientScores], known: Exactness) -> float | None:
        """How far a way is off; None if that is too far, or it fails."""

        def complain(error: Exception) -> None:
            self.why = f"{way} fail ({error!r})"

        found = _attempted(
            lambda: scores_by(way, self._twin, rows, self._spanned, known=known, memory=Memory()), complain
        )
        if found is None:
            return None
        off = max(deviation(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        self.why = f"{way} disagree with autograd by {off:.1%}" if off > self._tolerance else self.why
        return off if off <= self._tolerance else None

    def _row(self, prompt: int, *, shift: int = 0) -> Row:
        """A made-up row with a prompt of so many tokens."""
        vocabulary = self._twin.head.weight.shape[0]
        ids = [(7919 * (i + shift) + 104729) % vocabulary for i in range(self._prompt + _RESPONSE)]
        return Row.of(ids[:prompt], ids[self._prompt :], -3, self._spanned)


def scores_by(
    way: Way, twin: Twin, rows: Sequence[Row], objective: Objective, *, known: Exactness, memory: Memory
) -> list[GradientScores]:
    """The scores of rows in one way, whatever is on tape."""
    span = objective.span(twin.architecture.n_layers)
    if way == "ordinary":
        return [Ordinary(twin, row, span).scores(objective) for row in rows]
    if way == "continued":
        return [
            continued_scores(
                twin, row, objective, transform=known.transform, memory=memory, token_axis=known.token_axis
            )
            for row in rows
        ]
    return replayed(twin, read(twin, rows, span[0], memory=memory), objective, transform=known.transform, memory=memory)


def _attempted(work: Callable[[], T], complain: Callable[[Exception], None]) -> T | None:
    """The result of `work`; None where it fails, for unknown model code may fail in any way."""
    try:
        return work()
    except AnswerInterruptedError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # no matter of the way
            raise
        complain(error)
        return None


@torch.no_grad()
def _steps(twin: Twin, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits [rows, V] behind prompts that are padded on the left, and behind some further tokens of each."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=twin.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=twin.device)
    cache, found = growing_cache(), list[torch.Tensor]()
    twin.reset()
    for step in range(_STEPS):
        found.append(twin.step(ids, mask, cache).double())
        ids = torch.full((len(rows), 1), 3 + step, device=twin.device)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return found


def _written(twin: Twin, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits [rows, V] of some steps of a whole run, as the library makes it."""
    ids = torch.tensor(rows, device=twin.device)
    config = GenerationConfig(
        max_new_tokens=_STEPS, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    with torch.no_grad():
        output = twin.generate(ids, torch.ones_like(ids), generation_config=config)
    return [step.double() for step in output.logits]


def token_bytes(twin: Twin) -> int:
    """Bytes of one token's keys and values."""
    one, cache = torch.ones(1, 1, dtype=torch.long, device=twin.device), growing_cache()
    with torch.no_grad():
        twin.step(one, one, cache)
    return cache_bytes(cache)


def _measured(declared: LogitTransform, raw: torch.Tensor | None, logits: torch.Tensor) -> LogitTransform:
    """The transform after the head: as the config declares if that is so, else the factor, or the cap, that is seen."""
    if raw is None or raw.shape != logits.shape:
        return declared
    raw, logits = raw.double().flatten(), logits.double().flatten()

    def explains(transform: LogitTransform) -> bool:
        return bool(torch.allclose(transform(raw), logits, rtol=1e-4, atol=1e-5 * float(logits.abs().max())))

    greatest = raw.abs().topk(min(64, len(raw))).indices
    seen = (
        LogitTransform(scale=float((logits[greatest] / raw[greatest]).median())),
        LogitTransform(softcap=_cap(float(raw[greatest[0]]), float(logits[greatest[0]]))),
    )
    return next((transform for transform in (declared, *seen) if explains(transform)), declared)


def _cap(raw: float, capped: float) -> float:
    """The c of c tanh(raw / c) = capped, by bisection."""
    low, high = abs(capped), 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.tanh(abs(raw) / middle) < abs(capped) else (low, middle)
    return high


WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
"""The format in which a format's own rounding does not show."""

_ALL_BYTES = 256 << 20  # in the wider format, up to which every layer is taken


def wide_copy(model: nn.Module, wider: torch.dtype) -> Twin:
    """A twin of `model` in `wider` that shares the tensors that are as wide already.

    Which way is exact depends on a model's code, not on its numbers. So where all layers would be large, one of each
    kind in the lower and in the upper half represents the rest, which hand on their input; and linear maps with
    quantized weights are replaced by plain ones of their shape with random weights.
    """
    copied = weight_sharing_copy(model)
    twin = Twin(copied)
    path, left_out = twin.architecture.layers, set[int]()
    if path is not None and sum(p.numel() for p in copied.parameters()) * wider.itemsize > _ALL_BYTES:
        layers = cast(nn.ModuleList, copied.get_submodule(path))
        first = observed_layer(len(layers))
        kinds: dict[tuple[bool, Hashable], list[int]] = {}
        for place, layer in enumerate(layers):
            kinds.setdefault((place < first, _kind(layer)), []).append(place)
        kept = {place for (below, _), places in kinds.items() for place in (places[0], places[0 if below else -1])}
        hands_on = twin.hands_on
        for place, layer in enumerate(layers):
            if place not in kept:
                left_out.update(map(id, layer.modules()))
                vars(layer)["forward"] = MethodType(lambda _, *args, **kwargs: hands_on(*args, **kwargs), layer)
    _widen(copied, wider, left_out, {}, torch.Generator().manual_seed(0))
    return Twin(copied)


def _kind(layer: nn.Module) -> Hashable:
    """The traits of a layer: the types of their modules, the shapes of their weights, and plain settings."""
    settings = [
        (name, value)
        for name, value in vars(layer).items()
        if isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and "idx" not in name)
    ]
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    windows = [getattr(module, "sliding_window", None) for module in layer.modules()]
    return (*(type(module) for module in layer.modules()), *settings, *shapes, *windows)


def _widen(
    module: nn.Module, wider: torch.dtype, left_out: set[int], done: dict[int, Any], generator: torch.Generator
) -> None:
    """Turn a copy's tensors into `wider`, in place of the copy's references alone."""
    if id(module) in left_out or id(module) in done:
        return
    done[id(module)] = module
    for name, parameter in module._parameters.items():
        if parameter is not None and _is_narrower(parameter, wider):
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(parameter.detach().to(wider), requires_grad=False)
            module._parameters[name] = done[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None and _is_narrower(buffer, wider):
            module._buffers[name] = buffer.detach().to(wider)
    for name, child in module._modules.items():
        if child is None:
            continue
        if plain := _plain_map(child, wider, generator):
            module._modules[name] = plain
        else:
            _widen(child, wider, left_out, done, generator)


def _is_narrower(tensor: torch.Tensor, wider: torch.dtype) -> bool:
    return tensor.dtype in WIDER and tensor.dtype.itemsize < wider.itemsize


def _plain_map(quantized: nn.Module, wider: torch.dtype, generator: torch.Generator) -> nn.Linear | None:
    """A linear map in the place of a quantized one; None where the module is not such a one."""
    own = [tensor for tensor in (*quantized._parameters.values(), *quantized._buffers.values()) if tensor is not None]
    is_plain = all(type(tensor.data) is torch.Tensor and tensor.is_floating_point() for tensor in own)
    if is_plain or not (hasattr(quantized, "in_features") and hasattr(quantized, "out_features")):
        return None
    inputs, outputs = int(cast(Any, quantized.in_features)), int(cast(Any, quantized.out_features))
    device = next(chain(quantized.parameters(), quantized.buffers())).device
    plain = nn.Linear(inputs, outputs, bias=False, device="meta")
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    plain.weight = nn.Parameter(weight.to(device, wider), requires_grad=False)
    return plain
