"""Gradient scores of any response: one scorer per model, its tier chosen by a self-check, exact in every tier."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

from semgrad_guard.engine.interruption import InterruptibleLock
from semgrad_guard.engine.models.architecture import Architecture, inspect_architecture
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.conduct import fingerprint_of, remember_first, uncertain_code
from semgrad_guard.engine.replay.float_sample import float_sample, is_half
from semgrad_guard.engine.replay.memory_budget import (
    OUT_OF_MEMORY,
    Memory,
    give_back_memory,
    is_out_of_memory,
    unless_memory_runs_out,
)
from semgrad_guard.engine.replay.model_state import Snapshot
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.replay.token_batch import TokenBatch
from semgrad_guard.engine.replay.weight_sharing_copy import weight_sharing_copy
from semgrad_guard.engine.scoring.attention_reading import UNREADABLE, AttentionReading, read_attention, unread
from semgrad_guard.engine.scoring.gradients import Rows
from semgrad_guard.engine.scoring.input_check import Branches, InputCheck, Kind, OrdinaryCall
from semgrad_guard.engine.scoring.observation import (
    HeadGradient,
    Observation,
    head_gradients,
    observe,
    without_states,
)
from semgrad_guard.engine.scoring.scores import GradientScores, Tier, unscored
from semgrad_guard.engine.scoring.self_check import Exactness, self_check
from semgrad_guard.engine.scoring.tier_scores import score_by
from semgrad_guard.errors import UnsupportedModelError


class _Reasoned(Protocol):
    """What is known of a row, or why nothing is."""

    @property
    def reason(self) -> str | None: ...


R = TypeVar("R", bound=_Reasoned)

logger = logging.getLogger("semgrad_guard")

_STATES = 4  # a model's states whose tiers are remembered: with and without an adapter, say


@dataclass(eq=False)
class _State:
    """What is known of the model as it was at one moment; `exactness` once it was checked."""

    snapshot: Snapshot
    replayer: Replayer
    architecture: Architecture
    inputs: InputCheck
    uncertain: str | None
    """Why the model cannot be told to be unchanged while this state lasts, in words (see `uncertain_code`)."""
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
        """Their numbers, at the same places: what was read of them is read again. A check holds, unless it failed."""
        self.fingerprint = None
        if self.exactness is not None and self.exactness.failure is not None:
            self.exactness = None


class Scorer:
    """Scores responses of one model. Thread-safe: one lock per model guards its replays (and generations).

    Whoever takes the lock works with the model as it then is: it is looked at once in each turn (`current`).
    """

    def __init__(self, model: nn.Module) -> None:
        self.lock = InterruptibleLock()
        # Weak: the table below must not keep a model alive that its owner has dropped.
        self._model = weakref.ref(model)
        self._states: list[_State] = []  # the one in use comes first
        self._looked_in_turn, self._epoch, self._changes = 0, object(), object()
        self.memory = Memory()
        self._current()
        remember_first(model)

    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that agree with plain autograd on this model, cheapest first; settled by one self-check."""
        return self.exactness().tiers

    def exactness(self) -> Exactness:
        """What the model's self-check found; the first call makes it.

        Raises:
            UnsupportedModelError: the model's own ordinary call cannot be differentiated.
        """
        with self.lock, clean_slate():
            replayer = self.current_replayer()
            if self._exactness is None:
                self._exactness = self_check(self.architecture, replayer, self._sample(replayer))
            return self._exactness

    @property
    def pads(self) -> bool:
        """Whether rows of a batch may be padded on the left, and are then what they are by themselves.

        Not where that is unknown: a model that is refused a score, or has no room for the check, may still answer.
        """
        try:
            found = unless_memory_runs_out(self.exactness)
        except UnsupportedModelError:
            return False
        return found is not None and found.pads

    @property
    def joins(self) -> bool:
        """Whether a row may join and leave a batch that is being written, and then be scored from what it left."""
        return self.pads and "captured" in self.tiers()

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

        They are those of the weights alone as long as the model does what it did when it was first met. A mark that is
        never the same twice follows where the model's code cannot be compared.
        """
        with self.lock, clean_slate():
            state, model = self._current(), self._model()
            if state.fingerprint is None and model is not None:
                state.fingerprint = fingerprint_of(model, comparable=state.uncertain is None)
            return state.fingerprint or ""

    @property
    def device(self) -> torch.device:
        """Where the head's weights, and so the token ids, live."""
        return self.current_replayer().head.weight.device

    @property
    def vocabulary(self) -> int:
        """Entries of the output head."""
        return self.current_replayer().head.weight.shape[0]

    def score(
        self, batch: TokenBatch, objective: Objective, captured: CapturedStates | None = None
    ) -> tuple[GradientScores, ...]:
        """Score every row of a batch as a whole; `captured` lets the captured tier reuse what its generation left."""
        return tuple(parts[0] for parts in self.score_parts(batch, objective, captured))

    def score_parts(self, batch: TokenBatch, objective: Objective, captured: CapturedStates | None = None) -> Rows:
        """Score every part of every row (`TokenBatch.segments`) from one replay.

        Where memory runs out, the rows are tried one by one; one that has no room by itself has no score.
        """
        with self.lock, clean_slate():
            try:
                return self._score_batch(batch, objective, captured)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            give_back_memory()
            if len(batch.lengths) > 1:
                return tuple(self.score_parts(row, objective)[0] for row in batch.rows())
            tier = "full" if self._exactness is None else self._exactness.tiers[0]
            return (tuple(unscored(tier, OUT_OF_MEMORY) for _ in batch.parts),)

    def _score_batch(self, batch: TokenBatch, objective: Objective, captured: CapturedStates | None) -> Rows:
        tiers = self._tiers_at(batch.longest)  # what rules every score out is said first
        span = objective.span(self.architecture.n_layers)
        if tiers == ("full",):
            return self._score(batch, objective, span, None, tiers)
        if self._current().inputs.must_go_ordinary(batch):
            rows = batch.rows() if len(batch.lengths) > 1 else ()
            singly = tuple(self._score_batch(row, objective, None)[0] for row in rows)
            return singly or self._score(batch, objective, span, None, ("full",))
        if batch.is_padded and not self.pads:
            found = self._score_singly(batch, objective, span, tiers)
        else:
            found = self._score(batch, objective, span, captured, tiers)
            if len(found) > 1 and any(scores.reason for row in found for scores in row):
                # Padding alone makes some attention kernels answer NaN: such rows are given a second chance.
                singly = self._score_singly(batch, objective, span, tiers)
                found = tuple(
                    tuple(b if a.reason else a for a, b in zip(*rows, strict=True))
                    for rows in zip(found, singly, strict=True)
                )

        def agrees(call: OrdinaryCall, place: int, row: TokenBatch) -> bool | None:
            nothing = any(part.reason for part in found[place])
            return None if nothing else not call.contradicts(found[place], row, objective)

        return found if self._confirmed(batch, "gradient", agrees) else self._score_batch(batch, objective, None)

    def _confirmed(
        self, batch: TokenBatch, kind: Kind, agrees: Callable[[OrdinaryCall, int, TokenBatch], bool | None]
    ) -> bool:
        """Whether the model's ordinary call agrees, where the longest row of a batch has to be verified.

        Where it does not, nothing but the ordinary call is trusted from now on. None: there is nothing to compare.
        """
        state, replayer = self._current(), self.current_replayer()
        if (due := state.inputs.due(batch, kind)) is None:
            return True
        place, row = due
        call = OrdinaryCall(replayer, self.exactness(), self.architecture.n_layers, self._sample(replayer))
        agreed = unless_memory_runs_out(lambda: agrees(call, place, row))
        if agreed is False:
            logger.warning(
                "semgrad-guard steps down to the model's ordinary call: a replay of %d tokens is not exact", row.longest
            )
            self._exactness = replace(self.exactness(), tiers=("full",), cuts=False, pads=False)
        elif agreed:
            state.inputs.note(row, kind)
        return agreed is not False

    def observe(self, batch: TokenBatch, captured: CapturedStates | None = None) -> tuple[Observation, ...]:
        """What every row's own tokens tell without a gradient; `captured` is what the generation of the batch left."""
        with self.lock, clean_slate():
            n_layers = self.architecture.n_layers
            if not self._reads_off(batch, captured):
                found = self.score(batch, Objective(layers=(n_layers - 1,)))
                return tuple(without_states(each.log_probs, each.entropies, each.reason) for each in found)
            replayer, way = self.current_replayer(), self.exactness()
            return self._read_off(
                batch,
                captured,
                lambda rows, kept: observe(rows, replayer, n_layers, way.transform, kept),
                partial(without_states, (), ()),
            )

    def head_gradients(
        self, batch: TokenBatch, objective: Objective, captured: CapturedStates | None = None
    ) -> tuple[HeadGradient, ...]:
        """ParaGrad of every row, for which no layer is differentiated; `captured` is what the generation left."""
        with self.lock, clean_slate():
            n_layers = self.architecture.n_layers
            if not self._reads_off(batch, captured):
                found = self.score(batch, replace(objective, layers=(n_layers - 1,)))
                return tuple(HeadGradient(each.paragrad, each.paragrad_error, each.reason) for each in found)
            replayer, way = self.current_replayer(), self.exactness()
            return self._read_off(
                batch,
                captured,
                lambda rows, kept: head_gradients(rows, replayer, n_layers, way.transform, kept, objective=objective),
                lambda reason: HeadGradient(None, reason=reason),
            )

    def _read_off(
        self,
        batch: TokenBatch,
        captured: CapturedStates | None,
        work: Callable[[TokenBatch, CapturedStates | None], tuple[R, ...]],
        without: Callable[[str], R],
    ) -> tuple[R, ...]:
        """What `work` finds in a batch, with what its generation left, where that is of use."""
        kept = self._kept(batch, captured)
        return self._together(batch, lambda rows: work(rows, kept if rows is batch else None), without)

    def _kept(self, batch: TokenBatch, captured: CapturedStates | None) -> CapturedStates | None:
        """What the generation of a batch left, where its numbers can be read off."""
        usable = captured is not None and self._left(captured) and captured.holds(batch)
        return captured if usable and not self._current().inputs.must_go_ordinary(batch) else None

    def _reads_off(self, batch: TokenBatch, captured: CapturedStates | None) -> bool:
        """Whether the numbers of a batch can be read off its generation, or one pass; verified where that has to be."""
        if "prefix" not in self._tiers_at(batch.longest):
            return False
        kept, way = self._kept(batch, captured), self.exactness()
        if kept is None and not (batch.is_padded and way.pads):
            return True  # the pass is the ordinary call

        def agrees(call: OrdinaryCall, place: int, row: TokenBatch) -> bool:
            ours = observe(batch, call.replayer, call.n_layers, way.transform, kept)[place]
            return not call.contradicts_observation(ours, row)

        return self._confirmed(batch, "forward", agrees)

    def attention(self, batch: TokenBatch) -> tuple[AttentionReading, ...]:
        """How the tokens of every row's answer attend to each other in the middle layers."""
        with self.lock, clean_slate():
            n_layers, replayer = self.architecture.n_layers, self.current_replayer()
            if "prefix" not in self._tiers_at(batch.longest):
                return (unread(UNREADABLE),) * len(batch.lengths)
            return self._together(batch, lambda rows: read_attention(rows, replayer, n_layers), unread)

    def _together(
        self, batch: TokenBatch, work: Callable[[TokenBatch], tuple[R, ...]], without: Callable[[str], R]
    ) -> tuple[R, ...]:
        """What `work` finds in a batch; row by row where padding is wrong, memory runs out, or a row has none."""
        alone, way = len(batch.lengths) == 1, self.exactness()
        level = way.pads if batch.is_padded else way.cuts
        if not alone and (not level or self._current().inputs.must_go_ordinary(batch)):
            return tuple(self._together(row, work, without)[0] for row in batch.rows())
        try:
            found = work(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = ()
        if not found:
            give_back_memory()
            if alone:
                return (without(OUT_OF_MEMORY),)
            return tuple(self._together(row, work, without)[0] for row in batch.rows())
        if alone or not any(each.reason for each in found):
            return found
        # Padding alone makes some attention kernels answer NaN: such rows are given a second chance.
        rows = zip(found, batch.rows(), strict=True)
        return tuple(self._together(row, work, without)[0] if each.reason else each for each, row in rows)

    def _left(self, captured: CapturedStates) -> bool:
        """Whether the model as it is now left these states."""
        return captured.epoch in (None, self._epoch)

    def can_resume(self, positions: int) -> bool:
        """Whether reading so many positions in two passes, the second from a cache, gives what one pass gives."""
        exactness = self.exactness()
        return exactness.pads and exactness.cuts and "prefix" in self._tiers_at(positions)

    def _tiers_at(self, positions: int) -> tuple[Tier, ...]:
        limit = self.architecture.fixed_positions
        return ("full",) if limit is not None and positions > limit else self.tiers()

    def _score_singly(
        self, batch: TokenBatch, objective: Objective, span: Sequence[int], tiers: tuple[Tier, ...]
    ) -> Rows:
        """Row after row, without padding, and so without captured states."""
        return tuple(self._score(row, objective, span, None, tiers)[0] for row in batch.rows())

    def _score(
        self,
        batch: TokenBatch,
        objective: Objective,
        span: Sequence[int],
        captured: CapturedStates | None,
        tiers: tuple[Tier, ...],
    ) -> Rows:
        found = self.exactness()
        fits = captured is not None and captured.layer <= span[0] and self._left(captured) and captured.fits(batch)
        tier: Tier = next(tier for tier in tiers if tier != "captured" or fits)
        rows = score_by(
            tier,
            found,
            replayer=self.current_replayer(),
            batch=batch,
            objective=objective,
            span=span,
            captured=captured,
        )
        off = found.deviations.get(tier)
        return tuple(tuple(replace(scores, deviation=off) for scores in row) for row in rows)

    def current_replayer(self) -> Replayer:
        """The weight-sharing copy in use: a copy of the model as it is now.

        Raises:
            UnsupportedModelError: what the model has become rules a score out.
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

    def _look(self) -> None:
        """Find out whether the owner has changed anything since the last turn; what was kept from before is let go."""
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
            _keep_weakly(model, self)

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

    @property
    def _exactness(self) -> Exactness | None:
        return self._current().exactness

    @_exactness.setter
    def _exactness(self, exactness: Exactness | None) -> None:
        self._current().exactness = exactness

    def _sample(self, replayer: Replayer) -> Callable[[], Replayer] | None:
        """Makes a float32 copy for the self-check of a model in half precision."""
        model, layers = self._model(), self.architecture.layers
        if model is None or layers is None or not is_half(replayer.head.weight):
            return None

        def make() -> Replayer:
            first = self.architecture.n_layers // 2
            copy = float_sample(model, layers, first, returns_tuples=replayer.layers_return_tuples)
            return Replayer(copy, self.architecture)

        return make


_scorers: weakref.WeakKeyDictionary[nn.Module, Callable[[], Scorer | None]] = weakref.WeakKeyDictionary()
_scorers_lock = threading.RLock()
_latest: list[Scorer] = []  # of those that the table holds weakly, the one used last


def scorer_of(model: nn.Module) -> Scorer:
    """The one scorer of a model object, made at its first use.

    Raises:
        UnsupportedModelError: the architecture rules a score out.
    """
    with _scorers_lock:
        known = _scorers.get(model)
        scorer = None if known is None else known()
        if scorer is None:
            scorer = Scorer(model)
            if model not in _scorers:
                _scorers[model] = partial(_itself, scorer)
        if isinstance(_scorers[model], weakref.ref):
            _latest[:] = [scorer]
        return scorer


def _keep_weakly(model: nn.Module, scorer: Scorer) -> None:
    """Leave a scorer to those who use it: its model is reached from its own parts, and would never be let go."""
    with _scorers_lock:
        _scorers[model] = weakref.ref(scorer)


def _itself(scorer: Scorer) -> Scorer:
    return scorer


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
