"""A batch that answers join and leave at any step: each with a prompt, sampling, stop strings and grammar of its own.

All rows end in one column and begin where their prompt begins; a row that joins is read by itself and added to the
others. A recorder keeps the states of a stretch of steps with the same rows; an answer's tape is its part of them.

Why: docs/decisions.md#0146
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

from semgrad_guard.engine.answers.answer import Answer, BatchScoring, Generation
from semgrad_guard.engine.answers.options import GenerationOptions, Sample
from semgrad_guard.engine.answers.sentences import EndedSentences, ended_sentences, keep_sentences
from semgrad_guard.engine.answers.text import Piece
from semgrad_guard.engine.answers.writing import WrittenAnswer, write_whole
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.replay.memory import Memory, give_back_memory, is_out_of_memory
from semgrad_guard.engine.replay.tape import KeysValues, Recorder, Tape, below, growing_cache, keys_of, left_of
from semgrad_guard.engine.scores.gradients import observed_layer
from semgrad_guard.engine.scores.scorer import clean_slate
from semgrad_guard.engine.sentences import Span
from semgrad_guard.errors import AnswerInterruptedError, UnsupportedModelError

_ALIKE, _FEW = 1.25, 16  # how much longer a prompt may be than the shortest of its group: times, plus tokens
_CHANGED = "the model was changed while it wrote; nothing is delivered. Ask again"


class RunningBatch:
    """Writes the answers of one model, and takes them out of the batch when they are done.

    Not for several threads. The model's lock is held for one step at a time.
    """

    def __init__(self, model: WritingModel, objective: Objective) -> None:
        self._model, self._scorer, self._objective = model, model.scorer, objective
        self._rows: list[WrittenAnswer] = []
        self._epoch: object = None
        self._cache: Cache = growing_cache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._recorder: Recorder | None = None

    @property
    def rows(self) -> Sequence[WrittenAnswer]:
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
        return self._recorder_for([prompt], self._scorer.memory) is not None

    def has_room(
        self, new: Sequence[tuple[Prompt, GenerationOptions]], *, scored: bool = True, budgets: int = 1
    ) -> bool:
        """Whether keys and values of these answers and the present ones fit into so many budgets (`Memory.running`).

        Padding counts. Answers that are scored take no account of those that are drawn for others' scores.
        """
        every = [*new, *((row.prompt, row.options) for row in self._rows if row.scored or not scored)]
        longest = max(len(prompt.ids) + options.max_tokens for prompt, options in every)
        return len(every) * longest * self._token_bytes <= budgets * self._scorer.memory.running

    @cached_property
    def _token_bytes(self) -> int:
        return self._scorer.exactness().token_bytes

    def answer(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        *,
        listener: Callable[[Piece], None] | None = None,
        scored: bool = True,
    ) -> WrittenAnswer:
        """An answer that may `join`, as `WrittenAnswer`."""
        return WrittenAnswer(self._model, prompt, options, listener=listener, scored=scored)

    def join(self, rows: Sequence[WrittenAnswer]) -> None:
        """Read prompts (`takes`), and write the first token of their answers, which may be the last.

        Whatever it raises: none of them has joined, none may join again, and the others are as they were.

        Raises:
            AnswerInterruptedError: the current stop ended it, or the model was changed while it wrote the others.
        """
        with self._scorer.lock, clean_slate():
            self.require_the_same_model()
            try:
                for group in _of_like_length(rows):
                    for _ in self._read(group, piece=None):
                        pass
            except BaseException:
                self.drop(rows)
                raise
            self._leave()

    def join_in_pieces(self, rows: Sequence[WrittenAnswer], piece: int) -> Iterator[bool]:
        """Like `join`, for answers to one prompt: whether they have joined, after each `piece` of it.

        Others may take a step in between.

        Raises:
            AnswerInterruptedError: as `join`, or the model was changed between two pieces.
        """
        epoch, reading, done = self._scorer.epoch, self._read(rows, piece=piece), False
        while not done:
            with self._scorer.lock, clean_slate():
                if epoch is not self._scorer.epoch:
                    raise AnswerInterruptedError(_CHANGED)
                try:
                    done = next(reading)
                    if done:
                        self._leave()
                except BaseException:
                    self.drop(rows)
                    raise
            yield done

    def _read(self, rows: Sequence[WrittenAnswer], *, piece: int | None) -> Iterator[bool]:
        """Prefill some rows, and add them to the present ones: whether that is done, after each piece of the prompts.

        The last piece begins no later than the states that are kept for scoring.
        """
        twin = self._scorer.twin
        different = list(dict.fromkeys(row.reads for row in rows))
        owners, recorder = [different.index(row.reads) for row in rows], None
        prompts = [rows[owners.index(number)].prompt for number in range(len(different))]
        if any(row.scored for row in rows):
            recorder = self._recorder_for(prompts, self._left())
            if recorder is None:
                raise ValueError("no answer can join: this model's states cannot be kept while it writes")
        ids, mask = _padded(prompts, self._scorer.device)
        width = ids.shape[1]
        most, begin, cache = min(recorder.start if recorder else width, width - 1), 0, growing_cache()
        twin.reset()
        while piece is not None and begin + piece < most:
            with torch.no_grad():
                twin.step(ids[:, begin : begin + piece], mask[:, : begin + piece], cache)
            begin += piece
            yield False
        self.require_the_same_model()
        logits = self._step(ids[:, begin:], mask, cache, recorder, read=begin)
        keys = [keys_of(cache, number, width - len(prompt.ids)) for number, prompt in enumerate(prompts)]
        for row, number in zip(rows, owners, strict=True):
            row.epoch = self._epoch
            if recorder is not None and row.scored:
                row.begin = recorder.start - (width - len(row.prompt.ids))
                row.passes.append((recorder, number))
        _write(rows, logits[owners])
        present = [self._keys(number) for number in range(len(self._rows))]
        self._lay_out([*self._rows, *rows], [*present, *(keys[number] for number in owners)])
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
            rows, columns, failed = list(self._rows), self._mask.shape[1], None
            if not look:
                self._scorer.trust()
            try:
                self.require_the_same_model()
                self._mask = F.pad(self._mask, (0, 1), value=1)
                ids = torch.tensor([[row.ids[-1]] for row in rows], device=self._scorer.device)
                _write(rows, self._step(ids, self._mask, self._cache, self._stretch()))
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

    def _step(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Cache, recorder: Recorder | None, *, read: int = 0
    ) -> torch.Tensor:
        """The head's output [B, V] behind some columns; the first `read` columns of a prompt are in the cache."""
        twin = self._scorer.twin
        with torch.no_grad():
            if recorder is None:
                return twin.step(ids, mask, cache)
            recorder.columns = recorder.columns or read
            with recorder.listening(twin):
                return twin.step(ids, mask, cache)

    def _give_up_samples(self, columns: int, error: BaseException) -> None:
        """Continue, without those drawn for others' scores, from where the batch was before memory ran out."""
        self._mask = self._mask[:, :columns]
        keys = [self._keys(number, columns) for number in range(len(self._rows))]
        for row in self._rows:
            row.replayed = True
            if not row.scored:
                row.fail(error)
        kept = [number for number, row in enumerate(self._rows) if row.scored]
        self._lay_out([self._rows[number] for number in kept], [keys[number] for number in kept])
        give_back_memory()

    def drop(self, rows: Iterable[WrittenAnswer]) -> None:
        """Drop answers that no caller waits for any more."""
        gone = set(map(id, rows))
        with clean_slate():
            self._keep([number for number, row in enumerate(self._rows) if id(row) not in gone])

    def end(self, row: WrittenAnswer, tokens: int) -> None:
        """End an answer with so many of its tokens."""
        with self._scorer.lock, clean_slate():
            row.end(tokens)
            self._leave()

    def generations(self, rows: Sequence[WrittenAnswer], known: Sequence[int | None] = ()) -> list[Generation]:
        """Answers that are done, in their order, to be scored together.

        So are their sentences behind the first `known`, where that is not None.
        """
        answers = self._generations(rows, [self._tape(row) for row in rows])
        some = [(one.evidence, own) for one, own in zip(answers, known, strict=False) if own is not None]
        if self._objective.gradients and (scored := [(one, own) for one, own in some if one.response_ids]):
            keep_sentences([one for one, _ in scored], self._model, [own for _, own in scored])
        for row, answer in zip(rows, answers, strict=True):
            row.finish(answer.text, answer.reasoning)
        return answers

    def ended(
        self, rows: Sequence[WrittenAnswer], spans: Sequence[Sequence[Span]], known: Sequence[int]
    ) -> list[EndedSentences | None]:
        """The sentences that have ended, `spans`, in answers that are being written (see `ended_sentences`)."""
        answers = self._generations(rows, [self._tape_so_far(row) for row in rows])
        return ended_sentences([answer.evidence for answer in answers], spans, self._model, known)

    def samples(self, rows: Sequence[WrittenAnswer]) -> tuple[Sample, ...]:
        """Answers that were drawn for the score of another one, not yet judged."""
        return tuple(row.sample() for row in rows)

    def _tape(self, row: WrittenAnswer) -> Tape | None:
        """What writing an answer left that is done."""
        return row.tape()

    def _tape_so_far(self, row: WrittenAnswer) -> Tape | None:
        """What writing an answer has left that is still being written."""
        number = next(number for number, other in enumerate(self._rows) if other is row)
        return row.tape(self._keys(number))

    def _generations(self, rows: Sequence[WrittenAnswer], tapes: Sequence[Tape | None]) -> list[Generation]:
        """Answers that are written, as one batch to be scored; `tapes` belong to the tokens as they were written."""
        seen = [row.visible() for row in rows]
        answers = [
            Answer(row.prompt, found.text, found.scored_ids, found.preceding, found.reasoning, options=row.options)
            for row, found in zip(rows, seen, strict=True)
        ]
        fitting = [None if found.retokenized else tape for tape, found in zip(tapes, seen, strict=True)]
        scoring = BatchScoring(self._model, answers, tapes=fitting)
        made: list[Generation] = []
        for number, (row, found) in enumerate(zip(rows, seen, strict=True)):
            is_whole = row.ended or found.cut is not None
            made.append(
                Generation(
                    prompt=row.prompt,
                    text=found.text,
                    response_ids=found.ids,
                    finish_reason="stop" if is_whole else "length",
                    cut=found.cut if is_whole else row.options.max_tokens,
                    completion_tokens=len(row.ids) + row.ended,
                    scoring=scoring,
                    row=number,
                    reasoning=found.reasoning,
                    preceding_ids=found.preceding,
                )
            )
        return made

    # Rows come and go.

    def _leave(self) -> None:
        """Take the answers that are done out of the batch, with their keys for scoring."""
        for number, row in enumerate(self._rows):
            if row.done and row.scored:
                keys = self._keys(number)
                if len(self._rows) > 1:  # a view would keep the others' alive
                    keys = [own and (own[0].clone(), own[1].clone()) for own in keys]
                row.keys = keys
        if any(row.done for row in self._rows):
            self._keep([number for number, row in enumerate(self._rows) if not row.done])

    def _keep(self, numbers: Sequence[int]) -> None:
        """Let all rows go but these, and the columns before the first of them begins."""
        if len(numbers) < len(self._rows):
            keys = [self._keys(number) for number in numbers]
            self._lay_out([self._rows[number] for number in numbers], keys)

    def _lay_out(self, rows: Sequence[WrittenAnswer], keys: Sequence[Any]) -> None:
        """Make these the rows of the batch."""
        self._rows, self._recorder = list(rows), None
        if not rows:
            self._cache, self._mask = growing_cache(), self._mask[:0, :0]
            return
        some = [next(own[0] for own in layers if own is not None) for layers in keys]
        lengths = [one.shape[1] for one in some]
        masks = [F.pad(torch.ones(n, dtype=torch.long), (max(lengths) - n, 0)) for n in lengths]
        # (Not the scorer's device: to ask for it takes the lock, which heeds a stop, and rows leave because of one.)
        self._mask, self._cache = torch.stack(masks).to(some[0].device), below(keys)

    def _keys(self, number: int, end: int | None = None) -> list[KeysValues]:
        """A row's keys and values from the column in which its prompt begins, of each layer."""
        begin = self._mask.shape[1] - int(self._mask[number].sum())
        return keys_of(self._cache, number, begin, end)

    def _recorder_for(self, prompts: Sequence[Prompt], memory: Memory) -> Recorder | None:
        """One that keeps what scoring needs of answers to these prompts, which end in one column.

        None where nothing could be scored from it; scoring will name the reason.

        Raises:
            InputError: the objective asks for a token that a prompt does not have.
        """
        known, n_layers, objective = self._scorer.if_checked(), self._scorer.architecture.n_layers, self._objective
        if known is None or known.way != "rows":
            return None
        width = max(len(prompt.ids) for prompt in prompts)
        if not objective.gradients:
            return Recorder(observed_layer(n_layers), width - 1, memory=memory)
        try:
            layer = objective.span(n_layers)[0]
        except UnsupportedModelError:
            return None
        firsts = [min(objective.positions(p.semantic_token.offset, len(p.ids))) for p in prompts]
        return Recorder(layer, width + min(firsts), memory=memory)

    def _stretch(self) -> Recorder | None:
        """The recorder of the steps in which the rows are these; None where none of them is to be scored."""
        scored = [row for row in self._rows if row.scored]
        if self._recorder is None and scored:
            self._recorder = Recorder(scored[0].passes[0][0].layer, memory=self._left())
            for number, row in enumerate(self._rows):
                if row.scored:
                    row.passes.append((self._recorder, number))
        return self._recorder

    def _left(self) -> Memory:
        """The rest of the budgets beyond the answers that are being written; only a replay needs `outputs`."""
        left = left_of(self._scorer.memory, {one for row in self._rows for one, _ in row.passes})
        return left if self._objective.gradients else replace(left, outputs=0)

    def require_the_same_model(self) -> None:
        """Return if the present answers can continue.

        Raises:
            AnswerInterruptedError: the model was changed while it wrote.
        """
        epoch = self._scorer.epoch
        if self._rows and epoch is not self._epoch:
            raise AnswerInterruptedError(_CHANGED)
        self._epoch = epoch


