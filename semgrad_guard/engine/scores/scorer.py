"""Scores of any response: one scorer per model, its way chosen by a self-check, exact in every way.

The self-check compares made-up tokens. Code that branches on the length of its input can be exact there and wrong
elsewhere. Therefore real scores are compared with the model's ordinary call as well: the first of each model, and those
of every text that is twice as long as any verified before, or longer than a window of the configuration that no
verified text was longer than.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from semgrad_guard.engine.interruption import InterruptibleLock
from semgrad_guard.engine.models.architecture import Architecture
from semgrad_guard.engine.models.identity import Identity, is_hooked, parts_of, versions_of
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import OUT_OF_MEMORY, Memory, unless_memory_runs_out
from semgrad_guard.engine.replay.tape import Row, Tape, read
from semgrad_guard.engine.replay.twin import Twin
from semgrad_guard.engine.scores.exactness import (
    ROUNDING,
    WIDER,
    Exactness,
    Kind,
    Suspect,
    Suspicion,
    Way,
    checked,
    disagree,
    scores_by,
    scores_of_texts,
    suspected,
    wide_copy,
)
from semgrad_guard.engine.scores.gradients import GradientScores, tolerance_of, unscored
from semgrad_guard.engine.scores.observed import Observation, can_be_observed, observe, observed_layer
from semgrad_guard.errors import UnsupportedModelError

logger = logging.getLogger("semgrad_guard")

WITHOUT_CONTEXT = (
    "the sentences before a sentence are its context by their keys and values, and this model has no such for each "
    "token (its layers keep a state, or take no cache). Take an estimator of likelihoods."
)
"""Why no sentence of a model can be scored in context."""

_STATES = 4  # states of a model whose self-checks are remembered: with and without an adapter, for example
_READ = 1 << 13  # tokens of texts that are read in one pass, padding counted
_LIMITS = ("window", "chunk", "max_position")  # parts of the names of settings that bound lengths


@dataclass(eq=False)
class _State:
    """The model as it was at one moment: its parts, the twin of them, and the findings about it."""

    parts: list[Any]
    versions: list[int]
    twin: Twin
    exactness: Exactness | None = None
    fingerprint: str | None = None
    verified: dict[tuple[Kind, int], int] = field(default_factory=dict[tuple[Kind, int], int])
    """By the kind of number and the first layer that it needs: the tokens of the longest text that was verified."""


class Scorer:
    """Scores responses of one model. Thread-safe: one lock per model guards its passes."""

    def __init__(self, model: nn.Module) -> None:
        self.lock, self.memory = InterruptibleLock(), Memory()
        # Weak: a table of scorers must not keep a model alive that its owner has dropped.
        self._model = weakref.ref(model)
        self._identity = Identity(model)
        self._states: list[_State] = []  # the one in use comes first
        self._looked_in_turn, self._epoch = 0, object()
        self._current()

    # The model as it is now.

    @property
    def twin(self) -> Twin:
        """The weight-sharing copy of the model as it is now.

        Raises:
            UnsupportedModelError: a change of the model rules a score out.
        """
        return self._current().twin

    @property
    def architecture(self) -> Architecture:
        """Where the model keeps its layers and its head."""
        return self.twin.architecture

    @property
    def device(self) -> torch.device:
        """Where the head's weights, and so the token ids, live."""
        return self.twin.device

    @property
    def vocabulary(self) -> int:
        """Entries of the output head."""
        return self.twin.head.weight.shape[0]

    @property
    def epoch(self) -> object:
        """Another object after every change of the model: results from before belong to the model as it was."""
        with self.lock:
            if self._model() is not None:  # one that is gone changes no more
                self._current()
            return self._epoch

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that follow the model's weights and changes (`Identity`); read once in each state."""
        with self.lock, clean_slate():
            state, model = self._current(), self._model()
            if state.fingerprint is None and model is not None:
                state.fingerprint = self._identity.fingerprint(model)
            return state.fingerprint or ""

    def refresh(self) -> None:
        """Take the model as it is now: after any change of it that is not noticed by itself."""
        with self.lock:
            self._states = []
            self._looked_in_turn = -1
            self._current()

    def trust(self) -> None:
        """Take the model to be unchanged for the rest of this turn of the lock, without a look at it."""
        self._looked_in_turn = self.lock.turn

    def look_again(self) -> None:
        """Have the model looked at once more in this turn of the lock."""
        self._looked_in_turn = -1

    def _current(self) -> _State:
        """The model as it is in this turn of the lock."""
        with self.lock:
            if self._looked_in_turn != self.lock.turn:
                with clean_slate():
                    self._look()
                self._looked_in_turn = self.lock.turn
            return self._states[0]

    def _look(self) -> None:
        """Find out whether the owner has changed anything since the last turn."""
        model = self._model()
        if model is None:
            raise RuntimeError("the scored model no longer exists")
        parts, versions = parts_of(model), versions_of(model)
        state = next((known for known in self._states if known.parts == parts), None)
        changed = state is None or state is not self._states[0] or state.versions != versions
        if state is None:
            state = _State(parts, versions, Twin(model))
        if state.versions != versions:  # a check holds, unless it failed
            failed = state.exactness is not None and state.exactness.deviation is None
            state.versions, state.fingerprint = versions, None
            state.exactness = None if failed else state.exactness
        if changed:
            self._epoch = object()
            self._states = [state, *(known for known in self._states if known is not state)][:_STATES]
            if is_hooked(model):  # a hook may refer to the model: no table may hold its twin strongly
                with _scorers_lock:
                    _scorers[model] = weakref.ref(self)

    # Which ways are exact.

    def exactness(self) -> Exactness:
        """The result of the model's self-check; the first call makes it.

        Raises:
            UnsupportedModelError: the model's own ordinary call cannot be differentiated.
        """
        with self.lock, clean_slate():
            state, model = self._current(), self._model()
            if state.exactness is None and model is not None:
                state.exactness = checked(state.twin, model)
            return state.exactness or Exactness()

    def if_checked(self) -> Exactness | None:
        """As `exactness`; None where a score is refused, or there is no room for the check. It may still answer."""
        try:
            return self._current().exactness or unless_memory_runs_out(self.exactness)
        except UnsupportedModelError:
            return None

    @property
    def joins(self) -> bool:
        """Whether a row may join and leave a batch that is being written, and then be scored from its tape."""
        found = self.if_checked()
        return found is not None and found.joins

    def require_context(self) -> None:
        """Return if sentences can be scored in context.

        Raises:
            UnsupportedModelError: this model has no keys and values of its own for each token.
        """
        if self.exactness().in_context is None:
            raise UnsupportedModelError(WITHOUT_CONTEXT)

    def way_of(self, row: Row) -> Way:
        """How a row is scored."""
        known, limit = self.exactness(), self.architecture.fixed_positions
        if limit is not None and row.end > limit:  # keys that were kept are not those of one pass
            return "ordinary"
        return (known.in_context or "ordinary") if row.in_context else known.way

    # Scores.

    def score(self, rows: Sequence[Row], objective: Objective) -> list[GradientScores]:
        """The scores of some rows, in as few passes as memory allows.

        Raises:
            UnsupportedModelError: the architecture rules a score out.
            EmptyLayerSpanError: the objective's span is empty.
        """
        with self.lock, clean_slate():
            if unless_memory_runs_out(self.exactness) is None:  # a reason that rules every score out comes first
                return [unscored("ordinary", OUT_OF_MEMORY) for _ in rows]
            first = objective.span(self.architecture.n_layers)[0]
            if any(row.in_context for row in rows):
                self.require_context()
            ways: list[Way] = [self.way_of(row) for row in rows]
            by_rows = [place for place, way in enumerate(ways) if way == "rows"]
            rows = self._with_fresh_tapes(rows)
            taped = self._read([rows[place] for place in by_rows], first, lambda row, tape: row.is_on(tape, first))
            found: dict[int, GradientScores] = {}
            for group in self._groups(dict(zip(by_rows, taped, strict=True)), first):
                found.update(zip(group, self._scored([*group.values()], "rows", objective), strict=True))
            for place, (row, way) in enumerate(zip(rows, ways, strict=True)):
                if way != "rows":
                    (found[place],) = self._scored([row], way, objective)
            replayed = [
                Suspect(row, found[place], way)
                for place, (row, way) in enumerate(zip(rows, ways, strict=True))
                if way != "ordinary" and found[place].reason is None
            ]
            kinds: dict[Kind, list[Suspect]] = {
                "gradient": [one for one in replayed if not one.row.in_context],
                "context": [one for one in replayed if one.row.in_context],
            }
            suspects = suspected(kinds, [one for one in replayed if one.way == "rows"])
            if self._are_confirmed(suspects, first, objective):
                return [found[place] for place in range(len(rows))]
            return self.score(rows, objective)

    def observe(self, rows: Sequence[Row], *, own: bool = False) -> list[Observation]:
        """The evidence of every row's own tokens without a gradient; `own`: the tokens' own states are averaged."""
        without = Observation((), (), reason=OUT_OF_MEMORY)
        with self.lock, clean_slate():
            if unless_memory_runs_out(self.exactness) is None:
                return [without] * len(rows)
            n_layers, transform = self.architecture.n_layers, self.exactness().transform
            if any(self.way_of(replace(row, in_context=False)) == "ordinary" for row in rows):
                found = self.score([replace(row, in_context=False) for row in rows], Objective(layers=(n_layers - 1,)))
                return [Observation(one.log_probs, one.entropies, reason=one.reason) for one in found]
            layer = observed_layer(n_layers)
            rows = self._with_fresh_tapes(rows)
            taped = self._read(rows, layer, lambda row, tape: can_be_observed(row, tape, layer, own=own), keys=False)
            seen = [
                (row.tape and unless_memory_runs_out(lambda row=row: observe(self.twin, row, transform, own=own)))
                or without
                for row in taped
            ]
            pairs = list(zip(taped, rows, seen, strict=True))
            written = [Suspect(row, one) for row, given, one in pairs if row.tape and row.tape is given.tape]
            read_here = [Suspect(row, one) for row, given, one in pairs if row.tape is not given.tape]
            if self._are_confirmed(suspected({"forward": written}, read_here), layer):
                return seen
            return self.observe([replace(row, tape=None) for row in rows], own=own)

    def _scored(self, rows: Sequence[Row], way: Way, objective: Objective) -> list[GradientScores]:
        """The scores of rows together; where memory runs out one by one, and one that has no room has no score."""
        known, first = self.exactness(), objective.span(self.architecture.n_layers)[0]
        fits = len(rows) * max(row.live_count for row in rows) <= self._most_positions(first)
        if way != "rows" or all(row.tape for row in rows):
            options: dict[str, Any] = {"known": known, "memory": self.memory, "fits": fits}
            if found := unless_memory_runs_out(lambda: scores_by(way, self.twin, rows, objective, **options)):
                off = 0.0 if way == "ordinary" and known.deviation is not None else known.deviation
                return [replace(one, deviation=off) for one in found]
        if len(rows) > 1:
            return [one for row in rows for one in self._scored([row], way, objective)]
        return [unscored("ordinary" if way == "ordinary" else "replay", OUT_OF_MEMORY)]

    def _most_positions(self, first: int) -> int:
        """At how many positions the states of the layers from `first` on are kept for a backward pass.

        They are the inputs and outputs of matrices, by position.
        """
        matrices = [p for layer in self.twin.layers[first:] for p in layer.parameters() if p.ndim >= 2]
        one = sum((p.shape[-1] + p.shape[-2]) * p.dtype.itemsize for p in matrices)
        return self.memory.activations // max(1, one)

    def _groups(self, rows: Mapping[int, Row], first: int) -> Iterator[dict[int, Row]]:
        """The rows that share a replay, by their places: as many as fit, long ones first."""
        most = self._most_positions(first)
        left = sorted(rows.items(), key=lambda one: -one[1].live_count)
        while left:
            count = max(1, most // left[0][1].live_count)
            yield dict(left[:count])
            left = left[count:]

    def _with_fresh_tapes(self, rows: Sequence[Row]) -> list[Row]:
        """The rows without tapes of the model as it was before a change."""
        return [row if row.tape and row.tape.epoch in (None, self._epoch) else replace(row, tape=None) for row in rows]

    def _read(
        self, rows: Sequence[Row], layer: int, is_left: Callable[[Row, Tape], bool], *, keys: bool = True
    ) -> list[Row]:
        """The rows with tapes: those that writing left, where they are of use, else by passes over the texts.

        A row for whose text there is no room has none.
        """
        found = [row if row.tape and is_left(row, row.tape) else replace(row, tape=None) for row in rows]
        missing = sorted((place for place, row in enumerate(found) if row.tape is None), key=lambda n: -rows[n].end)
        while missing:
            longest = rows[missing[0]].end
            texts = list(dict.fromkeys(rows[place].ids for place in missing))[: max(1, _READ // longest)]
            group = [place for place in missing if rows[place].ids in texts]
            missing = [place for place in missing if place not in group]
            for place, row in zip(group, self._tapes([found[n] for n in group], layer, keys=keys), strict=True):
                found[place] = row
        return found

    def _tapes(self, rows: Sequence[Row], layer: int, *, keys: bool) -> Sequence[Row]:
        taped = unless_memory_runs_out(
            lambda: read(self.twin, rows, layer, memory=self.memory, epoch=self._epoch, keys=keys)
        )
        if taped is not None or len(rows) == 1:
            return taped or rows
        return [one for row in rows for one in self._tapes([row], layer, keys=keys)]

    # Real scores are compared with the ordinary call.

    def _is_due(self, length: int, kind: tuple[Kind, int]) -> bool:
        """Whether a text has to be verified: the first, one twice as long, one beyond a limit for the first time."""
        known = self._current().verified.get(kind, 0)
        if known >= length:  # as most are: the configuration need not be read
            return False
        return length >= 2 * known or any(known <= limit < length for limit in self._limits)

    @property
    def _limits(self) -> list[int]:
        """Lengths in the configuration that code may branch on."""
        config: Any = self.twin.model.config
        settings: Mapping[str, Any] = config.get_text_config(decoder=True).to_dict()
        named = [value for name, value in settings.items() if any(part in name for part in _LIMITS)]
        return [value for value in named if type(value) is int and value > 0]

    def _are_confirmed(self, suspects: Iterator[Suspicion], first: int, objective: Objective | None = None) -> bool:
        """Whether the ordinary call agrees with those that are due; else nothing but it is trusted from now on."""
        for kind, width, one in suspects:
            if not self._is_due(width, (kind, first)):
                continue
            contradicts = unless_memory_runs_out(lambda one=one: self._contradicts(one, objective))
            if contradicts:
                logger.warning(
                    "semgrad-guard steps down to the ordinary call: a replay of %d tokens is not exact", width
                )
                self._current().exactness = self.exactness().stepped_down()
                return False
            if contradicts is not None:
                self._current().verified[kind, first] = width
        return True

    def _contradicts(self, one: Suspect, objective: Objective | None) -> bool:
        """Whether a row's numbers are not those of the ordinary call.

        Half precision's own rounding would hide an error, and float32's may look like one: a copy in a wider format
        decides.
        """
        row, twin, model, dtype = replace(one.row, tape=None), self.twin, self._model(), self.twin.head.weight.dtype
        options: dict[str, Any] = {"known": self.exactness(), "memory": self.memory}
        is_half = dtype.itemsize < torch.float32.itemsize
        if objective is None or is_half or row.end > self._most_positions(0):
            # No gradient, or no room for a backward pass through the whole text: likelihoods from one pass.
            (again,) = self._tapes([row], observed_layer(self.architecture.n_layers), keys=False)
            seen = None if again.tape is None else observe(twin, again, self.exactness().transform)
            contradicts = seen is not None and disagree(one.numbers, seen, tolerance_of(dtype))
            if objective is None or contradicts or seen is None or not is_half:
                return contradicts
        else:
            (expected,) = scores_of_texts("ordinary", twin, [row], objective, **options)
            if not disagree(one.numbers, expected, tolerance_of(dtype)):
                return False
            if dtype not in WIDER or disagree(one.numbers, expected, ROUNDING):
                return True
        if model is None or not twin.layers:
            return not is_half
        wide = wide_copy(model, WIDER[dtype])
        (found,) = scores_of_texts(one.way, wide, [row], objective, **options)
        (expected,) = scores_of_texts("ordinary", wide, [row], objective, **options)
        return disagree(found, expected, tolerance_of(WIDER[dtype]))


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
                _scorers[model] = lambda: scorer
        if isinstance(_scorers[model], weakref.ref):
            _latest[:] = [scorer]
        return scorer
