"""The states of one model in the order of their use: each with a copy, and with the findings about it.

The self-check compares replays on thirteen made-up tokens. Code that branches on the length or on the content of its
input can be exact there and wrong elsewhere. Therefore real scores are compared with the model's ordinary call as well:
the first of each state of a model, and those of every input that is twice as long as any verified before, or longer
than a window of the configuration that no verified input was longer than. Inputs for which a configuration is known to
branch, and every input of a model with a user's hook, take the ordinary call itself.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from semgrad_guard.engine.interruption import InterruptibleLock
from semgrad_guard.engine.models.architecture import Architecture, adapters_of, inspect_architecture
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.batch import Memory, TokenBatch
from semgrad_guard.engine.replay.conduct import fingerprint_of, remember_first, uncertain_code
from semgrad_guard.engine.replay.hooks import activation_bytes
from semgrad_guard.engine.replay.model_copies import weight_sharing_copy
from semgrad_guard.engine.replay.model_state import Snapshot
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scoring.gradients import Exactness, GradientScores, deviation, score_by, tolerance_of
from semgrad_guard.engine.scoring.observation import Observation, observe

logger = logging.getLogger("semgrad_guard")

_STATES = 4  # a model's states whose tiers are remembered: with and without an adapter, for example


@dataclass(eq=False)
class _State:
    """The model as it was at one moment; `exactness` once it was checked."""

    snapshot: Snapshot
    replayer: Replayer
    architecture: Architecture
    inputs: InputCheck
    uncertain: str | None
    """The reason why a change of the model could stay unseen, in words (see `uncertain_code`)."""
    exactness: Exactness | None = None
    fingerprint: str | None = None

    @classmethod
    def of(cls, model: nn.Module, snapshot: Snapshot) -> _State:
        """The state of a model that the snapshot shows, with a copy of the model.

        Raises:
            UnsupportedModelError: the architecture, or code of the user's, rules a score out.
        """
        copied = weight_sharing_copy(model)
        architecture = inspect_architecture(copied)
        inputs = InputCheck(Branches.of(model, hooked=snapshot.own_code is not None))
        uncertain = uncertain_code(snapshot, model)
        if uncertain is not None:
            logger.info("semgrad-guard promises nothing for this model: %s, which cannot be compared", uncertain)
        originals = () if uncertain is None else model.parameters()
        return cls(snapshot, Replayer(copied, architecture, originals), architecture, inputs, uncertain)


class ModelStates:
    """A model as it is in each turn of its lock: it is compared once in a turn, and copied anew after a change."""

    def __init__(self, model: nn.Module) -> None:
        self.lock = InterruptibleLock()
        # Weak: a table of these must not keep a model alive that its owner has dropped.
        self._model = weakref.ref(model)
        self._states: list[_State] = []  # the one in use comes first
        self._looked_in_turn, self._epoch, self._changes = 0, object(), object()
        self.memory = Memory()
        self._current()
        remember_first(model)

    @property
    def architecture(self) -> Architecture:
        """Where the model keeps its layers and its head."""
        return self._current().architecture

    @property
    def epoch(self) -> object:
        """Another object where the model may have changed: results from before belong to the model as it was.

        Where a model's code cannot be compared (`uncertain_code`), that is every turn.
        """
        with self.lock:
            if self._model() is not None:  # one that is gone changes no more
                self._current()
            return self._epoch

    @property
    def changes(self) -> object:
        """Another object after every change of the model that was seen."""
        with self.lock:
            self._current()
            return self._changes

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that follow the model's weights and all that its owner changes; read once in each state.

        They are those of the weights alone as long as the model behaves as when it was first met. A mark that is
        never the same twice follows where the model's code cannot be compared.
        """
        with self.lock, clean_slate():
            state, model = self._current(), self._model()
            if state.fingerprint is None and model is not None:
                state.fingerprint = fingerprint_of(model, comparable=state.uncertain is None)
            return state.fingerprint or ""

    def current_replayer(self) -> Replayer:
        """The weight-sharing copy in use: a copy of the model as it is now.

        Raises:
            UnsupportedModelError: a change of the model rules a score out.
        """
        return self._current().replayer

    def _current(self) -> _State:
        """The model as it is in this turn of the lock."""
        with self.lock:
            if self._looked_in_turn != self.lock.turn:
                with clean_slate():
                    self._look()
                self._looked_in_turn = self.lock.turn
            state = self._states[0]
            state.replayer.memory = self.memory
            return state

    def trust(self) -> None:
        """Take the model to be unchanged for the rest of this turn of the lock, without a look at it."""
        self._looked_in_turn = self.lock.turn

    def look_again(self) -> None:
        """Have the model looked at once more in this turn of the lock."""
        self._looked_in_turn = -1

    def _look(self) -> None:
        """Find out whether the owner has changed anything since the last turn; results from before are dropped."""
        model = self._model()
        if model is None:
            raise RuntimeError("the scored model no longer exists")
        before = self._states[0] if self._states else None
        if before is not None and before.snapshot.is_current():
            state, snapshot = before, before.snapshot
        else:
            snapshot = Snapshot(model)
            state = next((known for known in self._states if known.snapshot.agrees_with(snapshot)), None)
        edited = state is not None and state.snapshot.weights.have_changed()
        state = state or _State.of(model, snapshot)
        self._take_up(state, changed=state is not before or edited)
        if edited:
            snapshot.weights.update()
            for known in {*self._states, state}:  # a check holds, unless it failed
                known.fingerprint = None
                if known.exactness is not None and known.exactness.failure is not None:
                    known.exactness = None
        state.snapshot = snapshot
        # Earlier states must not keep weights alive that the model has parted with.
        kept = [k for k in self._states if k is not state and k.snapshot.tensors <= snapshot.tensors]
        self._states = [state, *kept[: _STATES - 1]]
        if snapshot.holds_the_model or snapshot.own_code is not None:  # a hook may refer to the model
            self._keep_weakly(model)

    def _take_up(self, state: _State, *, changed: bool) -> None:
        """Let go of results from before, where the model has changed or could have changed unseen."""
        if changed:
            self._changes = object()
        if changed or state.uncertain is not None:
            self._epoch = object()
        if state.uncertain is not None:
            state.inputs, state.fingerprint = InputCheck(state.inputs.branches), None

    def _keep_weakly(self, model: nn.Module) -> None:
        """Called where the model is reached from its own parts: a table must not hold these states strongly."""


