"""A batch that answers join and leave at any step: each with a prompt, sampling, stop strings and grammar of its own.

All rows end in one column and begin where their prompt begins; a row that joins is read by itself and added to the
others. The states of the passes are kept for stretches of steps with the same rows, and put together for the answers
that are scored together.

Why: docs/adr/0146-requests-join-a-running-batch.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

from semgrad_guard.engine.generation.decoding import BatchRequest, Decoder, RunningAnswer
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions, Sample
from semgrad_guard.engine.generation.sampling import sample_of
from semgrad_guard.engine.generation.sentence_scoring import (
    EndedSentences,
    ended_sentences,
    score_together,
    sentences_of,
)
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.replay.batch import (
    Memory,
    give_back_memory,
    growing_cache,
    is_out_of_memory,
    kept,
    stacked,
    unless_memory_runs_out,
)
from semgrad_guard.engine.replay.captured_states import Capture, CapturedStates, RowPasses
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.engine.sentences import Span
from semgrad_guard.errors import AnswerInterruptedError

_ALIKE, _FEW = 1.25, 16  # how much longer a prompt may be than the shortest of its group: times, plus tokens
_CHANGED = "the model was changed while it wrote; nothing is delivered. Ask again"
_Alike = tuple[int, tuple[str, ...], int | None, int, bool, int]
"""The common properties of one scoring: where states begin, stop strings, `max_thinking_tokens`, model, whether tokens
were replaced.

