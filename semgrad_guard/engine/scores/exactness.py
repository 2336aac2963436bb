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
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.scores.gradients import (
    NO_GRADIENT,
    GradientScores,
    Observation,
    Ordinary,
    deviation,
    no_gradient,
    observed_layer,
    replayed,
    tolerance_of,
)
from semgrad_guard.engine.scores.replay import written
from semgrad_guard.engine.scores.tape import Memory, Row, growing_cache, is_out_of_memory, read
from semgrad_guard.engine.scores.twin import Twin
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
    keys and values cannot be constants. `deviation` is how far it was off; None where nothing could be compared (broken
    weights). `joins`: answers may join and leave a batch that is being written. `transform` follows the head,
    `token_axis` is that of hidden states. `begins`: a continuation may begin with states that writing kept.
    `token_bytes` is the size of a token's keys and values, where they can.
    """

    way: Way = "ordinary"
    in_context: Way | None = None
    joins: bool = False
    deviation: float | None = 0.0
    transform: LogitTransform = field(default_factory=LogitTransform)
    token_axis: int = 1
    begins: bool = False
    token_bytes: int = 0

    def stepped_down(self) -> Exactness:
        """Nothing but the ordinary call is trusted."""
        context: Way | None = None if self.in_context is None else "ordinary"
        return replace(self, way="ordinary", in_context=context, joins=False, deviation=0.0)


def scores_by(
    way: Way,
    twin: Twin,
    rows: Sequence[Row],
    objective: Objective,
    *,
    known: Exactness,
    memory: Memory,
    fits: bool = True,
) -> list[GradientScores]:
    """The scores of rows in one way; those without tapes are read first where that takes one."""
    span = objective.span(twin.architecture.n_layers)
    if way == "ordinary":
        return [Ordinary(twin, row, span).scores(objective) for row in rows]
    options: dict[str, Any] = {"transform": known.transform, "memory": memory}
    if way == "continued":
        return [replayed(twin, [row], objective, token_axis=known.token_axis, **options)[0] for row in rows]
    if any(row.tape is None for row in rows):
        rows = read(twin, rows, span[0], memory=memory)
    return replayed(twin, rows, objective, fits=fits, **options)


def checked(twin: Twin, model: nn.Module) -> Exactness:
    """Which ways are exact on a model.

    Raises:
        UnsupportedModelError: the model's own ordinary call cannot be differentiated; the message gives the reason.
    """
    check, found = _Check(twin), Exactness(transform=twin.architecture.transform)
    if check.long[1].reason is not None:
        return replace(found, deviation=None)
    if twin.layers and twin.head.weight.dtype.itemsize < torch.float32.itemsize:
        found = check.attempted(lambda: _by_wide_copy(check, model)) or found  # else it is unchecked
    elif twin.layers:
        found = check.found()
    if found.way == "ordinary":
        logger.warning(
            "semgrad-guard scores this model by its ordinary call: %s", check.why or "its layers are unknown"
        )
    joins = found.way == "rows" and bool(check.attempted(check.rows_agree))  # unknown is no
    if not joins:
        return found
    one, cache = torch.ones(1, 1, dtype=torch.long, device=twin.device), growing_cache()
    with torch.no_grad():
        twin.step(one, one, cache)
    layers: list[Any] = [layer for layer in cast(Any, cache.layers) if layer.is_initialized]
    size = sum(half.nbytes for layer in layers for half in (layer.keys, layer.values))
    return replace(found, joins=True, token_bytes=size)


def _by_wide_copy(check: _Check, model: nn.Module) -> Exactness:
    """The result of a float32 copy, as far as the model in its own dtype does not contradict it."""
    wide = _Check(wide_copy(model, torch.float32))
    found, check.why = wide.found(), wide.why
    if found.way == "ordinary" or check.off(found.way, [check.row()], [check.long[1]], found) is not None:
        return found
    return found.stepped_down()


class _Check:
    """The comparisons on one twin; `why` is why the last way that was tried is not taken."""

    def __init__(self, twin: Twin) -> None:
        self._twin, self.why = twin, ""
        n = twin.architecture.n_layers
        # A layer with others to leave out below it and to replay above, and the last.
        self._span = tuple(sorted({observed_layer(n), n - 1}))
        self._tolerance = tolerance_of(twin.head.weight.dtype)
        window = twin.architecture.window or twin.architecture.chunk or 0
        self._prompt = max(_PROMPT, window + 2) if window <= 2 * _PROMPT else _PROMPT  # rows that exceed a small window

    def row(self, *, short: bool = False, shift: int = 0, **part: Any) -> Row:
        """A made-up row with a long or a short prompt; `part` as in `Row.of`."""
        vocabulary = self._twin.head.weight.shape[0]
        ids = [(7919 * (i + shift) + 104729) % vocabulary for i in range(self._prompt + _RESPONSE)]
        prompt = ids[: _SHORT_PROMPT if short else self._prompt]
        return Row.of(prompt, ids[self._prompt :], -3, self._objective, **part)

    @property
    def _objective(self) -> Objective:
        return Objective(layers=self._span)

    @cached_property
    def long(self) -> tuple[Ordinary, GradientScores]:
        """The model's ordinary call on the long prompt, and its scores by plain autograd; it settles the span."""
        call, expected = self._called(self.row())
        while expected.reason == NO_GRADIENT and self._span[0] > 0:
            # Nothing may come through an upper layer's state at t*: layers that attend to the keys of lower ones
            # alone pass nothing on from token to token. Lower layers do.
            self._span = (self._span[0] - 1,)
            call, expected = self._called(self.row())
        if expected.reason == NO_GRADIENT:
            raise no_gradient()
        return call, expected

    def found(self) -> Exactness:
        """The cheapest exact ways."""
        call, scores = self.long
        rows, expected = [self.row(), self.row(short=True)], [scores, self._called(self.row(short=True))[1]]
        self._tolerance = max(self._tolerance, tolerance_of(call.logits.dtype))  # some round them to float32
        transform = _measured(self._twin.architecture.transform, call.raw, call.logits.detach())
        known = Exactness(transform=transform, token_axis=call.token_axis)
        tried: dict[Way, int] = {"rows": 2, "continued": 1}
        for way, count in tried.items():
            if (off := self.off(way, rows[:count], expected[:count], known)) is not None:
                known = replace(known, way=way, deviation=off)
                break
        if known.way == "continued":
            taped = self.attempted(lambda: written(self._twin, rows[0], self._span[0]))
            begins = taped is not None and self.off("continued", [taped], expected[:1], known) is not None
            known = replace(known, begins=begins)
        return replace(known, in_context=self._in_context(known))

    def _in_context(self, known: Exactness) -> Way | None:
        """How a response with context is scored exactly."""
        if not self._twin.architecture.attends:
            return None
        row = self.row(before=_CONTEXT, in_context=True)
        expected = self.attempted(lambda: self._called(row)[1])
        plain = self._called(replace(row, in_context=False))[1]
        # Of the numbers, context changes none but SemGrad.
        if (
            expected is None
            or deviation(replace(expected, semgrad=plain.semgrad, grid=plain.grid), plain) > self._tolerance
        ):
            return None
        return "rows" if known.way == "rows" and self.off("rows", [row], [expected], known) is not None else "ordinary"

    def off(self, way: Way, rows: Sequence[Row], expected: Sequence[GradientScores], known: Exactness) -> float | None:
        """How far a way is off; None if that is too far, or it fails."""
        options: dict[str, Any] = {"known": known, "memory": Memory()}
        found = self.attempted(lambda: scores_by(way, self._twin, rows, self._objective, **options))
        if found is None:
            return None
        off = max(deviation(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        if off <= self._tolerance:
            return off
        self.why = f"{way} disagree with autograd by {off:.1%}"
        return None

    def attempted(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None where it fails, for unknown model code may fail in any way."""
        try:
            return work()
        except AnswerInterruptedError:
            raise
        except Exception as error:
            if is_out_of_memory(error):  # no matter of the way
                raise
            self.why = f"it fails with {error!r}"
            return None

    def _called(self, row: Row) -> tuple[Ordinary, GradientScores]:
        """The ordinary call on a row, and its scores.

        Raises:
            UnsupportedModelError: it fails, or cannot be differentiated.
        """
        try:
            call = Ordinary(self._twin, row, self._span)
            return call, call.scores(self._objective)
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

    def rows_agree(self) -> bool:
        """Whether rows that are written together, padded on the left, give the logits that each gives alone, cached
        steps included."""
        lengths = (_PROMPT, _SHORT_PROMPT)
        rows = [list(self.row(shift=place).ids[:length]) for place, length in enumerate(lengths)]
        together = _steps(self._twin, rows)
        tolerance = tolerance_of(self._twin.head.weight.dtype)
        for place, row in enumerate(rows):
            for ours, alone in zip(together, _steps(self._twin, [row]), strict=True):
                # NaN is no agreement
                if not bool((ours[place] - alone[0]).abs().max() <= tolerance * alone[0].abs().max()):
                    return False
                if ours[place].argmax() != alone[0].argmax():
                    break  # a tie that fell the other way: from here on texts may differ
        return True


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
    twin, generator = Twin(model), torch.Generator().manual_seed(0)
    size = sum(weight.numel() for weight in twin.model.parameters()) * wider.itemsize
    represented = [twin.layers[place] for place in (_represented(twin.layers) if size > _ALL_BYTES else ())]
    for layer in represented:
        vars(layer)["forward"] = twin.hands_on
    left_out = {id(module) for layer in represented for module in layer.modules()}

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        is_narrow = tensor.dtype in WIDER and tensor.dtype.itemsize < wider.itemsize
        return tensor.to(wider) if is_narrow else tensor

    for module in twin.model.modules():
        if id(module) not in left_out:
            plain = {name: _plain_map(child, wider, generator) for name, child in module.named_children()}
            module._modules.update({name: child for name, child in plain.items() if child is not None})
            module._apply(widened, recurse=False)
    twin.settle()
    return twin


def _represented(layers: Sequence[nn.Module]) -> set[int]:
    """The layers that others of their kind represent: all but the first of each in either half, and the last."""
    first, represent = observed_layer(len(layers)), dict[tuple[bool, Hashable], int]()
    for place, layer in enumerate(layers):
        represent.setdefault((place < first, _kind(layer)), place)
    return set(range(len(layers) - 1)) - set(represent.values())


def _kind(layer: nn.Module) -> Hashable:
    """The traits of a layer: its modules with their sizes, its settings in words, and windows."""
    settings = {name: value for name, value in vars(layer).items() if isinstance(value, (str, bool))}
    return repr(layer), repr(settings), *(getattr(module, "sliding_window", None) for module in layer.modules())


def _plain_map(quantized: nn.Module, wider: torch.dtype, generator: torch.Generator) -> nn.Linear | None:
    """A linear map in the place of a quantized one; None where the module is not such a one."""
    own = [tensor for tensor in (*quantized._parameters.values(), *quantized._buffers.values()) if tensor is not None]
    is_plain = all(type(tensor.data) is torch.Tensor and tensor.is_floating_point() for tensor in own)
    if is_plain or not (hasattr(quantized, "in_features") and hasattr(quantized, "out_features")):
        return None
    inputs, outputs = int(cast(Any, quantized.in_features)), int(cast(Any, quantized.out_features))
    plain = nn.Linear(inputs, outputs, bias=False, device="meta")
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    plain.weight = nn.Parameter(weight.to(own[0].device, wider), requires_grad=False)
    return plain


_CERTAIN = 0.01  # nats of an answer below which its gradient's digits are those of rounding


def disagree(ours: GradientScores | Observation, theirs: GradientScores | Observation, tolerance: float) -> bool:
    """Whether one has numbers and the other none, or numbers of the same tokens are far apart.

    Of a nearly certain answer likelihoods and entropies alone are compared.
    """
    if ours.reason is not None or theirs.reason is not None:
        return (ours.reason is None) != (theirs.reason is None)
    if _far(ours.log_probs, theirs.log_probs, tolerance) or _far(ours.entropies, theirs.entropies, tolerance):
        return True
    if isinstance(ours, Observation) or isinstance(theirs, Observation) or (theirs.greedy_nll or 0.0) < _CERTAIN:
        return False
    return deviation(ours, theirs) > tolerance


def _far(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    """Whether log-probabilities or entropies (nats) of the same tokens differ by more than `tolerance`.

    It bounds the mean difference, relative to the mean size; below one nat, absolutely: numbers near zero carry the
    rounding of the logits.
    """
    size = max(1.0, math.fsum(map(abs, theirs)) / len(theirs))
    difference = math.fsum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(theirs)
    return not difference <= tolerance * size
