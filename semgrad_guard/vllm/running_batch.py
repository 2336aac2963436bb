"""`VLLMBatch`: answers join and leave vLLM's own running batch at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from typing import cast

from semgrad_guard.engine.generation.decoding import Decoder
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.generation.running_batch import Asked, RunningAnswer, RunningBatch
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.memory_budget import unless_memory_runs_out
from semgrad_guard.engine.scoring.observation import observed_layer
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.vllm.engine import Engine, VLLMAnswer
from semgrad_guard.vllm.recorder import left_by


class VLLMBatch(RunningBatch):
    """A running batch that vLLM keeps: it reads prompts in pieces, shares what they have in common, makes room."""

    def __init__(
        self, engine: Engine, scorer: Scorer, decoder: Callable[[], Decoder], objective: Objective | None = None
    ) -> None:
        super().__init__(scorer, decoder, objective or Objective())
        self._engine = engine

    def takes(self, prompt: Prompt, options: GenerationOptions) -> bool:
        """Whether this answer can join: vLLM takes every one."""
        del prompt, options
        return True

    def join(self, asked: Sequence[Asked]) -> list[RunningAnswer]:
        """Have answers written, from the next step on. Whatever it raises: none of them has joined.

        Raises:
            AnswerInterruptedError: the current stop ended it, or the model was changed while it wrote the others.
            InputError: vLLM does not take a request.
        """
        with self._scorer.lock:
            current_stop().check()
            self.require_the_same_model()
            decoder = self._get_decoder()
            rows = [VLLMAnswer(each, decoder) for each in asked]
            try:
                for row in rows:
                    row.epoch = self._epoch
                    self._engine.add(row)
            except BaseException:
                self._engine.abort(rows)
                raise
            self._rows += rows
            return list(rows)

    def step(self) -> None:
        """One more token of every answer whose prompt was read; those that are done with it leave the batch.

        Whatever it raises: no answer can go on, and the batch is empty.

        Raises:
            AnswerInterruptedError: the model was changed while it wrote, or the current stop ended it.
        """
        with self._scorer.lock:
            try:
                current_stop().check()
                self.require_the_same_model()
                if not all(row.done for row in self._rows):  # somebody else's step may have ended them
                    self._engine.step()
            except BaseException:
                self.drop(self._rows)
                raise
            self._rows = [row for row in self._rows if not row.done]

    def drop(self, rows: Iterable[RunningAnswer]) -> None:
        """Let answers go that nobody waits for any more."""
        Context().run(self._let_go, list(rows))  # under no stop: it may be the one that ended them

    def _let_go(self, rows: Sequence[RunningAnswer]) -> None:
        with self._scorer.lock:
            self._engine.abort(cast(Sequence[VLLMAnswer], rows))
            self._rows = [row for row in self._rows if row not in rows]

    def left_by(self, rows: Sequence[RunningAnswer]) -> CapturedStates | None:
        """What vLLM's passes left of these answers: enough to observe them, and no cache to replay them from."""
        records = [cast(VLLMAnswer, row).record for row in rows]
        lengths, layer = [len(row.ids) for row in rows], observed_layer(self._scorer.architecture.n_layers)
        with clean_slate():
            return unless_memory_runs_out(lambda: left_by(records, lengths, layer=layer, epoch=rows[0].epoch))


class WrittenAnswers(RunningBatch):
    """Answers that vLLM has written elsewhere: their tokens, and nothing of what its passes left."""

    def generations_of(self, written: Sequence[tuple[Asked, Sequence[int]]]) -> list[Generation]:
        """Each as it was asked for, with its tokens and the token that ended it; to be scored together."""
        decoder, rows = self._get_decoder(), list[RunningAnswer]()
        self.require_the_same_model()
        for asked, tokens in written:
            row = RunningAnswer(asked, decoder)
            row.epoch = self._epoch
            for token in tokens:
                if not row.done:
                    row.take(token)
            rows.append(row)
        return self.generations(rows)

    def left_by(self, rows: Sequence[RunningAnswer]) -> CapturedStates | None:
        """Nothing: they were written in another call."""
        return None
