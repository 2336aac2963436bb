"""Which inputs a model may treat in another way than those of the self-check, and how real scores are verified on them.

The self-check compares replays on thirteen made-up tokens. Code that branches on the length or on the content of its
input can be exact there and wrong elsewhere. Therefore real scores are compared with the model's ordinary call as well:
the first of each state of a model, and those of every input that is twice as long as any verified before, or longer
than a window of the configuration that no verified input was longer than. Inputs for which a configuration is known to
branch, and every input of a model with a user's hook, take the ordinary call itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory_budget import activation_bytes
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.replay.token_batch import TokenBatch
from semgrad_guard.engine.scoring.observation import Observation, observe
from semgrad_guard.engine.scoring.scores import GradientScores, deviation
from semgrad_guard.engine.scoring.tier_scores import LOOSEST, TOLERANCE, Exactness, score_by

Kind = Literal["gradient", "forward"]
"""Whether a gradient score was verified, or numbers of the forward pass alone."""

_CERTAIN = 0.01  # nats of an answer below which its gradient's digits are those of rounding
_ROUNDING = (
    0.01  # up to which a difference in float32 may be rounding alone, at a token whose gradient is ill-conditioned
)
_LIMITS = ("window", "chunk", "max_position")  # parts of the names of settings that bound lengths


@dataclass(frozen=True)
class Branches:
    """The known ways in which a model computes something else for some inputs.

    `hooked`: a hook or another piece of the user's code runs, which may look at anything. `invocations`: the token
    sequences that switch an activated LoRA on (PEFT's `alora_invocation_tokens`). `dynamic_beyond`: the length beyond
    which a mask depends on the content (Doge's `keep_window_size`). `padding`: ids that take no position (RoBERTa and
    its relatives count positions over the other ids). `limits`: lengths in the configuration, ascending.
    """

    hooked: bool = False
    invocations: tuple[tuple[int, ...], ...] = ()
    dynamic_beyond: int | None = None
    padding: frozenset[int] = frozenset()
    limits: tuple[int, ...] = ()

    @property
    def exist(self) -> bool:
        """Whether there is any input for which the model is known to branch."""
        return self.hooked or bool(self.invocations or self.padding) or self.dynamic_beyond is not None

    @classmethod
    def of(cls, model: nn.Module, *, hooked: bool) -> Branches:
        """The branches of a model, by its modules, its adapters and its configuration."""
        config: Any = model.config
        settings: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
        lengths = {
            value
            for name, value in settings.items()
            if any(part in name for part in _LIMITS) and type(value) is int and value > 0
        }
        return cls(
            hooked=hooked,
            invocations=tuple(_invocations(model)),
            dynamic_beyond=settings.get("keep_window_size"),
            padding=frozenset(_padding_of_positions(model)),
            limits=tuple(sorted(lengths)),
        )

    def taken_by(self, row: TokenBatch) -> bool:
        """Whether the model may compute something else for this row than for the tokens of a replay."""
        if self.hooked or (self.dynamic_beyond is not None and row.longest > self.dynamic_beyond):
            return True
        if not self.padding and not self.invocations:
            return False
        ids: list[int] = row.ids[0].tolist()
        # A replay begins at the row's cut, and holds an invocation whole or not at all.
        outside = any(
            not row.cut <= place <= row.prompt_columns - len(sequence)
            for sequence in self.invocations
            for place in _places(ids, sequence)
        )
        return outside or not self.padding.isdisjoint(ids)


@dataclass(frozen=True)
class OrdinaryCall:
    """The model's ordinary call on one row, which scores are compared with.

    `sample` makes a copy in a wider number format: half precision's own rounding would hide an error, and float32's may
    look like one.
    """

    replayer: Replayer
    way: Exactness
    n_layers: int
    sample: Callable[[], Replayer] | None

    def contradicts(self, ours: Sequence[GradientScores], row: TokenBatch, objective: Objective) -> bool:
        """Whether a row's scores, part by part, are not those of the ordinary call."""
        replayer = self.replayer
        if replayer.head.weight.dtype.itemsize < torch.float32.itemsize and self.sample is not None:
            if self._observed(replayer, ours, row):
                return True
        elif not self._differentiated(replayer, ours, row, objective, _tolerance(replayer)):
            return False
        elif self.sample is None or self._differentiated(replayer, ours, row, objective, _ROUNDING):
            return True
        twin, span = self.sample(), objective.span(self.n_layers)
        twin.plain, twin.token_axis = self.way.plain, self.replayer.token_axis
        for tier in self.way.tiers[:-1]:
            captured = twin.record(row, span[0]) if tier == "captured" else None
            (parts,) = score_by(
                tier, self.way, replayer=twin, batch=row, objective=objective, span=span, captured=captured
            )
            if self._differentiated(twin, parts, row, objective, TOLERANCE[torch.float32]):
                return True
        return False

    def contradicts_observation(self, ours: Observation, row: TokenBatch) -> bool:
        """Whether an observation of a row is not that of the ordinary call."""
        return self._observed(self.replayer, [ours], row)

    def _differentiated(
        self,
        replayer: Replayer,
        ours: Sequence[GradientScores],
        row: TokenBatch,
        objective: Objective,
        tolerance: float,
    ) -> bool:
        """Compare gradients, where a backward pass through the whole sequence fits `Memory.activations`."""
        if activation_bytes(replayer.layers, row.longest) > replayer.memory.activations or objective.sampled_rows:
            return self._observed(replayer, ours, row)
        span = objective.span(self.n_layers)
        (expected,) = score_by("full", self.way, replayer=replayer, batch=row, objective=objective, span=span)
        return any(_differ(a, b, tolerance) for a, b in zip(ours, expected, strict=True))

    def _observed(
        self, replayer: Replayer, ours: Sequence[GradientScores] | Sequence[Observation], row: TokenBatch
    ) -> bool:
        """Compare log-probabilities and entropies, for which a forward pass is enough."""
        (seen,) = observe(row, replayer, self.n_layers, self.way.transform)
        log_probs = [*chain.from_iterable(part.log_probs for part in ours)]
        entropies = [*chain.from_iterable(part.entropies for part in ours)]
        if not seen.log_probs or len(log_probs) != len(seen.log_probs):
            return bool(seen.log_probs) != bool(log_probs)
        tolerance = _tolerance(replayer)
        return _far(log_probs, seen.log_probs, tolerance) or _far(entropies, seen.entropies, tolerance)


@dataclass(eq=False)
class InputCheck:
    """The verified inputs of one state of a model: the length in tokens of the longest input, by kind of score."""

    branches: Branches
    _verified: dict[Kind, int] = field(default_factory=dict[Kind, int])

    def must_go_ordinary(self, batch: TokenBatch) -> bool:
        """Whether a row of the batch takes a branch that only the model's ordinary call takes for certain."""
        return self.branches.exist and any(self.branches.taken_by(row) for row in batch.rows())

    def due(self, batch: TokenBatch, kind: Kind) -> tuple[int, TokenBatch] | None:
        """The longest row of the batch, with its place, if it has to be verified."""
        if not self._is_due(batch.longest, kind):  # no row is longer; the mask lies on the model's device
            return None
        prompts: list[int] = batch.mask[:, : batch.prompt_columns].sum(1).tolist()
        lengths = [prompt + answer for prompt, answer in zip(prompts, batch.lengths, strict=True)]
        place = lengths.index(max(lengths))
        return (place, list(batch.rows())[place]) if self._is_due(lengths[place], kind) else None

    def _is_due(self, length: int, kind: Kind) -> bool:
        known = self._verified.get(kind, 0)
        return not known or length >= 2 * known or any(known <= limit < length for limit in self.branches.limits)

    def note(self, row: TokenBatch, kind: Kind) -> None:
        """Remember that the scores of a row were verified."""
        self._verified[kind] = max(self._verified.get(kind, 0), row.longest)


def _differ(ours: GradientScores, expected: GradientScores, tolerance: float) -> bool:
    if ours.reason is not None or expected.reason is not None:
        return (ours.reason is None) != (expected.reason is None)
    if _far(ours.log_probs, expected.log_probs, tolerance) or _far(ours.entropies, expected.entropies, tolerance):
        return True
    certain = (expected.greedy_nll or 0.0) < _CERTAIN
    return not certain and deviation(ours, expected) > tolerance


def _tolerance(replayer: Replayer) -> float:
    return TOLERANCE.get(replayer.head.weight.dtype, LOOSEST)


def _far(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    """Whether log-probabilities or entropies (nats) of the same tokens differ by more than `tolerance`.

    It bounds the mean difference, relative to the mean size; below one nat, absolutely: numbers near zero carry the
    rounding of the logits.
    """
    size = max(1.0, math.fsum(map(abs, theirs)) / len(theirs))
    difference = math.fsum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(theirs)
    return not difference <= tolerance * size


def _invocations(model: nn.Module) -> Iterator[tuple[int, ...]]:
    adapters: Any = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, Mapping) else ():
        if tokens := getattr(adapter, "alora_invocation_tokens", None):
            yield tuple(tokens)


def _padding_of_positions(model: nn.Module) -> Iterator[int]:
    """A table of positions has a padding entry only where positions are counted without the padding."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and "position" in name.rpartition(".")[2]
            and module.padding_idx is not None
        ):
            yield module.padding_idx


def _places(ids: Sequence[int], sequence: Sequence[int]) -> Iterator[int]:
    length = len(sequence)
    return (place for place in range(len(ids) - length + 1) if tuple(ids[place : place + length]) == tuple(sequence))