@contextmanager
def clean_slate() -> Iterator[None]:
    """Ordinary tensors, no autocast, whatever the caller's thread has switched on; restored afterwards."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        accelerator = torch.accelerator.current_accelerator()
        for device in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


Kind = Literal["gradient", "context", "forward"]
"""Whether a gradient score was verified, one of a response with context, or numbers of the forward pass alone."""

_CERTAIN = 0.01  # nats of an answer below which its gradient's digits are those of rounding
_ROUNDING = 0.01  # a difference in float32 that may be rounding alone, where a token's gradient is ill-conditioned
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
        activated = [getattr(one, "alora_invocation_tokens", None) for one in adapters_of(model).values()]
        # A table of positions has a padding entry only where positions are counted without the padding.
        embeddings = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        paddings = [module.padding_idx for name, module in embeddings if "position" in name.rpartition(".")[2]]
        return cls(
            hooked=hooked,
            invocations=tuple(tuple(tokens) for tokens in activated if tokens),
            dynamic_beyond=settings.get("keep_window_size"),
            padding=frozenset(own for own in paddings if own is not None),
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
            not row.cut <= place <= row.prompt_columns - sum(row.context) - len(sequence)
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
        elif not self._differentiated(replayer, ours, row, objective, tolerance_of(replayer.head.weight.dtype)):
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
            if self._differentiated(twin, parts, row, objective, tolerance_of(torch.float32)):
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
        if activation_bytes(replayer.layers, row.longest) > replayer.memory.activations:
            return self._observed(replayer, ours, row)
        span = objective.span(self.n_layers)
        (expected,) = score_by("full", self.way, replayer=replayer, batch=row, objective=objective, span=span)
        return any(_differ(a, b, tolerance) for a, b in zip(ours, expected, strict=True))

    def _observed(
        self, replayer: Replayer, ours: Sequence[GradientScores] | Sequence[Observation], row: TokenBatch
    ) -> bool:
        """Compare log-probabilities and entropies, for which a forward pass is enough."""
        seen = observe(row, replayer, self.n_layers, self.way.transform)
        log_probs, expected = ([*chain.from_iterable(part.log_probs for part in parts)] for parts in (ours, seen))
        if not expected or len(log_probs) != len(expected):
            return bool(expected) != bool(log_probs)
        entropies, wanted = ([*chain.from_iterable(part.entropies for part in parts)] for parts in (ours, seen))
        tolerance = tolerance_of(replayer.head.weight.dtype)
        return _far(log_probs, expected, tolerance) or _far(entropies, wanted, tolerance)


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
        answers = [columns.stop - batch.prompt_columns for columns in batch.scored]
        lengths = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
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


def _far(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    """Whether log-probabilities or entropies (nats) of the same tokens differ by more than `tolerance`.

    It bounds the mean difference, relative to the mean size; below one nat, absolutely: numbers near zero carry the
    rounding of the logits.
    """
    size = max(1.0, math.fsum(map(abs, theirs)) / len(theirs))
    difference = math.fsum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(theirs)
    return not difference <= tolerance * size


def _places(ids: Sequence[int], sequence: Sequence[int]) -> Iterator[int]:
    length = len(sequence)
    return (place for place in range(len(ids) - length + 1) if tuple(ids[place : place + length]) == tuple(sequence))