The last is a number of its own where an answer has to be scored by itself.
"""


class RunningBatch:
    """Writes the answers of one model, and takes them out of the batch when they are done.

    Not for several threads. The model's lock is held for one step at a time.
    """

    def __init__(self, scorer: Scorer, decoder: Callable[[], Decoder], objective: Objective) -> None:
        self._scorer, self._get_decoder, self._objective = scorer, decoder, objective
        self._rows: list[RunningAnswer] = []
        self._epoch: object = None
        self._changes: object = None
        self._cache: Cache = growing_cache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._capture: Capture | None = None

    @property
    def rows(self) -> Sequence[RunningAnswer]:
        """The answers that are being written."""
        return tuple(self._rows)

    def takes(self, prompt: Prompt, options: GenerationOptions) -> bool:
        """Whether this answer can join: not where states cannot be kept, or where its length would matter to others.

        Rotary frequencies that change with the length are those of the longest row.

        Raises:
            InputError: the objective asks for a token that the prompt does not have.
        """
        limit = self._scorer.architecture.fixed_positions
        if limit is not None and len(prompt.ids) + options.max_tokens > limit:
            return False
        return self._get_decoder().capture([prompt], self._objective) is not None

    def has_room(self, requests: Sequence[BatchRequest], *, budgets: int = 1) -> bool:
        """Whether keys and values of these answers and the present ones fit into so many budgets (`Memory.running`).

        Padding counts. Answers that are scored take no account of those that are drawn for others' scores.
        """
        others = (row for row in self._rows if row.scored or not requests[0].scored)
        every = [(one.prompt, one.options) for one in (*others, *requests)]
        longest = max(len(prompt.ids) + options.max_tokens for prompt, options in every)
        return len(every) * longest * self._token_bytes <= budgets * self._scorer.memory.running

    @cached_property
    def _token_bytes(self) -> int:
        return self._scorer.exactness().token_bytes

    def join(self, requests: Sequence[BatchRequest]) -> list[RunningAnswer]:
        """Read prompts (`takes`), and write the first token of their answers, which may be the last.

        Whatever it raises: none of them has joined, and the others are as they were.

        Raises:
            AnswerInterruptedError: the current stop ended it, or the model was changed while it wrote the others.
        """
        with self._scorer.lock, clean_slate():
            self.require_the_same_model()
            decoder = self._get_decoder()
            rows = [RunningAnswer(request, decoder) for request in requests]
            try:
                for group in _of_like_length(rows):
                    for _ in self._read(group, decoder, piece=None):
                        pass
            except BaseException:
                self.drop(rows)
                raise
            self._leave()
            return rows

    def join_in_pieces(self, requests: Sequence[BatchRequest], piece: int) -> Iterator[list[RunningAnswer] | None]:
        """Like `join`, for answers to one prompt. After each `piece` of it others may take a step; the rows come last.

        In one piece where a pass that begins behind a cache would not be exact.

        Raises:
            AnswerInterruptedError: as `join`, or the model was changed between two pieces.
        """
        decoder, changes = self._get_decoder(), self._scorer.changes
        rows = [RunningAnswer(request, decoder) for request in requests]
        resumes = self._scorer.can_resume(len(rows[0].prompt.ids) + rows[0].options.max_tokens)
        reading = self._read(rows, decoder, piece=piece if resumes else None)
        done = False
        while not done:
            with self._scorer.lock, clean_slate():
                if changes is not self._scorer.changes:
                    raise AnswerInterruptedError(_CHANGED)
                try:
                    done = next(reading)
                    if done:
                        self._leave()
                except BaseException:
                    self.drop(rows)
                    raise
            yield rows if done else None

    def _read(self, rows: Sequence[RunningAnswer], decoder: Decoder, *, piece: int | None) -> Iterator[bool]:
        """Prefill some rows, and add them to the present ones: whether that is done, after each piece of the prompts.

        The last piece begins no later than the states that are kept for scoring.
        """
        replayer = self._scorer.current_replayer()
        different = list(dict.fromkeys(row.reads for row in rows))
        owners, capture = [different.index(row.reads) for row in rows], None
        prompts = [rows[owners.index(number)].prompt for number in range(len(different))]
        if any(row.scored for row in rows):
            capture = decoder.capture(prompts, self._objective, self._left())
            if capture is None:
                raise ValueError("no answer can join: this model's states cannot be kept while it writes")
        ids, mask = decoder.padded(prompts)
        cache, most = growing_cache(), ids.shape[1] - 1
        if capture is not None:
            most = min(capture.start, most)
        begin = 0
        while piece is not None and begin + piece < most:
            replayer.step(ids[:, begin : begin + piece], mask[:, : begin + piece], cache, None)
            begin += piece
            yield False
        self.require_the_same_model()
        if capture is not None:
            capture.skip(begin)
        logits = replayer.step(ids[:, begin:], mask, cache, capture)
        if len(prompts) < len(rows):
            logits, mask, cache = logits[owners], mask[owners], kept(cache, owners, 0)
        for row, number in zip(rows, owners, strict=True):
            row.epoch = self._epoch
            if capture is not None and row.scored:
                row.behind = ids.shape[1] - capture.start
                row.passes.append((capture, number))
        _write(rows, logits)
        width, masks = max(self._mask.shape[1], mask.shape[1]), [self._mask, mask] if self._rows else [mask]
        self._mask = torch.cat([F.pad(rows_mask, (width - rows_mask.shape[1], 0)) for rows_mask in masks])
        self._cache = stacked([self._cache, cache]) if self._rows else cache
        self._rows += rows
        self._capture = None
        yield True

    def step(self, *, look: bool = True) -> None:
        """Write one more token of every answer; those that are done with it leave the batch.

        Without a `look` at the model a change is seen at a later step, or before an answer leaves.

        Whatever it raises: no answer can continue, and the batch is empty.

        Raises:
            AnswerInterruptedError: the model was changed while it wrote, or the current stop ended it.
        """
        if not self._rows:
            return
        with self._scorer.lock, clean_slate():
            rows, columns = list(self._rows), self._mask.shape[1]
            failed: BaseException | None = None
            if not look:
                self._scorer.trust()
            try:
                self.require_the_same_model()
                self._mask = F.pad(self._mask, (0, 1), value=1)
                ids = torch.tensor([[row.ids[-1]] for row in rows], device=self._scorer.device)
                logits = self._scorer.current_replayer().step(ids, self._mask, self._cache, self._stretch())
                _write(rows, logits)
                if not look and any(row.done for row in rows):  # no answer leaves a model that was changed
                    self._scorer.look_again()
                    self.require_the_same_model()
            except BaseException as error:
                if all(row.scored for row in rows) or not is_out_of_memory(error):
                    self.drop(rows)  # the cache may have grown in some of its layers
                    raise
                failed = error.with_traceback(None)
            if failed is not None:
                self._give_up_samples(columns, failed)
            self._leave()

    def _give_up_samples(self, columns: int, error: BaseException) -> None:
        """Continue, without those drawn for others' scores, from where the batch was before memory ran out."""
        self._mask = self._mask[:, :columns]
        self._cache = kept(self._cache, range(len(self._rows)), 0, columns)
        for row in self._rows:
            row.replayed = True
            if not row.scored:
                row.fail(error)
        self.drop([row for row in self._rows if not row.scored])
        give_back_memory()

    def drop(self, rows: Iterable[RunningAnswer]) -> None:
        """Drop answers that no caller waits for any more."""
        gone = set(map(id, rows))
        with clean_slate():
            self._keep([number for number, row in enumerate(self._rows) if id(row) not in gone])

    def end(self, row: RunningAnswer, tokens: int) -> None:
        """End an answer with so many of its tokens."""
        with self._scorer.lock, clean_slate():
            row.end(tokens)
            self._leave()

    def let_go(self, scored: Sequence[tuple[RunningAnswer, int]]) -> None:
        """Free the budgets for what follows: keep no outputs for the first tokens of answers, so many of each.

        Sentences are scored from those of the prompt, and their own.
        """
        if not scored or not self._objective.gradients or self._objective.earlier != "context":
            return
        for row, tokens in scored:
            row.let_go(tokens)
        self._capture = None
        users = defaultdict[int, list[tuple[RunningAnswer, int]]](list)
        for row in self._rows:
            for number, (capture, _) in enumerate(row.passes):
                users[id(capture)].append((row, number))
        for some in users.values():
            capture = some[0][0].passes[some[0][1]][0]
            if not capture.lets_go and 2 * len(some) <= len(capture.states()):
                small = capture.of_rows([row.passes[number][1] for row, number in some])
                for place, (row, number) in enumerate(some):
                    row.passes[number] = small, place

    def generations(self, rows: Sequence[RunningAnswer], known: Sequence[int | None] = ()) -> list[Generation]:
        """Answers that are done, in their order; those that can be scored in one backward pass are one batch.

        So are their sentences behind the first `known`, where that is not None.
        """
        written: dict[int, Generation] = {}
        decoder, groups = self._get_decoder(), defaultdict[_Alike, list[RunningAnswer]](list)
        # One's prompt and another's answer may be longer together than either answer with its own prompt.
        singly = self._scorer.architecture.fixed_positions is not None
        for row in rows:
            # Tokens that were replaced, at a stop string, are not those that the states belong to.
            other = row.replayed or decoder.read(row.written).retokenized
            ends = row.options.stop, row.options.max_thinking_tokens
            alone = id(row) if singly or row.keys is not None else 0
            groups[row.behind, *ends, id(row.epoch), other, alone].append(row)
        for (*_, other, _), group in groups.items():
            found = decoder.generations([row.written for row in group], None if other else self.left_by(group))
            written.update(zip(map(id, group), found, strict=True))
        answers = [written[id(row)] for row in rows]
        some = [(one.evidence, own) for one, own in zip(answers, known, strict=False) if own is not None]
        if some and self._objective.gradients:
            parts = [sentences_of(one, decoder, known=own) for one, own in some if one.response_ids]
            score_together([own for _, own in found] for found in parts if found)
        for row, answer in zip(rows, answers, strict=True):
            row.finish(answer)
        return answers

    def ended(
        self, rows: Sequence[RunningAnswer], spans: Sequence[Sequence[Span]], known: Sequence[int]
    ) -> list[EndedSentences | None]:
        """The sentences that have ended, `spans`, in answers that are being written (see `ended_sentences`)."""
        decoder, found = self._get_decoder(), list[EndedSentences | None]()
        for row, own, number in zip(rows, spans, known, strict=True):
            states = None if row.replayed or decoder.read(row.written).retokenized else self._left_so_far(row)
            (answer,) = decoder.generations([row.written], states)
            found.append(ended_sentences(answer.evidence, own, decoder, known=number))
        score_together(one.found for one in found if one is not None)
        return found

    def _left_so_far(self, row: RunningAnswer) -> CapturedStates | None:
        """The states that an answer has left that is still being written, with the keys of all its tokens."""
        number = next(number for number, other in enumerate(self._rows) if other is row)
        with clean_slate():
            self._keep_keys(number)
            return self.left_by([row])

    def samples(self, rows: Sequence[RunningAnswer]) -> tuple[Sample, ...]:
        """Answers that were drawn for the score of another one, not yet judged."""
        return tuple(sample_of(self._get_decoder().read(row.written)) for row in rows)

    def left_by(self, rows: Sequence[RunningAnswer]) -> CapturedStates | None:
        """The states that writing these answers left for scoring them; None where they have no room."""
        padding = max(0, rows[0].behind - max(len(row.prompt.ids) for row in rows))
        with clean_slate():
            passes = [RowPasses(row.before, row.passes) for row in rows]
            states = unless_memory_runs_out(lambda: CapturedStates.gathered(passes, rows[0].epoch, padding=padding))
            if states is None or rows[0].keys is None:
                return states
            return replace(states, cache=rows[0].keys)

    # Rows come and go.

    def _leave(self) -> None:
        """Take the answers that are done out of the batch, with their states for scoring."""
        for number, row in enumerate(self._rows):
            if row.done and row.scored:
                if row.keys is None:
                    row.before = self._cache_before(number)
                else:
                    self._keep_keys(number)
        if any(row.done for row in self._rows):
            self._keep([number for number, row in enumerate(self._rows) if not row.done])

    def _cache_before(self, number: int) -> Cache:
        """The cache of a row's columns before the states that its captures hold."""
        row, begin = self._rows[number], self._begin(number)
        return kept(self._cache, [number], begin, begin + max(0, len(row.prompt.ids) - row.behind))

    def _keep_keys(self, number: int) -> None:
        """Keep all keys and values of a row that is read by sentence."""
        row = self._rows[number]
        row.before, row.keys = self._cache_before(number), kept(self._cache, [number], self._begin(number))

    def _keep(self, numbers: Sequence[int]) -> None:
        """Let all rows go but these, and the columns before the first of them begins."""
        if len(numbers) == len(self._rows):
            return
        self._rows = [self._rows[number] for number in numbers]
        self._capture = None
        if not numbers:
            self._cache, self._mask = growing_cache(), self._mask[:0, :0]
            return
        self._mask = self._mask[list(numbers)]
        first = min(map(self._begin, range(len(numbers))))
        self._mask, self._cache = self._mask[:, first:], kept(self._cache, numbers, first)

    def _begin(self, number: int) -> int:
        """The column in which a row's prompt begins."""
        return self._mask.shape[1] - int(self._mask[number].sum())

    def _stretch(self) -> Capture | None:
        """The capture of the steps in which the rows are these; None where none of them is to be scored."""
        scored = [row for row in self._rows if row.scored]
        if self._capture is None and scored:
            first, left = scored[0].passes[0][0], self._left()
            if not self._objective.gradients:
                left = replace(left, outputs=0)
            self._capture = Capture(first.layer, 0, memory=left, survey=first.survey)
            for number, row in enumerate(self._rows):
                if row.scored:
                    row.passes.append((self._capture, number))
        return self._capture

    def _left(self) -> Memory:
        """The rest of the budgets beyond the answers that are being written."""
        captures = {id(capture): capture for row in self._rows for capture, _ in row.passes}.values()
        logits, outputs = (sum(held) for held in zip((0, 0), *(capture.held for capture in captures), strict=True))
        memory = self._scorer.memory
        return replace(memory, logits=max(0, memory.logits - logits), outputs=max(0, memory.outputs - outputs))

    def require_the_same_model(self) -> None:
        """Return if the present answers can continue.

        Raises:
            AnswerInterruptedError: the model was changed while it wrote.
        """
        changes = self._scorer.changes
        if self._rows and changes is not self._changes:
            raise AnswerInterruptedError(_CHANGED)
        self._epoch, self._changes = self._scorer.epoch, changes


def _write(rows: Sequence[RunningAnswer], logits: torch.Tensor) -> None:
    """Write the next token of each row, from the head's output [B, V]."""
    for row, own, likeliest in zip(rows, logits, logits.argmax(-1).tolist(), strict=True):
        row.write(own, likeliest)


def _of_like_length(rows: Sequence[RunningAnswer]) -> list[list[RunningAnswer]]:
    """The rows in groups in which no prompt is much longer than another."""
    groups: list[list[RunningAnswer]] = []
    for row in sorted(rows, key=lambda row: (len(row.prompt.ids), row.reads)):
        last = groups[-1] if groups else []
        if last and len(row.prompt.ids) <= _ALIKE * len(last[0].prompt.ids) + _FEW:
            last.append(row)
        else:
            groups.append([row])
    return groups
