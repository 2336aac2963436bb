"""`VLLMBatch` and `VLLMDecoder`: vLLM writes the answers, in its own running batch, and our engine scores them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from dataclasses import replace
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.writing import BatchRequest, Decoder, RunningAnswer
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.records import Conversation
from semgrad_guard.vllm.engine import Engine, VLLMAnswer
from semgrad_guard.vllm.recorder import RecordedBatch


class VLLMBatch(RecordedBatch):
    """A running batch that vLLM keeps: it reads prompts in pieces, shares their common beginnings, makes room."""

    def __init__(
        self, engine: Engine, scorer: Scorer, decoder: Callable[[], Decoder], objective: Objective | None = None
    ) -> None:
        super().__init__(scorer, decoder, objective, recorder=engine.recorder)
        self._engine = engine

    def takes(self, prompt: Prompt, options: GenerationOptions) -> bool:
        """Whether this answer can join: vLLM takes every one."""
        del prompt, options
        return True

    def join(self, requests: Sequence[BatchRequest]) -> list[RunningAnswer]:
        """Have answers written, from the next step on. Whatever it raises: none of them has joined.

        Raises:
            AnswerInterruptedError: the current stop ended it, or the model was changed while it wrote the others.
            InputError: vLLM does not take a request.
        """
        with self._scorer.lock:
            current_stop().check()
            self.require_the_same_model()
            decoder = self._get_decoder()
            rows = [VLLMAnswer(request, decoder, self._objective) for request in requests]
            try:
                for row in rows:
                    row.epoch = self._epoch
                    self._engine.add(row)
            except BaseException:
                self._engine.abort(rows)
                raise
            self._rows += rows
            return list(rows)

    def join_in_pieces(self, requests: Sequence[BatchRequest], piece: int) -> Iterator[list[RunningAnswer] | None]:
        """Like `join`: vLLM itself reads prompts in pieces."""
        del piece
        yield self.join(requests)

    def step(self, *, look: bool = True) -> None:
        """One more token of every answer whose prompt was read; those that are done with it leave the batch.

        Every step looks at the model, whatever `look` is.

        Whatever it raises: no answer can continue, and the batch is empty.

        Raises:
            AnswerInterruptedError: the model was changed while it wrote, or the current stop ended it.
        """
        del look
        with self._scorer.lock:
            try:
                current_stop().check()
                self.require_the_same_model()
                if not all(row.done for row in self._rows):  # another batch's step may have ended them
                    self._engine.step()
            except BaseException:
                self.drop(self._rows)
                raise
            self._rows = [row for row in self._rows if not row.done]

    def end(self, row: RunningAnswer, tokens: int) -> None:
        """End an answer with so many of its tokens."""
        with self._scorer.lock:
            row.end(tokens)
            self._engine.abort([cast(VLLMAnswer, row)])
            self._rows = [one for one in self._rows if not one.done]

    def drop(self, rows: Iterable[RunningAnswer]) -> None:
        """Drop answers that no caller waits for any more."""
        Context().run(self._let_go, list(rows))  # under no stop: it may be the one that ended them

    def _let_go(self, rows: Sequence[RunningAnswer]) -> None:
        with self._scorer.lock:
            self._engine.abort(cast(Sequence[VLLMAnswer], rows))
            self._rows = [row for row in self._rows if row not in rows]


class VLLMDecoder(Decoder):
    """Writes with vLLM's engine in this process. Samples for estimators are drawn by the twin's own `generate`."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_tokens: tuple[int, ...],
        render: Callable[[Conversation], Prompt],
        window: int | None,
    ) -> None:
        super().__init__(scorer, tokenizer, end_tokens=end_tokens, render=render, window=window)
        self._engine = engine

    def run(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        objective: Objective,
        *,
        streamer: BaseStreamer | None = None,
    ) -> list[Generation]:
        """Answer a batch of prompts; `streamer` hears each new token, only in a batch of one."""
        with self._scorer.lock:
            batch, seed = VLLMBatch(self._engine, self._scorer, lambda: self, objective), options.seed
            seeds = [None if seed is None else seed + row for row in range(len(prompts))]
            rows = batch.join([BatchRequest(p, replace(options, seed=s)) for p, s in zip(prompts, seeds, strict=True)])
            sent = 0
            if streamer is not None:
                streamer.put(torch.tensor([prompts[0].ids]))  # as `generate` does
            while batch.rows:
                try:
                    batch.step()
                    if streamer is not None:
                        for token in rows[0].ids[sent:]:
                            streamer.put(torch.tensor([token]))
                except BaseException:
                    batch.drop(rows)
                    raise
                sent = len(rows[0].ids)
            if streamer is not None:
                streamer.end()
            for row in rows:
                if row.error is not None:
                    raise row.error
            return batch.generations(rows)
