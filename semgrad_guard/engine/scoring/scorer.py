"""Gradient scores of any response: one scorer per model, its tier chosen by a self-check, exact in every tier."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol, TypeVar

import torch
from torch import nn

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.batch import (
    OUT_OF_MEMORY,
    TokenBatch,
    give_back_memory,
    is_out_of_memory,
    unless_memory_runs_out,
)
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.model_copies import WIDER, float_sample
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scoring.gradients import GradientScores, Rows, States, Tier, score_by, unscored
from semgrad_guard.engine.scoring.model_states import Kind, ModelStates, OrdinaryCall, clean_slate
from semgrad_guard.engine.scoring.observation import (
    Observation,
    observe,
)
from semgrad_guard.engine.scoring.self_check import (
    Exactness,
    equal_rows_stand_alone,
    self_check,
    tiers_in_context,
)
from semgrad_guard.errors import UnsupportedModelError


class _Reasoned(Protocol):
    """The result for a row, or the reason why there is none."""

    @property
    def reason(self) -> str | None: ...


R = TypeVar("R", bound=_Reasoned)

WITHOUT_CONTEXT = (
    "the sentences before a sentence are its context by their keys and values, and this model has no such for each "
    'token (its layers keep a state, or take no cache). Take earlier="differentiated", or an estimator of likelihoods.'
)
"""Why no sentence of a model can be scored in context."""

logger = logging.getLogger("semgrad_guard")


class Scorer(ModelStates):
    """Scores responses of one model. Thread-safe: one lock per model guards its replays (and generations)."""

    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that agree with plain autograd on this model, cheapest first; settled by one self-check."""
        return self.exactness().tiers

    def exactness(self) -> Exactness:
        """The result of the model's self-check; the first call makes it.

        Raises:
            UnsupportedModelError: the model's own ordinary call cannot be differentiated.
        """
        with self.lock, clean_slate():
            replayer = self.current_replayer()
            if self._exactness is None:
                self._exactness = self_check(self.architecture, replayer, self._sample(replayer))
            return self._exactness

    def tiers_in_context(self) -> tuple[Tier, ...]:
        """The tiers that are exact where the tokens before a response are constants, cheapest first.

        Raises:
            UnsupportedModelError: this model has no keys and values of its own for each token.
        """
        with self.lock, clean_slate():
            way, replayer = self.exactness(), self.current_replayer()
            if way.in_context is None:
                way = self._exactness = tiers_in_context(self.architecture, replayer, self._sample(replayer), way)
            if not way.in_context:
                raise UnsupportedModelError(WITHOUT_CONTEXT)
            return way.in_context or ()

    def if_checked(self) -> Exactness | None:
        """As `exactness`; None where a score is refused, or there is no room for the check. It may still answer."""
        try:
            return self._exactness or unless_memory_runs_out(self.exactness)
        except UnsupportedModelError:
            return None

    @property
    def pads(self) -> bool:
        """Whether rows of a batch may be padded on the left, and then give the same as by themselves."""
        found = self.if_checked()
        return found is not None and found.pads

    @property
    def stacks(self) -> bool:
        """Whether rows of equal length give the same in a batch as by themselves; by a trial where none is padded."""
        with self.lock, clean_slate():
            return self.pads or equal_rows_stand_alone(self.current_replayer())

    @property
    def joins(self) -> bool:
        """Whether a row may join and leave a batch that is being written, and then be scored from its states."""
        return self.pads and "captured" in self.tiers()

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
        """Score every row of a batch as a whole; `captured` lets the captured tier reuse generated states."""
        return tuple(parts[0] for parts in self.score_parts(batch, objective, captured))

    def score_sentences(
        self, rows: Sequence[tuple[TokenBatch, CapturedStates | None]], objective: Objective
    ) -> list[tuple[GradientScores, ...]]:
        """Score every part of some rows' responses, given all before it (`Objective.earlier`); states as in `score`.

        Raises:
            UnsupportedModelError: as `tiers_in_context`.
        """
        if objective.earlier == "differentiated":
            return [self.score_parts(row, objective, captured)[0] for row, captured in rows]
        with self.lock, clean_slate():
            parts = [list(row.parts_in_context()) for row, _ in rows]
            states = [self._of_text(*row, objective, own[-1]) for row, own in zip(rows, parts, strict=True)]
            # From the longest on, which is verified for all of them.
            due = [(own[number], known) for own, known in zip(parts, states, strict=True) for number in range(len(own))]
            due.sort(key=lambda one: one[0].longest, reverse=True)
            found = dict[int, GradientScores]()
            for group, batch, known in self._groups(due, objective):
                for part, own in zip(group, self.score_parts(batch, objective, known), strict=True):
                    found[id(part)] = own[0]
            return [tuple(found[id(part)] for part in own) for own in parts]

    def _groups(
        self, due: Sequence[tuple[TokenBatch, CapturedStates | None]], objective: Objective
    ) -> Iterator[tuple[Sequence[TokenBatch], TokenBatch, States]]:
        """The parts that share a pass: those in context whose graph is kept whole, and those without any.

        The parts, their batch, and states.
        """
        known = [(part, own) for part, own in due if own is not None and self.pads]
        in_context = [one for one in known if one[0].context]
        span, joined, begin = objective.span(self.architecture.n_layers), None, 0
        most = self.current_replayer().most_positions(span[0]) if in_context else 0
        while begin < len(in_context):
            columns, end = in_context[begin][0].replayed_columns, begin + 1
            while end < len(in_context):
                columns = max(columns, in_context[end][0].replayed_columns)
                if columns * (end + 1 - begin) > most:
                    break
                end += 1
            group, states = zip(*in_context[begin:end], strict=True)
            yield group, TokenBatch.stacked(group), states
            begin = end
        first = [one for one in known if not one[0].context and self._fits(one[0], span, one[1])]
        if first[1:]:
            group, states = zip(*first, strict=True)
            batch = TokenBatch.stacked(group)
            if joined := CapturedStates.below(batch, group, states):
                yield group, batch, joined
        together = {id(part) for part, _ in (*in_context, *(first if joined else ()))}
        yield from (([part], part, own) for part, own in due if id(part) not in together)

    def _of_text(
        self, row: TokenBatch, captured: CapturedStates | None, objective: Objective, last: TokenBatch
    ) -> CapturedStates | None:
        """The states from which each part of a row, up to the `last`, is replayed; None where it is read again."""
        if not last.context:
            return captured
        span, tiers = objective.span(self.architecture.n_layers), self._tiers_for(last)
        if tiers == ("full",) or self._current().inputs.must_go_ordinary(row):
            return None
        replayer = self.current_replayer()
        if captured and "captured" in tiers and self._fits(row, span, captured):
            return unless_memory_runs_out(lambda: replayer.with_keys(row, captured))
        return unless_memory_runs_out(lambda: replayer.record(row, span[0]))

    def score_parts(self, batch: TokenBatch, objective: Objective, captured: States = None) -> Rows:
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

    def _score_batch(self, batch: TokenBatch, objective: Objective, captured: States) -> Rows:
        """The scores by replays where these are exact, verified where an input has to be; else by ordinary calls."""
        tiers = self._tiers_for(batch)  # a reason that rules every score out comes first
        if tiers == ("full",):
            return self._score(batch, objective, None, tiers)
        if self._current().inputs.must_go_ordinary(batch):
            if len(batch.lengths) > 1:
                return tuple(self._score_batch(row, objective, None)[0] for row in batch.rows())
            return self._score(batch, objective, None, ("full",))
        scores = self._replay(batch, objective, captured, tiers)

        def agrees(call: OrdinaryCall, place: int, row: TokenBatch) -> bool | None:
            nothing = any(part.reason for part in scores[place])
            return None if nothing else not call.contradicts(scores[place], row, objective)

        kind: Kind = "context" if batch.context else "gradient"
        return scores if self._confirmed(batch, kind, agrees) else self._score_batch(batch, objective, None)

    def _replay(self, batch: TokenBatch, objective: Objective, captured: States, tiers: tuple[Tier, ...]) -> Rows:
        """The scores by one replay; row after row, and so without captured states, where padding is wrong."""
        together = self.pads or not batch.is_padded
        scores = self._score(batch, objective, captured, tiers) if together else ()
        if together and (len(scores) == 1 or not any(part.reason for row in scores for part in row)):
            return scores
        singly = tuple(self._score(row, objective, None, tiers)[0] for row in batch.rows())
        # Padding alone makes some attention kernels answer NaN: such rows are given a second chance.
        return tuple(
            tuple(alone if part.reason else part for part, alone in zip(*rows, strict=True))
            for rows in zip(scores or singly, singly, strict=True)
        )

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
            self._exactness = replace(self.exactness(), tiers=("full",), in_context=("full",), cuts=False, pads=False)
        elif agreed:
            state.inputs.note(row, kind)
        return agreed is not False

    def observe(
        self, batch: TokenBatch, captured: CapturedStates | None = None, *, own: bool = False
    ) -> tuple[Observation, ...]:
        """The evidence of every row's own tokens without a gradient; `captured` is left by the batch's generation."""
        with self.lock, clean_slate():
            n_layers = self.architecture.n_layers
            if not self._reads_off(batch, captured):
                found = chain.from_iterable(self.score_parts(batch, Objective(layers=(n_layers - 1,))))
                return tuple(Observation(part.log_probs, part.entropies, reason=part.reason) for part in found)
            replayer, way = self.current_replayer(), self.exactness()
            return self._together(
                batch,
                lambda rows, kept: observe(rows, replayer, n_layers, way.transform, kept, own=own),
                lambda reason: Observation((), (), reason=reason),
                self._kept(batch, captured),
            )

    def _kept(self, batch: TokenBatch, captured: CapturedStates | None) -> CapturedStates | None:
        """The states of a batch's generation, where its numbers can be read off."""
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
            whole = replace(batch, segments=tuple((length,) for length in batch.lengths))
            ours = observe(whole, call.replayer, call.n_layers, way.transform, kept)[place]
            return not call.contradicts_observation(ours, row)

        return self._confirmed(batch, "forward", agrees)

    def _together(
        self,
        batch: TokenBatch,
        work: Callable[[TokenBatch, CapturedStates | None], tuple[R, ...]],
        without: Callable[[str], R],
        kept: CapturedStates | None = None,
    ) -> tuple[R, ...]:
        """The result of `work` on a batch, and on the states of its generation where they are of use.

        Row by row, without states, where padding is wrong, memory runs out, or a row has none.
        """
        alone, way = len(batch.lengths) == 1, self.exactness()
        level = way.pads if batch.is_padded else way.cuts
        if not alone and (not level or self._current().inputs.must_go_ordinary(batch)):
            return tuple(self._together(row, work, without)[0] for row in batch.rows())
        try:
            found = work(batch, kept)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = ()
        if not found:
            give_back_memory()
            if alone:
                return (without(OUT_OF_MEMORY),) * len(batch.parts)
            return tuple(self._together(row, work, without)[0] for row in batch.rows())
        if alone or not any(result.reason for result in found):
            return found
        # Padding alone makes some attention kernels answer NaN: such rows are given a second chance.
        rows = zip(found, batch.rows(), strict=True)
        return tuple(self._together(row, work, without)[0] if result.reason else result for result, row in rows)

    def _left(self, captured: CapturedStates) -> bool:
        """Whether the model as it is now left these states."""
        return captured.epoch in (None, self._epoch)

    def can_resume(self, positions: int) -> bool:
        """Whether reading so many positions in two passes, the second from a cache, gives the same as one pass."""
        exactness = self.exactness()
        return exactness.pads and exactness.cuts and "prefix" in self._tiers_at(positions)

    def _tiers_at(self, positions: int) -> tuple[Tier, ...]:
        limit = self.architecture.fixed_positions
        return ("full",) if limit is not None and positions > limit else self.tiers()

    def _tiers_for(self, batch: TokenBatch) -> tuple[Tier, ...]:
        tiers = self._tiers_at(batch.longest)
        return tuple(tier for tier in self.tiers_in_context() if tier in tiers) if batch.context else tiers

    def _fits(self, batch: TokenBatch, span: Sequence[int], captured: States) -> bool:
        """Whether these states are of the model as it is, and reach far enough."""
        sources = captured if isinstance(captured, tuple) else (captured,)
        return all(
            one is not None and one.layer <= span[0] and self._left(one) and (bool(batch.context) or one.fits(batch))
            for one in sources
        )

    def _score(self, batch: TokenBatch, objective: Objective, captured: States, tiers: tuple[Tier, ...]) -> Rows:
        way, span = self.exactness(), objective.span(self.architecture.n_layers)
        fits = self._fits(batch, span, captured)
        tier: Tier = next(tier for tier in tiers if tier != "captured" or fits)
        replayer = self.current_replayer()
        rows = score_by(tier, way, replayer=replayer, batch=batch, objective=objective, span=span, captured=captured)
        off = way.deviations.get(tier)
        return tuple(tuple(replace(scores, deviation=off) for scores in row) for row in rows)

    def _keep_weakly(self, model: nn.Module) -> None:
        with _scorers_lock:
            _scorers[model] = weakref.ref(self)

    @property
    def _exactness(self) -> Exactness | None:
        return self._current().exactness

    @_exactness.setter
    def _exactness(self, exactness: Exactness | None) -> None:
        self._current().exactness = exactness

    def _sample(self, replayer: Replayer) -> Callable[[], Replayer] | None:
        """Makes a copy of the model in a wider number format, where there is one."""
        model, layers, wider = self._model(), self.architecture.layers, WIDER.get(replayer.head.weight.dtype)
        if model is None or layers is None or wider is None:
            return None

        def make() -> Replayer:
            first = self.architecture.n_layers // 2
            copy = float_sample(model, layers, first, wider, returns_tuples=replayer.layers_return_tuples)
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
                _scorers[model] = lambda: scorer
        if isinstance(_scorers[model], weakref.ref):
            _latest[:] = [scorer]
        return scorer
