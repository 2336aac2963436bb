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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from semgrad_guard.engine.interruption import InterruptibleLock
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.architecture import Architecture, Identity, is_hooked, state_of
from semgrad_guard.engine.scores.exactness import (
    WIDER,
    Exactness,
    Way,
    checked,
    disagree,
    scores_by,
    wide_copy,
)
from semgrad_guard.engine.scores.gradients import (
    GradientScores,
    Observation,
    can_be_observed,
    observe,
    observed_layer,
    tolerance_of,
    unscored,
)
from semgrad_guard.engine.scores.tape import (
    OUT_OF_MEMORY,
    Memory,
    Row,
    Tape,
    as_memory_allows,
    read,
    unless_memory_runs_out,
)
from semgrad_guard.engine.scores.twin import Twin
from semgrad_guard.errors import UnsupportedModelError

logger = logging.getLogger("semgrad_guard")

_WITHOUT_CONTEXT = (
    "the sentences before a sentence are its context by their keys and values, and this model has no such for each "
    "token (its layers keep a state, or take no cache). Take an estimator of likelihoods."
)
_READ = 1 << 13  # tokens of texts that are read in one pass, padding counted
_LIMITS = ("window", "chunk", "max_position")  # parts of the names of settings that bound lengths


@dataclass(eq=False)
class _State:
    """The model as it was at one look: what that saw, the twin, and the findings about it.

    `verified` are the tokens of the longest text whose numbers of one kind were compared with the ordinary call.
    """

    seen: Hashable
    twin: Twin
    exactness: Exactness | None = None
    fingerprint: str | None = None
    verified: dict[Hashable, int] = field(default_factory=dict[Hashable, int])


