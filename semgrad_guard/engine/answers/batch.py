"""A batch that answers join and leave at any step: each with a prompt, sampling, stop strings and grammar of its own.

All rows end in one column and begin where their prompt begins; a row that joins is read by itself and added to the
others. A recorder keeps the states of a stretch of steps with the same rows; an answer's tape is its part of them.

Where a model cannot take rows in and out (a recurrent state, no keys by position), the library's `generate` writes an
answer in one go.

Why: docs/decisions.md#0146
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache

from semgrad_guard.engine.answers.answer import Answer, BatchScoring, Generation
from semgrad_guard.engine.answers.options import DiverseBeams, GenerationOptions, Sample, SamplingPlan, force
from semgrad_guard.engine.answers.sentence_evidence import EndedSentences, ended_sentences, keep_sentences
from semgrad_guard.engine.answers.writing import Piece, WrittenAnswer
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scores.gradients import observed_layer
from semgrad_guard.engine.scores.replay import cut_cache
from semgrad_guard.engine.scores.scorer import clean_slate
from semgrad_guard.engine.scores.tape import (
    KeysValues,
    Memory,
    Recorder,
    Tape,
    below,
    growing_cache,
    is_out_of_memory,
    keys_of,
    left_of,
)
from semgrad_guard.engine.scores.twin import CACHE
from semgrad_guard.engine.text_units import Span
from semgrad_guard.errors import AnswerInterruptedError

ROWS = 8
"""Answers that are written at once, unless `LanguageModel.max_batch` is another number."""
_LOOK = 16  # steps from one look at the model to the next: a look costs some twentieth of a step
_ALIKE, _FEW = 1.25, 16  # how much longer a prompt may be than the shortest of its group: times, plus tokens
T = TypeVar("T")
_CHANGED = "the model was changed while it wrote; nothing is delivered. Ask again"


class RunningBatch:
    """Writes the answers of one model, and takes them out of the batch when they are done.

    Not for several threads. The model's lock is held for one step at a time.
    """

    def __init__(self, model: WritingModel, objective: Objective) -> None:
        self._model, self._scorer, self._objective = model, model.scorer, objective
        self._rows: list[WrittenAnswer] = []
        self._steps = 0
        self._epoch: object = None
        self._cache: Cache = growing_cache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._recorder: Recorder | None = None

    @property
    def rows(self) -> Sequence[WrittenAnswer]:
        """The answers that are being written."""
        return tuple(self._rows)

    def takes(self, prompt: Prompt, options: GenerationOptions) -> bool:
        """Whether this answer can join: not where its length would matter to others.

        Rotary frequencies that change with the length are those of the longest row.
        """
        limit = self._scorer.architecture.fixed_positions
        return limit is None or len(prompt.ids) + options.max_tokens <= limit

    def has_room(self, new: Sequence[tuple[Prompt, GenerationOptions]]) -> bool:
        """Whether keys and values of these answers and the present ones fit into `Memory.running`. Padding counts."""
        every = [*new, *((row.prompt, row.options) for row in self._rows)]
        longest = max(len(prompt.ids) + options.max_tokens for prompt, options in every)
        return len(every) * longest * self._token_bytes <= self._scorer.memory.running

    @cached_property
    def _token_bytes(self) -> int:
        return self._scorer.exactness().token_bytes

    def answer(
        self, prompt: Prompt, options: GenerationOptions, *, listener: Callable[[Piece], None] | None = None
    ) -> WrittenAnswer:
        """An answer that may `join`, as `WrittenAnswer`."""
        return WrittenAnswer(self._model, prompt, options, listener=listener)

    def join(self, rows: Sequence[WrittenAnswer]) -> None:
        """Read prompts (`takes`), and write the first token of their answers, which may be the last.

        Whatever it raises: none of them has joined, none may join again, and the others are as they were.

        Raises:
            AnswerInterruptedError: the current stop ended it, or the model was changed while it wrote the others.
        """
        with self._scorer.lock:
            try:
                for group in of_like_length(rows, lambda row: row.prompt):
                    for _ in self.join_in_pieces(group, sys.maxsize):
                        pass
            except BaseException:
                self.drop(rows)
                raise

    def join_in_pieces(self, rows: Sequence[WrittenAnswer], piece: int) -> Iterator[bool]:
        """Like `join`: whether they have joined, after each `piece` of their prompts; others may step in between.

        Raises:
            AnswerInterruptedError: as `join`, or the model was changed between two pieces.
        """
        epoch, reading, done = self._scorer.epoch, self._read(rows, piece), False
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

    def _read(self, rows: Sequence[WrittenAnswer], piece: int) -> Iterator[bool]:
        """Prefill some rows, and add them to the present ones: whether that is done, after each piece of the prompts.

        The last piece begins no later than the states that are kept for scoring.
        """
        twin = self._scorer.twin
        different = list(dict.fromkeys(row.reads for row in rows))
        owners = [different.index(row.reads) for row in rows]
        prompts = [rows[owners.index(number)].prompt for number in range(len(different))]
        recorder = self._recorder_for(prompts)
        self._model.require_known(prompts)
        width = max(len(prompt.ids) for prompt in prompts)  # all end in one column
        filled, device = [(width - len(prompt.ids), prompt.ids) for prompt in prompts], self._scorer.device
        ids = torch.tensor([[0] * count + list(own) for count, own in filled], device=device)
        mask = torch.tensor([[0] * count + [1] * len(own) for count, own in filled], device=device)
        most, begin, cache = min(recorder.start, width - 1), 0, growing_cache()
        twin.reset()
        while begin + piece < most:
            with torch.no_grad():
                twin.step(ids[:, begin : begin + piece], mask[:, : begin + piece], cache)
            begin += piece
            yield False
        self.require_the_same_model()
        recorder.columns = begin
        with torch.no_grad(), recorder.listening(twin):
            logits = twin.step(ids[:, begin:], mask, cache)
        keys = [keys_of(cache, number, width - len(prompt.ids)) for number, prompt in enumerate(prompts)]
        for row, number in zip(rows, owners, strict=True):
            row.epoch = self._epoch
            row.begin = recorder.start - (width - len(row.prompt.ids))
            row.passes.append((recorder, number))
        _write(rows, logits[owners])
        present = [self._keys(number) for number in range(len(self._rows))]
        self._lay_out([*self._rows, *rows], [*present, *(keys[number] for number in owners)])
        yield True

    def step(self) -> None:
        """Write one more token of every answer; those that are done with it leave the batch.

        Not every step looks at the model: a change is seen some steps later, or before an answer leaves.

        Where memory runs out, the answers may be as they were before. Whatever else it raises: none can continue, and
        the batch is empty.

        Raises:
            AnswerInterruptedError: the model was changed while it wrote, or the current stop ended it.
        """
        if not self._rows:
            return
        columns = self._mask.shape[1]
        with self._scorer.lock, clean_slate():
            self._steps += 1
            if self._steps % _LOOK:
                self._scorer.trust()
            try:
                self.require_the_same_model()
                self._mask = F.pad(self._mask, (0, 1), value=1)
                ids = torch.tensor([[row.ids[-1]] for row in self._rows], device=self._scorer.device)
                with torch.no_grad(), self._stretch().listening(self._scorer.twin):
                    logits = self._scorer.twin.step(ids, self._mask, self._cache)
                _write(self._rows, logits)
                if any(row.done for row in self._rows):  # no answer leaves a model that was changed
                    self._scorer.look_again()
                    self.require_the_same_model()
            except BaseException as error:  # the cache may have grown in some of its layers
                if is_out_of_memory(error):
                    self._take_back(columns)
                else:
                    self.drop(self._rows)
                raise
            self._leave()

    def _take_back(self, columns: int) -> None:
        """Have the batch as it was behind so many columns. What was recorded since is of no use to a score."""
        self._mask = self._mask[:, :columns]
        for row in self._rows:
            row.replayed = True
        try:
            self._lay_out(self._rows, [self._keys(number, columns) for number in range(len(self._rows))])
        except BaseException:
            self.drop(self._rows)
            raise

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
        answers = self._generations(rows)
        some = [(one.evidence, own) for one, own in zip(answers, known, strict=False) if own is not None]
        if self._objective.gradients and (scored := [(one, own) for one, own in some if one.response_ids]):
            keep_sentences([one for one, _ in scored], [own for _, own in scored])
        for row, answer in zip(rows, answers, strict=True):
            row.finish(answer.text, answer.reasoning)
        return answers

    def ended(
        self, rows: Sequence[WrittenAnswer], spans: Sequence[Sequence[Span]], known: Sequence[int]
    ) -> list[EndedSentences | None]:
        """The sentences that have ended, `spans`, in answers that are being written (see `ended_sentences`)."""
        return ended_sentences([answer.evidence for answer in self._generations(rows)], spans, known)

    def _tape(self, row: WrittenAnswer) -> Tape | None:
        """What writing an answer has left; its keys are in the batch as long as it is being written."""
        number = next((number for number, other in enumerate(self._rows) if other is row), None)
        return row.tape() if number is None else row.tape(self._keys(number))

    def _generations(self, rows: Sequence[WrittenAnswer]) -> list[Generation]:
        """Answers as far as they are written, as one batch to be scored."""
        seen = [row.visible() for row in rows]
        cuts = [
            found.cut if row.ended or found.cut is not None else row.options.max_tokens
            for row, found in zip(rows, seen, strict=True)
        ]
        answers = [
            Answer(
                prompt=row.prompt,
                text=found.text,
                ids=found.scored_ids,
                preceding=found.preceding,
                reasoning=found.reasoning,
                options=row.options,
                cut=cut,
            )
            for row, found, cut in zip(rows, seen, cuts, strict=True)
        ]
        # A tape belongs to the tokens as they were written.
        tapes = [None if found.retokenized else self._tape(row) for row, found in zip(rows, seen, strict=True)]
        scoring = BatchScoring(self._model, answers, tapes=tapes)
        return [
            Generation(
                prompt=row.prompt,
                text=found.text,
                response_ids=found.ids,
                finish_reason="length" if isinstance(evidence.cut, int) else "stop",
                completion_tokens=len(row.ids) + row.ended,
                evidence=evidence,
                cut=evidence.cut,
                reasoning=found.reasoning,
                preceding_ids=found.preceding,
            )
            for row, found, evidence in zip(rows, seen, scoring.evidence, strict=True)
        ]

    # Without a batch, and for the scores of others.

    def write_whole(self, rows: Sequence[WrittenAnswer], *, scored: bool = True) -> None:
        """Have the library's `generate` write answers to one prompt, from the first token to the last.

        Answers that are to be `scored` are written one after the other, and the cache before the first position that
        their scores need is kept for them. Others are written together, where rows of the model do not see each other.

        Raises:
            AnswerInterruptedError: the current stop ended it.
        """
        with self._scorer.lock, clean_slate(), torch.no_grad():
            known = self._scorer.if_checked()
            continues = known is not None and known.way == "continued"
            are_apart = continues and not scored and not self._model.is_hooked
            most = self._model.max_batch or ROWS if are_apart else 1
            for begin in range(0, len(rows), most):
                self._generate(rows[begin : begin + most], continues=continues, scored=scored)

    def _generate(self, rows: Sequence[WrittenAnswer], *, continues: bool, scored: bool) -> None:
        """Have answers to one prompt written together, each by its own choice of tokens."""
        prompt, end = rows[0].prompt, next(iter(self._model.end_tokens), 0)

        def write(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Leave one token in each row: the one that it has written, or the end where it has written none."""
            for row, own in zip(rows, scores, strict=True):
                before = len(row.ids)
                if not row.done:
                    row.write(own, int(own.argmax()))
                force(own, row.ids[-1] if len(row.ids) > before else end)
            return scores

        def is_done(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.tensor([row.done for row in rows], device=ids.device)

        ids = torch.tensor([list(prompt.ids)], device=self._scorer.device)
        gradients = scored and self._objective.gradients
        cache = self._cut_cache(rows, ids, gradients=gradients) if continues and (gradients or len(rows) > 1) else None
        ids = ids.repeat(len(rows), 1)
        recorders = {recorder.layer: recorder.see_hidden for row in rows for recorder, _ in row.passes}
        with self._scorer.twin.watching(recorders):
            self._scorer.twin.generate(
                ids,
                torch.ones_like(ids),
                **({} if cache is None else {CACHE: cache}),
                generation_config=GenerationConfig(
                    max_new_tokens=max(row.options.max_tokens for row in rows), do_sample=False, pad_token_id=end
                ),
                logits_processor=LogitsProcessorList([cast("Any", write)]),
                stopping_criteria=StoppingCriteriaList([cast("Any", is_done)]),
            )

    def _cut_cache(self, rows: Sequence[WrittenAnswer], ids: torch.Tensor, *, gradients: bool) -> Cache | None:
        """The cache of a prompt, read once for all rows: up to the first position that scores need, or its last token.

        None where `generate` cannot tell how much of the prompt it holds: one without keys by position.
        """
        n, offset = ids.shape[1], rows[0].prompt.semantic_token.offset
        self._scorer.twin.reset()
        begin = n + min(self._objective.positions(offset, n)) if gradients else n - 1
        found: Any = cut_cache(self._scorer.twin, ids[:, :begin])
        if found is None or all(getattr(found, "is_linear", (True,))):
            return None
        if gradients:
            rows[0].begin, rows[0].cut, rows[0].epoch = begin, copy.deepcopy(found), self._scorer.epoch
            if self._scorer.exactness().begins:
                layer = self._objective.span(self._scorer.architecture.n_layers)[0]
                rows[0].passes = [(Recorder(layer), 0)]
        found.reorder_cache(torch.zeros(len(rows), dtype=torch.long))  # its one row for each
        return found

    def draw(self, wanted: Sequence[tuple[Prompt, GenerationOptions]], plan: SamplingPlan) -> list[tuple[Sample, ...]]:
        """The answers that a plan draws to some prompts, not yet judged; they end as one with these options does.

        As many are written at once as `Memory.running` holds.

        Raises:
            Exception: one of them cannot be written.
        """
        rows, model = list[list[WrittenAnswer]](), self._model
        for prompt, options in wanted:
            if isinstance(plan, DiverseBeams):
                ends = model.fitted(replace(options, max_tokens=plan.max_tokens, grammar=None), prompt)
                groups = plan.processors(len(prompt.ids), model.end_tokens)
                rows.append([WrittenAnswer(model, prompt, ends, processors=own) for own in groups])
            else:
                drawn = plan.rows(prompt.ids, options)
                rows.append([WrittenAnswer(model, prompt, model.fitted(one, prompt)) for one in drawn])
        left = [row for own in rows for row in own]
        if not self._model.joins:
            for own in rows:
                self.write_whole(own, scored=False)
        while left and self._model.joins:
            every = [(row.prompt, row.options) for row in left]
            fit = next((count for count in range(len(left), 0, -1) if self.has_room(every[:count])), 1)
            self.join(left[:fit])
            left = left[fit:]
            while self._rows:
                self.step()
        for error in (row.error for own in rows for row in own if row.error):
            raise error
        return [tuple(one.evidence.answer.sample for one in self._generations(own)) for own in rows]

    # Rows come and go.

    def _leave(self) -> None:
        """Take the answers that are done out of the batch, with their keys for scoring."""
        for number, row in enumerate(self._rows):
            if row.done:
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

    def _recorder_for(self, prompts: Sequence[Prompt]) -> Recorder:
        """One that keeps what scoring needs of answers to these prompts, which end in one column.

        Raises:
            InputError: the objective asks for a token that a prompt does not have.
        """
        n_layers, objective = self._scorer.architecture.n_layers, self._objective
        width = max(len(prompt.ids) for prompt in prompts)
        if not objective.gradients:
            return Recorder(observed_layer(n_layers), width - 1, memory=self._left())
        firsts = [min(objective.positions(p.semantic_token.offset, len(p.ids))) for p in prompts]
        return Recorder(objective.span(n_layers)[0], width + min(firsts), memory=self._left())

    def _stretch(self) -> Recorder:
        """The recorder of the steps in which the rows are these."""
        if self._recorder is None:
            self._recorder = Recorder(self._rows[0].passes[0][0].layer, memory=self._left())
            for number, row in enumerate(self._rows):
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


def of_like_length(some: Iterable[T], prompt_of: Callable[[T], Prompt]) -> list[list[T]]:
    """What reads prompts, in groups of which none is much longer than another."""
    groups: list[list[T]] = []
    for one in sorted(some, key=lambda one: len(prompt_of(one).ids)):
        if groups and len(prompt_of(one).ids) <= _ALIKE * len(prompt_of(groups[-1][0]).ids) + _FEW:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups
