"""`Recorder`: the states that vLLM's own passes leave of each answer, so that a score reads nothing again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache

from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.answers.sentences import EndedSentences
from semgrad_guard.engine.answers.writing import BatchRequest, Decoder, RunningAnswer
from semgrad_guard.engine.interruption import add_cost
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.replay.captured_states import CapturedStates, Survey, by_step, gap_of
from semgrad_guard.engine.replay.memory import Memory, growing_cache, unless_memory_runs_out
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate
from semgrad_guard.engine.sentences import Span
from semgrad_guard.vllm.kept_outputs import KeptOutputs, Piece
from semgrad_guard.vllm.paged_cache import PagedCache
from semgrad_guard.vllm.shared_weights import library
from semgrad_guard.vllm.thought_limits import named


@dataclass(eq=False)
class Record:
    """The states that passes left of an answer to a prompt of `prompt` tokens.

    `states` is h^(k) in pieces [n, d], from the prompt's last `behind` positions on. `before` are the keys and values
    of the layers from k on, of all positions before those [layers, n, 2, H, d], where they are needed and there was
    room. `outputs` are the places of the outputs of linear maps are, piece by piece as the states. `finals` are the
    states before the head [d] and `logits` its outputs [V] for each token of the answer, None where not all were kept.
    Then `surveys` are the surveys of each, where no gradient is needed.
    """

    prompt: int
    behind: int = 1
    replayed: bool = False
    """Whether `before` is needed."""
    in_context: bool = False
    """Whether earlier sentences are constants to the score of a later one."""
    by_sentence: bool = False
    """Whether its sentences are scored by themselves, for which the keys and values of those before them are kept."""
    ended: torch.Tensor | None = None
    """The keys and values of all positions, as `before`, once it has ended."""
    states: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    outputs: list[Piece] = field(default_factory=list[Piece])
    before: torch.Tensor | None = None
    finals: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    logits: list[torch.Tensor] | None = field(default_factory=list[torch.Tensor])
    surveys: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    survey_ms: float = 0.0
    length: int = 0
    """Positions whose states are there."""

    @property
    def first(self) -> int:
        """The position of the first state."""
        return self.prompt - self.behind

    @classmethod
    def for_scoring(cls, prompt: Prompt, objective: Objective) -> Self:
        """A record for the states that scoring an answer to this prompt takes.

        Raises:
            InputError: the objective asks for a token that the prompt does not have.
        """
        if not objective.gradients:
            return cls(len(prompt.ids))
        first = min(objective.positions(prompt.semantic_token.offset, len(prompt.ids)))
        return cls(len(prompt.ids), -first, replayed=True, in_context=objective.earlier == "context")

    def reach(self, length: int) -> int:
        """At how many of the prompt's last positions a score of an answer of `length` tokens may begin with this.

        1: it can be observed. 0: something is missing.
        """
        if not self.states or self.length < self.behind - 1 + length or len(self.finals) < length:
            return 0
        return 1 if self.before is None else self.behind

    def begin(self, first: int) -> None:
        """Positions before `first` are not computed any more: keep the states for observing."""
        if first < self.prompt:
            self.states, self.outputs, self.length, self.before = [], [], 0, None
            self.behind, self.replayed = self.prompt - first, False

    @property
    def gap(self) -> tuple[int, int]:
        """The positions, counted from the first with a state, whose outputs are not kept any more: one stretch."""
        return gap_of([(count, seen is None) for seen, _, count in self.outputs])

    def let_go(self, scored: int) -> None:
        """Keep no outputs for the first `scored` tokens: later sentences need those of the prompt, and their own."""
        if not (self.replayed and self.in_context):
            return
        until = self.behind + scored - 1  # the last of these tokens predicts the next one
        pieces, reached = list[Piece](), 0
        for piece in self.outputs:
            begin, reached = reached, reached + piece[2]
            if begin < self.behind or reached > until:
                pieces.append(piece)
            elif pieces[-1][0] is None:
                pieces[-1] = None, 0, pieces[-1][2] + piece[2]
            else:
                pieces.append((None, 0, piece[2]))
        self.outputs = pieces
        if self.logits is not None:
            self.logits[:scored] = [step[:0] for step in self.logits[:scored]]


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

        A request that was preempted is read again, and its own tokens with it.
        """
        if self.record is None:
            return None
        if self.record.first + self.record.length < self.first:  # it was found in the prefix cache
            self.record.begin(self.first)
        wanted = self.record.first + self.record.length
        begin, end = max(self.first, wanted), self.first + self.count
        return (self.start + begin - self.first, self.start + self.count) if wanted == begin < end else None


