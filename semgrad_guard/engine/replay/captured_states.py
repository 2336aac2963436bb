"""States of passes: those that a generation leaves for scoring, and the results of a replay that reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache

from semgrad_guard.engine.replay.batch import (
    FRUGAL,
    Memory,
    TokenBatch,
    can_be_cut,
    can_be_taken_apart,
    growing_cache,
    kept,
    stacked,
)
from semgrad_guard.engine.replay.kernels import Outputs, Place

Steps = Sequence[Sequence[torch.Tensor] | torch.Tensor]
"""The result of each step for each row."""

Survey = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A few numbers [batch, few] about one step, from the states before the head [batch, d] and its output [batch, V]."""


class Capture:
    """Keeps h^(k) at positions >= `start` while a model generates (prefill in any number of pieces, then tokens).

    It also keeps the states before the head at every step; the head's output, which spares scoring a pass through the
    head, as long as all of it stays within `memory.logits`; and the outputs of the linear maps of the layers from k on,
    which spares reading their weights once more: of as many maps as `memory.outputs` hold. With a `survey`, a head's
    output that is not kept leaves its survey.
    """

    def __init__(self, layer: int, start: int, *, memory: Memory = FRUGAL, survey: Survey | None = None) -> None:
        self.layer, self.start, self.survey, self.lets_go = layer, start, survey, False
        self._memory = memory
        self._seen, self._first, self._shape = 0, 0, torch.Size()
        self._pieces: list[torch.Tensor] = []
        self._joined = False  # whether the one piece is a copy of all there were
        self._steps: list[torch.Tensor] | None = []
        self._finals: list[torch.Tensor] = []
        self._surveys: list[torch.Tensor] = []
        self._outputs: dict[Place, list[tuple[torch.Tensor, int]]] = {}
        self._left_out: set[Place] = set()
        self._held = 0  # bytes of outputs

    def skip(self, columns: int) -> None:
        """So many columns come from a cache; the first hidden states are those that follow."""
        self._seen = columns

    def __call__(self, hidden: torch.Tensor) -> None:
        self._first, self._shape = max(0, self.start - self._seen), hidden.shape[:2]
        self._seen += hidden.shape[1]
        if self._first < hidden.shape[1]:
            self._pieces.append(self._from_start(hidden))
            self._joined = False

    def see_output(self, place: Place, output: torch.Tensor) -> None:
        """Take in the output of a linear map [batch, positions, out] in the pass whose h^(k) came last."""
        if place[0] < self.layer or place in self._left_out or not self._memory.outputs or output.is_inference():
            return
        if output.shape[:2] != self._shape or output.ndim != 3:
            return
        if self._first < output.shape[1]:
            piece = self._from_start(output)
            self._outputs.setdefault(place, []).append((piece, piece._version))
            self._held += piece.nbytes
        while self._held > self._memory.outputs:
            place, pieces = self._outputs.popitem()
            self._left_out.add(place)
            self._held -= sum(piece.nbytes for piece, _ in pieces)

    def _from_start(self, states: torch.Tensor) -> torch.Tensor:
        # The prefill's slice is copied: a view would keep the whole prompt's states alive.
        return states[:, self._first :].detach().clone() if self._first else states.detach()

    def see_head(self, final: torch.Tensor, raw: torch.Tensor) -> None:
        """Take in the states before the head [batch, positions, d] and its output [batch, positions, V] of one step.

        The last position counts.
        """
        self._finals.append(final[:, -1].detach().clone())
        last = raw[:, -1].detach()
        if self._steps is not None and (len(self._steps) + 1) * last.nbytes > self._memory.logits:
            self.surveys()
            self._steps = None
        if self._steps is not None:
            self._steps.append(last.clone() if raw.shape[1] > 1 else last)
        elif self.survey is not None:
            self._look([last], self.survey)

    @property
    def positions(self) -> int:
        """How many positions are kept."""
        return sum(piece.shape[1] for piece in self._pieces)

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of the head's outputs and of the linear maps' outputs that are kept."""
        return sum(step.nbytes for step in self._steps or ()), self._held

    def states(self) -> torch.Tensor:
        """h^(k) at every position from `start` on: [batch, positions, d]."""
        if not self._joined:
            self._pieces, self._joined = [torch.cat(self._pieces, dim=1)], True
        return self._pieces[0]

    def logits(self) -> tuple[torch.Tensor, ...]:
        """The head's output [batch, V] at every step; empty where not all of it was kept."""
        return tuple(self._steps or ())

    def finals(self) -> tuple[torch.Tensor, ...]:
        """The states before the head [batch, d] at every step."""
        return tuple(self._finals)

    def surveys(self) -> tuple[torch.Tensor, ...]:
        """The survey of the head's output at every step; empty without one."""
        if self.survey is not None and self._steps is not None:
            self._look(self._steps[len(self._surveys) :], self.survey)
        return tuple(self._surveys)

    def _look(self, steps: Sequence[torch.Tensor], survey: Survey) -> None:
        """Survey the next steps."""
        for raw in steps:
            self._surveys.append(survey(self._finals[len(self._surveys)], raw))

    def outputs(self) -> Outputs:
        """The output of each linear map at every position from `start` on: [batch, positions, out].

        Without those that gave it in another shape or number, and those whose output was changed afterwards, in place.
        """
        outputs: dict[Place, torch.Tensor] = {}
        positions = self.positions
        for place, pieces in self._outputs.items():
            whole = sum(piece.shape[1] for piece, _ in pieces) == positions
            if whole and all(piece._version == version for piece, version in pieces):
                if len(pieces) > 1:
                    with torch.inference_mode(False):  # a caller's: its tensors have no version
                        joined = torch.cat([piece for piece, _ in pieces], dim=1)
                    self._outputs[place] = pieces = [(joined, joined._version)]
                outputs[place] = pieces[0][0]
        return outputs

    @classmethod
    def of_scored(cls, passes: Sequence[tuple[Capture, int]]) -> Capture:
        """The passes of one row whose tokens here have been scored: without outputs of the head and of the maps."""
        found = cls(passes[0][0].layer, 0)
        found.lets_go, found._joined = True, True
        found._pieces = [torch.cat([capture.states()[own : own + 1] for capture, own in passes], dim=1)]
        found._finals = [final[own : own + 1] for capture, own in passes for final in capture.finals()]
        found._steps = [final[:, :0] for final in found._finals]
        return found

    def of_rows(self, rows: Sequence[int]) -> Capture:
        """The same passes for some of the rows, without the memory of the others."""
        index, other = torch.tensor(list(rows)), copy.copy(self)

        def of(whole: torch.Tensor) -> torch.Tensor:
            return whole[index.to(whole.device)]

        other._pieces, other._finals = [of(self.states())], list(map(of, self._finals))
        other._steps = None if self._steps is None else list(map(of, self._steps))
        other._surveys = list(map(of, self._surveys))
        small = {place: of(output) for place, output in self.outputs().items()}
        other._outputs = {place: [(output, output._version)] for place, output in small.items()}
        other._held = sum(output.nbytes for output in small.values())
        return other


