"""The states of one model in the order of their use: each with a copy, and with the findings about it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from semgrad_guard.engine.interruption import InterruptibleLock
from semgrad_guard.engine.models.architecture import Architecture, inspect_architecture
from semgrad_guard.engine.replay.conduct import fingerprint_of, remember_first, uncertain_code
from semgrad_guard.engine.replay.memory_budget import Memory
from semgrad_guard.engine.replay.model_state import Snapshot
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.replay.weight_sharing_copy import weight_sharing_copy
from semgrad_guard.engine.scoring.input_check import Branches, InputCheck
from semgrad_guard.engine.scoring.self_check import Exactness

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

    def weights_changed(self) -> None:
        """Their numbers, at the same places: the fingerprint is read again. A check holds, unless it failed."""
        self.fingerprint = None
        if self.exactness is not None and self.exactness.failure is not None:
            self.exactness = None


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
            for known in {*self._states, state}:
                known.weights_changed()
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
            for known in self._states:
                known.replayer.prompts.trim(0)
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