def _write(rows: Sequence[WrittenAnswer], logits: torch.Tensor) -> None:
    """Write the next token of each row, from the head's output [B, V]."""
    for row, own, likeliest in zip(rows, logits, logits.argmax(-1).tolist(), strict=True):
        row.write(own, likeliest)


def _of_like_length(rows: Sequence[WrittenAnswer]) -> list[list[WrittenAnswer]]:
    """The rows in groups of which none is much longer than another."""
    groups: list[list[WrittenAnswer]] = []
    for row in sorted(rows, key=lambda row: (len(row.prompt.ids), row.reads)):
        last = groups[-1] if groups else []
        if last and len(row.prompt.ids) <= _ALIKE * len(last[0].prompt.ids) + _FEW:
            last.append(row)
        else:
            groups.append([row])
    return groups


def _padded(prompts: Sequence[Prompt], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [B, N] of prompts that end in one column."""
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p.ids)) + list(p.ids) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=device)
    return ids, mask


def drawn(model: WritingModel, rows: Sequence[WrittenAnswer]) -> None:
    """Write answers that are drawn for scores of others, as many at once as `Memory.running` holds.

    Raises:
        Exception: one of them cannot be written.
    """
    left = list(rows)
    while left:
        if not model.scorer.joins:
            write_whole(model, left.pop(0), Objective(gradients=False))
            continue
        batch = RunningBatch(model, Objective(gradients=False))
        wanted = [(row.prompt, row.options) for row in left]
        fit = next((n for n in range(len(left), 0, -1) if batch.has_room(wanted[:n])), 1)
        batch.join(left[:fit])
        left = left[fit:]
        while batch.rows:
            batch.step(look=False)
    for row in rows:
        if row.error is not None:
            raise row.error