class Scorer:
    """Scores responses of one model. Thread-safe: one lock per model guards its passes."""

    def __init__(self, model: nn.Module) -> None:
        self.lock, self.memory = InterruptibleLock(), Memory()
        # Weak: a table of scorers must not keep a model alive that its owner has dropped.
        self._model = weakref.ref(model)
        self._identity = Identity(model)
        self._state: _State | None = None
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
            self._state, self._looked_in_turn = None, -1
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
            if self._state is None or self._looked_in_turn != self.lock.turn:
                with clean_slate():
                    self._state = self._look()
                self._looked_in_turn = self.lock.turn
            return self._state

    def _look(self) -> _State:
        """What is known of the model; nothing yet, where its owner has changed anything since the last turn."""
        model = self._model()
        if model is None:
            raise RuntimeError("the scored model no longer exists")
        seen = state_of(model)
        if self._state is not None and self._state.seen == seen:
            return self._state
        found = _State(seen, Twin(model))
        self._epoch = object()
        if is_hooked(model):  # a hook may refer to the model: no table may hold its twin strongly
            with _scorers_lock:
                _scorers[model] = weakref.ref(self)
        return found

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
            if self.exactness().in_context is None and any(row.in_context for row in rows):
                raise UnsupportedModelError(_WITHOUT_CONTEXT)
            by_way: dict[tuple[Way, bool], list[int]] = {}
            for place, row in sorted(enumerate(rows), key=lambda numbered: -numbered[1].live_count):
                by_way.setdefault((self.way_of(row), row.in_context), []).append(place)
            found: dict[int, GradientScores] = {}
            for (way, in_context), places in by_way.items():
                own = [rows[place] for place in places]
                scores = self._scored(own, way, objective)
                pairs = list(zip(own, scores, strict=True))
                if way != "ordinary" and not self._are_confirmed(pairs, (in_context, first), objective, way):
                    return self.score(rows, objective)
                found.update(zip(places, scores, strict=True))
            return [found[place] for place in range(len(rows))]

    def observe(self, rows: Sequence[Row], *, own: bool = False) -> list[Observation]:
        """The evidence of every row's own tokens without a gradient; `own`: the tokens' own states are averaged."""
        without = Observation((), (), reason=OUT_OF_MEMORY)
        with self.lock, clean_slate():
            if unless_memory_runs_out(self.exactness) is None:
                return [without] * len(rows)
            rows = [replace(row, in_context=False) for row in rows]
            n_layers, transform = self.architecture.n_layers, self.exactness().transform
            if any(self.way_of(row) == "ordinary" for row in rows):
                found = self.score(rows, Objective(layers=(n_layers - 1,)))
                return [Observation(one.log_probs, one.entropies, reason=one.reason) for one in found]
            layer = observed_layer(n_layers)
            taped = self._read(rows, layer, lambda row, tape: can_be_observed(row, tape, layer, own=own), keys=False)

            def attempt(some: Sequence[Row]) -> list[Observation]:
                return [observe(self.twin, row, transform, own=own) if row.tape else without for row in some]

            seen = [one or without for one in as_memory_allows(attempt, taped)]
            if self._are_confirmed(list(zip(rows, seen, strict=True)), ("observed", layer)):
                return seen
            return self.observe([replace(row, tape=None) for row in rows], own=own)

    def _scored(self, rows: Sequence[Row], way: Way, objective: Objective) -> list[GradientScores]:
        """The scores of rows, long ones first. As many as fit share a replay; one that has no room has no score."""
        known, first = self.exactness(), objective.span(self.architecture.n_layers)[0]
        most, without = (
            self._most_positions(first),
            unscored("ordinary" if way == "ordinary" else "replay", OUT_OF_MEMORY),
        )
        off = 0.0 if way == "ordinary" and known.deviation is not None else known.deviation

        def attempt(some: Sequence[Row]) -> list[GradientScores]:
            fits = len(some) * max(row.live_count for row in some) <= most
            return scores_by(way, self.twin, some, objective, known=known, memory=self.memory, fits=fits)

        if way == "rows":
            left = self._read(rows, first, lambda row, tape: row.is_on(tape, first))
        else:
            left = [self._fresh(row) for row in rows]
        found: list[GradientScores] = []
        while left:
            count = max(1, most // left[0].live_count) if way == "rows" else 1
            some = as_memory_allows(attempt, left[:count])
            found += [without if one is None else replace(one, deviation=off) for one in some]
            left = left[count:]
        return found

    def _most_positions(self, first: int) -> int:
        """At how many positions the states of the layers from `first` on are kept for a backward pass.

        They are the inputs and outputs of matrices, by position.
        """
        matrices = [p for layer in self.twin.layers[first:] for p in layer.parameters() if p.ndim >= 2]
        one = sum((p.shape[-1] + p.shape[-2]) * p.dtype.itemsize for p in matrices)
        return self.memory.activations // max(1, one)

    def _fresh(self, row: Row) -> Row:
        """The row without a tape of the model as it was before a change."""
        return row if row.tape and row.tape.epoch in (None, self._epoch) else replace(row, tape=None)

    def _read(
        self, rows: Sequence[Row], layer: int, is_left: Callable[[Row, Tape], bool], *, keys: bool = True
    ) -> list[Row]:
        """The rows with tapes: those that writing left, where they are of use, else by passes over the texts.

        A row for whose text there is no room has none.
        """
        found = [self._fresh(row) for row in rows]
        found = [row if row.tape and is_left(row, row.tape) else replace(row, tape=None) for row in found]
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
        def attempt(some: Sequence[Row]) -> list[Row]:
            return read(self.twin, some, layer, memory=self.memory, epoch=self._epoch, keys=keys)

        return [taped or row for taped, row in zip(as_memory_allows(attempt, rows), rows, strict=True)]

    # Real scores are compared with the ordinary call.

    def _are_confirmed(
        self,
        pairs: Sequence[tuple[Row, GradientScores | Observation]],
        kind: tuple[Hashable, int],
        objective: Objective | None = None,
        way: Way = "rows",
    ) -> bool:
        """Whether the ordinary call agrees with numbers of one kind, where they have to be verified.

        It is asked about the longest text, and the shortest of several, which was padded. Where it contradicts, nothing
        but it is trusted from now on.
        """
        ordered = sorted((pair for pair in pairs if pair[1].reason is None), key=lambda pair: pair[0].end)
        if not ordered:
            return True
        longest, state, kind_here = ordered[-1][0].end, self._current(), (*kind, len(ordered) > 1)
        if not self._is_due(longest, state.verified.get(kind_here, 0)):
            return True
        for row, numbers in (ordered[-1], *ordered[:-1][:1]):
            contradicts = unless_memory_runs_out(
                lambda row=row, numbers=numbers: self._contradicts(row, numbers, objective, way)
            )
            if contradicts:
                logger.warning(
                    "semgrad-guard steps down to the ordinary call: a replay of %d tokens is not exact", longest
                )
                state.exactness = self.exactness().stepped_down()
                return False
            if contradicts is not None:
                state.verified[kind_here] = longest
        return True

    def _is_due(self, length: int, verified: int) -> bool:
        """Whether a text has to be verified: the first, one twice as long, one beyond a limit for the first time.

        Limits are the lengths in the configuration that code may branch on.
        """
        if verified >= length:  # as most are: the configuration need not be read
            return False
        config: Any = self.twin.model.config
        settings: Mapping[str, Any] = config.get_text_config(decoder=True).to_dict()
        limits = [value for name, value in settings.items() if any(part in name for part in _LIMITS)]
        crossed = (type(limit) is int and max(verified, 1) <= limit < length for limit in limits)
        return length >= 2 * verified or any(crossed)

    def _contradicts(
        self, row: Row, numbers: GradientScores | Observation, objective: Objective | None, way: Way
    ) -> bool:
        """Whether a row's numbers are not those of the ordinary call.

        Half precision's own rounding would hide an error, and float32's may look like one: a copy in a wider format
        decides.
        """
        row, dtype, known = replace(row, tape=None), self.twin.head.weight.dtype, self.exactness()
        is_half = dtype.itemsize < torch.float32.itemsize
        has_room = row.end <= self._most_positions(0)
        if objective is None or is_half or not has_room:
            # No gradient, or none that half precision tells, or no room for a backward pass through the whole text:
            # likelihoods from one pass.
            (again,) = self._tapes([row], observed_layer(self.architecture.n_layers), keys=False)
            seen = None if again.tape is None else observe(self.twin, again, known.transform)
            contradicts = seen is not None and disagree(numbers, seen, tolerance_of(dtype))
            if contradicts or objective is None or not has_room:
                return contradicts

        def scores(way: Way, twin: Twin) -> GradientScores:
            return scores_by(way, twin, [row], objective, known=known, memory=self.memory)[0]

        if not is_half and not disagree(numbers, scores("ordinary", self.twin), tolerance_of(dtype)):
            return False
        model = self._model()
        if dtype not in WIDER or model is None:
            return True
        wide = wide_copy(model, WIDER[dtype])
        return disagree(scores(way, wide), scores("ordinary", wide), tolerance_of(WIDER[dtype]))


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
        UnsupportedModelError: the architecture rules a score out, or it is no model.
    """
    if not isinstance(cast(object, model), nn.Module):
        raise UnsupportedModelError(f"a {type(model).__name__} is no model of transformers; load one")
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