@dataclass(frozen=True)
class RowPasses:
    """The states of the passes that wrote one row of a changing batch.

    `before` [1 row] is the cache of its columns before the first state that was kept; `passes` are the captures of the
    passes that read the others, in their order, and the row's place in each.
    """

    before: Cache
    passes: Sequence[tuple[Capture, int]]

    def steps(self, held: Callable[[Capture], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """What the captures hold of the row at every step (`Capture.logits`, ...); empty where one holds nothing."""
        known = [[step[row] for step in held(capture)] for capture, row in self.passes]
        return [step for steps in known for step in steps] if all(known) else []


class _Layout:
    """Where the positions of several captures go in one batch [rows, longest].

    Rows that end earlier are filled up with zeros; nothing reads them.
    """

    def __init__(self, rows: Sequence[RowPasses]) -> None:
        self.captures = list({id(capture): capture for row in rows for capture, _ in row.passes}.values())
        self.lengths = [sum(capture.positions for capture, _ in row.passes) for row in rows]
        numbers = {id(capture): number for number, capture in enumerate(self.captures)}
        self._rows = [[(numbers[id(capture)], own) for capture, own in row.passes] for row in rows]

    def laid_out(self, sources: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """One tensor [rows, longest, d] from the captures' own [its rows, its positions, d], by their numbers."""
        rows = [torch.cat([sources[n][own] for n, own in row if n in sources]) for row in self._rows]
        return pad_sequence(rows, batch_first=True) if rows[1:] else rows[0][None]

    def states(self) -> torch.Tensor:
        """h^(k), laid out."""
        return self.laid_out({number: capture.states() for number, capture in enumerate(self.captures)})

    def outputs(self) -> Outputs:
        """The outputs of the maps that all captures hold, laid out without the columns of the `gap`."""
        held = {number: capture.outputs() for number, capture in enumerate(self.captures) if not capture.lets_go}
        if self._rows[1:] and len(held) < len(self.captures):
            return {}
        places = set[Place].intersection(*map(set, held.values()))
        return {place: self.laid_out({number: own[place] for number, own in held.items()}) for place in places}


def gap_of(stretches: Sequence[tuple[int, bool]]) -> tuple[int, int]:
    """The columns of one row at which outputs have been let go, from its stretches: so many columns, and whether.

    They are those of one stretch. (0, 0) for none.
    """
    ends = pairwise(accumulate((columns for columns, _ in stretches), initial=0))
    return next((own for own, (_, lets_go) in zip(ends, stretches, strict=True) if lets_go), (0, 0))


@dataclass(frozen=True)
class CapturedStates:
    """The states that a generation leaves for scoring.

    Its KV cache, h^(layer) and the outputs of the linear maps of the layers from there on, both from column `begins`
    (the earliest t*) on, and the states before the head and its output at each step and row (maps and head as far as
    they were kept). Of the cache, only the columns before the first state are needed.
    Rows end after so many columns of `states` (`row_columns`; empty: all of them do so together).
    Where a row is read by sentence, `outputs` leave out the columns of `gap`, counted from the first of `states`.
    `surveys` are there where the head's output is not, and a survey was wanted.
    `epoch` is the model's own at that time (`Scorer.epoch`; None: any): the states of another one
    is of no use.
    """

    cache: Cache
    layer: int
    begins: int
    states: torch.Tensor
    logits: Steps = ()
    outputs: Outputs = field(default_factory=dict[Place, torch.Tensor])
    epoch: object = None
    finals: Steps = ()
    surveys: Steps = ()
    row_columns: tuple[int, ...] = ()
    gap: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, cache: Cache, capture: Capture, epoch: object = None) -> CapturedStates:
        """The states of a generation with this cache and capture."""
        states, logits, outputs = capture.states(), capture.logits(), capture.outputs()
        begins = cache.get_seq_length() - states.shape[1]
        surveys = () if logits else capture.surveys()
        return cls(cache, capture.layer, begins, states, logits, outputs, epoch, capture.finals(), surveys)

    @classmethod
    def gathered(cls, rows: Sequence[RowPasses], epoch: object = None, *, padding: int = 0) -> CapturedStates:
        """The states of rows that were written in a changing batch, laid out as one batch.

        As many columns of each row's prompt must have been kept. The first `padding` of them are before every row:
        they were there for the prompt of another one, which is not among these.
        """
        cache, layout = stacked([row.before for row in rows]), _Layout(rows)
        captures = layout.captures
        begin, end = gap_of([(capture.positions, capture.lets_go) for capture in captures])
        logits = by_step([row.steps(Capture.logits) for row in rows])
        surveys = () if logits else by_step([row.steps(Capture.surveys) for row in rows])
        return cls(
            cache,
            captures[0].layer,
            cache.get_seq_length(),
            layout.states()[:, padding:],
            logits,
            {place: output[:, padding:] for place, output in layout.outputs().items()},
            epoch,
            by_step([row.steps(Capture.finals) for row in rows]),
            surveys,
            tuple(length - padding for length in layout.lengths),
            (begin - padding, end - padding),
        )

    @classmethod
    def below(
        cls, batch: TokenBatch, parts: Sequence[TokenBatch], rows: Sequence[CapturedStates]
    ) -> CapturedStates | None:
        """The states of `parts`, of one row each and each of them fit for it, as those of the parts stacked to a batch.

        None where some do not reach back to the batch's cut, or begin at another layer.
        """
        cut = batch.cut
        begins = [cut - batch.prompt_columns + part.prompt_columns for part in parts]
        reach = zip(rows, begins, strict=True)
        if not all(row.begins <= begin and row.layer == rows[0].layer for row, begin in reach):
            return None

        def of(held: Callable[[CapturedStates], torch.Tensor]) -> torch.Tensor:
            return pad_sequence(
                [held(row)[0, begin - row.begins :] for row, begin in zip(rows, begins, strict=True)], batch_first=True
            )

        ends = [row.begins + row.states.shape[1] for row in rows]
        whole = not any(row.lacks(*own) for row, *own in zip(rows, begins, ends, strict=True))
        shared = set(rows[0].outputs).intersection(*(row.outputs for row in rows)) if whole else set[Place]()
        return cls(
            stacked([kept(row.cache, [0], 0, begin) for row, begin in zip(rows, begins, strict=True)]),
            rows[0].layer,
            cut,
            of(lambda row: row.states),
            by_step([[step[0] for step in row.logits] for row in rows]),
            {place: of(lambda row, place=place: row.outputs[place]) for place in shared},
            rows[0].epoch,
        )

    def part(self, rows: Sequence[int], *, skip: int) -> CapturedStates:
        """The states of these rows, without the first `skip` columns, which are padding in all of them.

        Without a cache to replay them from, where it cannot be taken apart.
        """
        index, gone = torch.tensor(list(rows)), max(0, skip - self.begins)
        begin, end = self.gap

        def of(whole: torch.Tensor) -> torch.Tensor:
            return whole[index.to(whole.device), gone:]

        return replace(
            self,
            cache=kept(self.cache, rows, skip) if can_be_taken_apart(self.cache) else growing_cache(),
            begins=max(0, self.begins - skip),
            states=of(self.states),
            logits=[[step[row] for row in rows] for step in self.logits],
            outputs={place: of(output) for place, output in self.outputs.items()},
            finals=[[step[row] for row in rows] for step in self.finals],
            surveys=[[step[row] for row in rows] for step in self.surveys],
            row_columns=tuple(self.row_columns[row] - gone for row in rows) if self.row_columns else (),
            gap=(begin - gone, end - gone),
        )

    def holds(self, batch: TokenBatch) -> bool:
        """Whether these states reach from the batch's cut to its end, row for row (beams have more rows)."""
        reaches = self.begins <= batch.cut and self.begins + self.states.shape[1] >= batch.end
        return reaches and len(self.states) == len(batch.segments)

    def holds_answers(self, batch: TokenBatch) -> bool:
        """Whether the last tokens were read, too, by which their answers ended: a limit cuts answers off before."""
        ends = self.row_columns or (self.states.shape[1],) * len(self.states)
        needed = [columns.stop - self.begins for columns in batch.scored]
        return all(end >= column for end, column in zip(ends, needed, strict=True))

    def fits(self, batch: TokenBatch) -> bool:
        """Whether the batch can be replayed from these states: the cache reaches up to its cut."""
        return self.holds(batch) and can_be_cut(self.cache, batch.cut)

    def steps(self, begin: int, count: int) -> list[torch.Tensor]:
        """The head's output [V] at `count` steps of one row; empty where not all of them were kept."""
        found = [step[0] for step in self.logits[begin : begin + count]]
        return found if len(found) == count and all(map(len, found)) else []

    def raw_logits(self, batch: TokenBatch) -> list[torch.Tensor] | None:
        """The head's output [V] for each of the batch's response tokens, row after row; None if not all were kept."""
        found = _by_token(self.logits, batch)
        return found if found and all(map(len, found)) else None

    def final_states(self, batch: TokenBatch) -> torch.Tensor | None:
        """The states that predict the batch's response tokens [n, d], before the head; None if not all were kept."""
        kept = _by_token(self.finals, batch)
        return None if kept is None else torch.stack(kept)

    def surveyed(self, batch: TokenBatch) -> torch.Tensor | None:
        """The survey of each of the batch's response tokens [n, few]; None where that is not known."""
        known = _by_token(self.surveys, batch)
        return None if known is None else torch.stack(known)

    def known_outputs(self, batch: TokenBatch) -> Outputs:
        """The outputs of the linear maps at the columns that are replayed [B, columns, out]."""
        if self.lacks(batch.cut, batch.end):
            return {}
        return {place: _ordinary(self.output(place, batch.cut, batch.end).contiguous()) for place in self.outputs}

    def lacks(self, begin: int, end: int) -> bool:
        """Whether outputs have been let go at some of the columns [begin, end)."""
        first, past = self.gap
        return begin - self.begins < past and end - self.begins > first

    def output(self, place: Place, begin: int, end: int) -> torch.Tensor:
        """The output of a linear map at columns [begin, end) that it has not been let go of [B, columns, out]."""
        first, past = self.gap
        gone = self.begins + (past - first if begin - self.begins >= past else 0)
        return self.outputs[place][:, begin - gone : end - gone]

    def states_of(self, batch: TokenBatch, *, whole: bool = False) -> torch.Tensor:
        """h^(layer) at the columns that are replayed [B, columns, d]; `whole`: up to the answers' last tokens."""
        return _ordinary(self.states_between(batch.cut, batch.end + whole))

    def states_between(self, begin: int, end: int) -> torch.Tensor:
        """h^(layer) at columns [begin, end)."""
        return self.states[:, begin - self.begins : end - self.begins]


@dataclass(frozen=True)
class Replayed:
    """A forward pass with a graph: h^(l) of the span and `final` states before the head, [B, columns, d] each.

    `hidden` begins at column `start`, `final` at column `head_start`; `token_axis` is the axis of `hidden` that counts
    columns (a model with several residual streams has more axes). Where the pass went through the head (full tier),
    there are `logits` from `head_start` instead, and `head_weight` [V, d] is the factor of the head alone;
    `raw_logits` is the head's own output, without a graph, where its module was called. `kept_logits` is the head's
    output for each response token, where its generation kept it.
    """

    start: int
    final: torch.Tensor | None
    hidden: tuple[torch.Tensor, ...]
    head_start: int
    logits: torch.Tensor | None = None
    raw_logits: torch.Tensor | None = None
    head_weight: torch.Tensor | None = None
    kept_logits: Sequence[torch.Tensor] | None = None
    token_axis: int = 1


def by_step(rows: Sequence[Sequence[torch.Tensor]]) -> Steps:
    """Rows' steps, step by step; rows that ended earlier repeat their last one. None where a row has none."""
    if not all(rows):
        return ()
    return [[row[min(step, len(row) - 1)] for row in rows] for step in range(max(map(len, rows)))]


def _by_token(steps: Steps, batch: TokenBatch) -> list[torch.Tensor] | None:
    """The result of each step for each of the batch's scored tokens, row after row."""
    if len(steps) <= batch.end - batch.prompt_columns:
        return None
    spans = [(own.start - batch.prompt_columns, own.stop - batch.prompt_columns) for own in batch.scored]
    return [steps[step][row] for row, span in enumerate(spans) for step in range(*span)]


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it was made in inference mode: no gradient passes through such a one, without a word."""
    return tensor.clone() if tensor.is_inference() else tensor
