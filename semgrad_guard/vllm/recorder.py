"""`Recorder`: what vLLM's own forward passes leave of each answer, so that observing it takes no second pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from semgrad_guard.engine.replay.captured_states import CapturedStates, by_step
from semgrad_guard.engine.replay.prefix_cache import growing_cache


@dataclass(eq=False)
class Record:
    """What passes left of an answer to a prompt of `prompt` tokens: for each token of it, what predicted that one.

    `states` is h^(k) in pieces [n, d]; `finals` are the states before the head [d] and `logits` its outputs [V], None
    where not all were kept.
    """

    prompt: int
    states: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    finals: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    logits: list[torch.Tensor] | None = field(default_factory=list[torch.Tensor])
    length: int = 0
    """Tokens whose states are there."""


@dataclass(frozen=True)
class _Part:
    """The tokens of one request in a pass: rows [start, start + count) are its positions from `first` on."""

    record: Record | None
    start: int
    first: int
    count: int

    @property
    def new(self) -> tuple[int, int] | None:
        """The rows whose states are wanted and not there yet.

        A request that was preempted is read again, and what it had written with it.
        """
        if self.record is None:
            return None
        wanted = self.record.prompt - 1 + self.record.length
        begin, end = max(self.first, wanted), self.first + self.count
        return (self.start + begin - self.first, self.start + self.count) if wanted == begin < end else None


class Recorder:
    """Listens to a model runner of vLLM's: to decoder layer k's output and to the head.

    `records` are those that are kept, by vLLM's names of the requests. `budget` bounds the bytes of the head's outputs;
    beyond it the head is computed again.
    """

    def __init__(self, runner: Any, layer: int, *, budget: Callable[[], int]) -> None:
        self.records: dict[str, Record] = {}
        self._runner, self._budget = runner, budget
        self._scheduled: Any = None
        self._execute, self._compute_logits = runner.execute_model, runner.model.compute_logits
        runner.execute_model, runner.model.compute_logits = self._execute_model, self._see_head
        runner.model.model.layers[layer - 1].register_forward_hook(self._see_layer)

    def _execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._scheduled = scheduled
        try:
            return self._execute(scheduled, *args, **kwargs)
        finally:
            self._scheduled = None

    def _see_layer(self, _module: Any, _args: Any, output: Any) -> None:
        """Keep the states of the positions that predict a token of an answer. A layer keeps the residual apart."""
        wanted = [(part.record, rows) for part in self._parts() if part.record and (rows := part.new)]
        if not wanted:
            return
        hidden, residual = output
        rows = torch.cat([torch.arange(*each) for _, each in wanted]).to(hidden.device)
        lengths = [end - begin for _, (begin, end) in wanted]
        # A copy of these rows alone: a view would keep a whole prompt's states alive.
        kept = hidden.index_select(0, rows) + residual.index_select(0, rows)
        for (record, _), piece, length in zip(wanted, kept.split(lengths), lengths, strict=True):
            record.states.append(piece)
            record.length += length

    def _see_head(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep what went into the head, and came out, where it is about the next token of an answer."""
        logits = self._compute_logits(hidden, *args, **kwargs)
        parts = list(self._parts())
        if logits is not None and len(hidden) == len(parts):
            budget, held = (
                self._budget(),
                sum(each.nbytes for record in self.records.values() for each in record.logits or ()),
            )
            for row, part in enumerate(parts):
                record = part.record
                if record is None or part.first + part.count != record.prompt + len(record.finals):
                    continue  # a part of a prompt, or what had been written before
                record.finals.append(hidden[row].clone())
                if record.logits is not None and held + logits[row].nbytes <= budget:
                    record.logits.append(logits[row].clone())  # the sampler writes into its own
                    held += logits[row].nbytes
                else:
                    record.logits = None
        return logits

    def _parts(self) -> Iterator[_Part]:
        """The requests of the pass, in the order of its rows."""
        if self._scheduled is None:
            return
        batch, start = self._runner.input_batch, 0
        for request in batch.req_ids:
            count = self._scheduled.num_scheduled_tokens.get(request, 0)
            first = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[request]])
            yield _Part(self.records.get(request), start, first, count)
            start += count


def left_by(records: Sequence[Record], lengths: Sequence[int], *, layer: int, epoch: object) -> CapturedStates | None:
    """What passes left of answers of these lengths, as a batch to observe; None where not all of it is there."""
    if not all(record.length >= length <= len(record.finals) for record, length in zip(records, lengths, strict=True)):
        return None
    states = [torch.cat(record.states) for record in records]
    longest = max(map(len, states))
    return CapturedStates(
        growing_cache(),
        layer,
        max(record.prompt for record in records) - 1,
        torch.stack([F.pad(each, (0, 0, 0, longest - len(each))) for each in states]),
        by_step([record.logits or () for record in records]),
        epoch=epoch,
        finals=by_step([record.finals for record in records]),
    )