class Recorder:
    """Listens to a model runner of vLLM's: to decoder layer k's output, to linear maps above it and to the head.

    `twins` are the decoder layers of the scoring model.

    `records` are those that are kept, by the names of the requests (`named`). They stay within the budgets of `memory`.
    Beyond these the head is computed again or, where no gradient is needed, surveyed in the pass (`logits`), prompts
    are read again (`activations`: keys and values), and linear maps multiply again (`outputs`). `survey` is None where
    the output of vLLM's head is of no use to a score: then the head is always computed again.
    """

    def __init__(
        self,
        runner: Any,
        layer: int,
        twins: Sequence[nn.Module],
        *,
        memory: Callable[[], Memory],
        survey: Survey | None,
    ) -> None:
        self.records: dict[str, Record] = {}
        self.layer = layer
        self._runner, self._memory, self._survey = runner, memory, survey
        self._scheduled: Any = None
        self._due: list[tuple[Record, int]] = []  # whose keys and values are there after this pass, and their rows
        # Of the last pass: until the next, the pages of its rows are theirs.
        self._tables: Any = None
        self._rows = WeakKeyDictionary[Record, int]()
        layers = runner.model.model.layers
        attentions = [block.self_attn.attn for block in layers[layer:]]
        tried = all(attention.attn_backend.get_name() == "CPU_ATTN" for attention in attentions)  # no other backend was
        self._pages = PagedCache.of(attentions, layer) if tried else None
        self._outputs = None if self._pages is None else KeptOutputs(layers, twins, layer)
        self._execute, self._compute_logits = runner.execute_model, runner.model.compute_logits
        runner.execute_model, runner.model.compute_logits = self._execute_model, self._see_head
        layers[layer - 1].register_forward_hook(self._see_layer)

    def _execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for record, row in self._rows.items():
            if self._runner.input_batch.req_ids[row] not in scheduled.num_scheduled_tokens:
                self._end(record)  # this pass may write into its pages
        self._scheduled, self._rows = scheduled, WeakKeyDictionary()
        try:
            output = self._execute(scheduled, *args, **kwargs)
            self._read_due()
            return output
        except BaseException:
            self._rows.clear()
            raise
        finally:
            self._scheduled, self._due = None, []
            if self._outputs is not None:
                self._outputs.end()

    def _see_layer(self, _module: Any, _args: Any, output: Any) -> None:
        """Keep the states of the positions that a replay begins with. A layer keeps the residual apart."""
        wanted = [
            (part.record, row, rows) for row, part in enumerate(self._parts()) if part.record and (rows := part.new)
        ]
        if not wanted:
            return
        hidden, residual = output
        rows = torch.cat([torch.arange(*span) for *_, span in wanted]).to(hidden.device)
        lengths = [end - begin for *_, (begin, end) in wanted]
        # A copy of these rows alone: a view would keep a whole prompt's states alive.
        kept = hidden.index_select(0, rows) + residual.index_select(0, rows)
        for (record, row, _), piece, length in zip(wanted, kept.split(lengths), lengths, strict=True):
            if record.replayed and not record.states:
                self._due.append((record, row))
            record.states.append(piece)
            record.length += length
            record.ended = None  # vLLM had only put it aside
            self._rows[record] = row
        self._keep_outputs(rows, [(record, length) for (record, *_), length in zip(wanted, lengths, strict=True)])
        self._tables = library("vllm.forward_context").get_forward_context().attn_metadata

    def _keep_outputs(self, rows: torch.Tensor, wanted: Sequence[tuple[Record, int]]) -> None:
        """Keep the outputs of linear maps at the rows of answers that can be replayed."""
        replayed = [record.replayed for record, _ in wanted]
        if self._outputs is None or not any(replayed):
            return
        some = torch.cat([part for part, own in zip(rows.split([n for _, n in wanted]), replayed, strict=True) if own])
        held = [record.outputs for record in self.records.values()]
        kept, begin = self._outputs.begin(some, held, self._memory().outputs), 0
        for record, count in wanted:
            if record.replayed:
                record.outputs.append((kept, begin, count))
                begin += count

    def _read_due(self) -> None:
        """Keep the keys and values before the states of those whose first state this pass has brought."""
        if not self._due or self._pages is None:
            return
        budget = self._memory().activations
        held = sum(record.before.nbytes for record in self.records.values() if record.before is not None)
        wanted = list[tuple[Record, int]]()
        for record, row in self._due:
            held += record.first * self._pages.bytes_per_position
            if held > budget:
                break
            wanted.append((record, row))
        if wanted:
            found = self._pages.read(self._tables, [(row, 0, record.first) for record, row in wanted])
            for (record, _), before in zip(wanted, found, strict=True):
                record.before = before

    def _see_head(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep the input and the output of the head for the next token of an answer."""
        logits = self._compute_logits(hidden, *args, **kwargs)
        parts = list(self._parts())
        if logits is None or len(hidden) != len(parts):
            return logits
        budget = 0 if self._survey is None else self._memory().logits
        held = sum(row_logits.nbytes for record in self.records.values() for row_logits in record.logits or ())
        beyond = list[tuple[Record, int]]()
        for row, part in enumerate(parts):
            record = part.record
            if record is None or part.first + part.count != record.prompt + len(record.finals):
                continue  # a part of a prompt, or tokens written before
            record.finals.append(hidden[row].clone())
            if record.logits is not None and held + logits[row].nbytes <= budget:
                record.logits.append(logits[row].clone())  # the sampler writes into its own
                held += logits[row].nbytes
            else:
                beyond.append((record, row))
        self._look(beyond, hidden, logits)
        return logits

    def _look(self, beyond: Sequence[tuple[Record, int]], hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Survey logits that are not kept, after those kept before them."""
        began = time.perf_counter()
        for record, _ in beyond:
            self._let_logits_go(record)
        surveyed = [(record, row) for record, row in beyond if not record.replayed]
        if surveyed and self._survey is not None:
            rows = torch.tensor([row for _, row in surveyed], device=logits.device)
            found = _unstopped(self._survey, hidden.index_select(0, rows), logits.index_select(0, rows))
            cost = (time.perf_counter() - began) * 1000  # that of their scores, and not of writing
            add_cost(-cost)
            for (record, _), survey in zip(surveyed, found, strict=True):
                record.surveys.append(survey)
                record.survey_ms += cost / len(surveyed)

    def _let_logits_go(self, record: Record) -> None:
        if record.logits and not record.replayed and self._survey is not None:
            states = torch.stack(record.finals[: len(record.logits)])
            record.surveys.extend(_unstopped(self._survey, states, torch.stack(record.logits)))
        record.logits = None

    def _parts(self) -> Iterator[_Part]:
        """The requests of the pass, in the order of its rows."""
        if self._scheduled is None:
            return
        batch, start = self._runner.input_batch, 0
        for request in batch.req_ids:
            count = self._scheduled.num_scheduled_tokens.get(request, 0)
            first = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[request]])
            yield _Part(named(self.records, request), start, first, count)
            start += count

    def _keys_of(self, record: Record) -> torch.Tensor | None:
        """The keys and values of all positions of an answer that is being written, or of those before its states."""
        reached, row = record.first + record.length, self._rows.get(record)
        if self._pages is None or record.before is None or row is None or not self._pages.holds_all(reached):
            return record.before
        (later,) = self._pages.read(self._tables, [(row, record.first, record.length)])
        return torch.cat([record.before, later], dim=1)

    def _end(self, record: Record) -> None:
        """Keep the keys and values of an answer that vLLM writes no further, if it is read by sentence."""
        if record.by_sentence and record.ended is None and (keys := self._keys_of(record)) is not record.before:
            record.ended = keys

    def keys_of(self, record: Record) -> Cache | None:
        """The keys and values of all positions of an answer that has ended; None where they were not kept."""
        with clean_slate():
            self._end(record)  # no pass may have followed its last one yet
            return self._pages.joined([record.ended]) if self._pages and record.ended is not None else None

    def left_by(
        self, records: Sequence[Record], lengths: Sequence[int], epoch: object, *, written: bool = False
    ) -> CapturedStates | None:
        """The states that passes left of answers of these lengths, all of one `reach`; None where some are missing.

        Enough to observe them, and to replay them where there is `before`. With `written` they are of one answer, with
        the keys and values of all its tokens, where the pages still hold them.
        """
        reach = records[0].reach(lengths[0])
        if reach == 0:
            return None
        states = [torch.cat(record.states)[record.behind - reach :] for record in records]
        known = [self._keys_of(record) if written else record.before for record in records]
        befores, longest = [keys for keys in known if keys is not None], max(map(len, states))
        whole = self._pages is not None and len(befores) == len(records)
        begin, end = gap = records[0].gap
        has_outputs = whole and (len(records) == 1 or not any(record.gap[1] for record in records))
        logits = by_step([record.logits or () for record in records])
        for record in () if logits else records:
            self._let_logits_go(record)
        return CapturedStates(
            self._pages.joined(befores) if self._pages is not None and whole else growing_cache(),
            self.layer,
            max(record.prompt for record in records) - reach,
            torch.stack([F.pad(state, (0, 0, 0, longest - len(state))) for state in states]),
            logits,
            self._outputs.joined([record.outputs for record in records], longest - (end - begin))
            if self._outputs and has_outputs
            else {},
            epoch,
            by_step([record.finals for record in records]),
            by_step([record.surveys for record in records]),
            sum(record.survey_ms for record in records),
            tuple(map(len, states)),
            gap,
        )


def _unstopped(survey: Survey, states: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """A survey under no stop: in the middle of a pass one answer's end must not be that of all."""
    return Context().run(survey, states, raw)


@dataclass(frozen=True, kw_only=True)
class VLLMTokens:
    """The tokens that vLLM has written for a request, the one that ended the answer included, and their states.

    `stopped`: nothing but their reader ended it.
    """

    request: BatchRequest
    tokens: Sequence[int]
    record: Record
    stopped: bool = False


class RecordedAnswer(RunningAnswer):
    """An answer with the states of its passes."""

    def __init__(self, request: BatchRequest, decoder: Decoder, record: Record) -> None:
        super().__init__(request, decoder)
        self.record = record


class RecordedBatch(RunningBatch):
    """A running batch of such answers; `recorder` listens to the passes, where anything does."""

    def __init__(
        self,
        scorer: Scorer,
        decoder: Callable[[], Decoder],
        objective: Objective | None = None,
        *,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(scorer, decoder, objective or Objective())
        self._recorder = recorder

    def generations(self, rows: Sequence[RunningAnswer], known: Sequence[int | None] = ()) -> list[Generation]:
        """As `RunningBatch.generations`."""
        for row in rows:
            record = cast(RecordedAnswer, row).record
            row.behind = record.reach(len(row.ids))
            row.keys = self._recorder and self._recorder.keys_of(record)
        return super().generations(rows, known)

    def let_go(self, scored: Sequence[tuple[RunningAnswer, int]]) -> None:
        """As `RunningBatch.let_go`: the outputs of a pass are free once all of its answers have let them go."""
        for row, tokens in scored:
            cast(RecordedAnswer, row).record.let_go(tokens)

    def _left_so_far(self, row: RunningAnswer) -> CapturedStates | None:
        cast(RecordedAnswer, row).record.by_sentence = True
        return self._states_of([row], written=True)

    def left_by(self, rows: Sequence[RunningAnswer]) -> CapturedStates | None:
        """The states that vLLM's passes left of these answers, to observe and to replay them from."""
        states, keys = self._states_of(rows), rows[0].keys
        return states if states is None or keys is None else replace(states, cache=keys)

    def _states_of(self, rows: Sequence[RunningAnswer], *, written: bool = False) -> CapturedStates | None:
        if (recorder := self._recorder) is None:
            return None
        records = [cast(RecordedAnswer, row).record for row in rows]
        lengths, epoch = [len(row.ids) for row in rows], rows[0].epoch
        with clean_slate():
            return unless_memory_runs_out(lambda: recorder.left_by(records, lengths, epoch, written=written))


class WrittenAnswers(RecordedBatch):
    """Answers that vLLM writes for another program: their tokens, and the states of its passes."""

    def generations_of(self, written: Sequence[VLLMTokens], known: Sequence[int | None] = ()) -> list[Generation]:
        """Those that are done, to be scored together; `known` as in `generations`."""
        rows = self._rows_of(written)
        for row, own in zip(rows, written, strict=True):
            for token in own.tokens:
                if not row.done:
                    row.take(token)
            if own.stopped:
                row.end(len(own.tokens))
        return self.generations(rows, known)

    def ended_of(
        self, written: Sequence[VLLMTokens], spans: Sequence[Sequence[Span]], known: Sequence[int]
    ) -> list[EndedSentences | None]:
        """As `ended`, of those that vLLM still writes."""
        rows = self._rows_of(written)
        for row, own in zip(rows, written, strict=True):
            row.ids = list(own.tokens)
        return self.ended(rows, spans, known)

    def _rows_of(self, written: Sequence[VLLMTokens]) -> list[RecordedAnswer]:
        self.require_the_same_model()
        rows = [RecordedAnswer(own.request, self._get_decoder(), own.record) for own in written]
        for row in rows:
            row.epoch = self._epoch
        return rows
