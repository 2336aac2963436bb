"""`RecordedBatch`: answers that vLLM writes, scored from the states of its own passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from semgrad_guard.engine.generation.decoding import Decoder
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.running_batch import BatchRequest, RunningAnswer, RunningBatch
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.memory_budget import unless_memory_runs_out
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.vllm.recorder import Record, Recorder


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

    def generations(self, rows: Sequence[RunningAnswer]) -> list[Generation]:
        """Answers that are done, in their order; those that can be scored in one backward pass are one batch."""
        for row in rows:
            row.behind = cast(RecordedAnswer, row).record.reach(len(row.ids))
        return super().generations(rows)

    def left_by(self, rows: Sequence[RunningAnswer]) -> CapturedStates | None:
        """The states that vLLM's passes left of these answers, to observe and to replay them from."""
        if (recorder := self._recorder) is None:
            return None
        records = [cast(RecordedAnswer, row).record for row in rows]
        lengths = [len(row.ids) for row in rows]
        with clean_slate():
            return unless_memory_runs_out(lambda: recorder.left_by(records, lengths, rows[0].epoch))


class WrittenAnswers(RecordedBatch):
    """Answers that vLLM has written for another program: their tokens, and the states of its passes."""

    def generations_of(self, written: Sequence[tuple[BatchRequest, Sequence[int], Record]]) -> list[Generation]:
        """Each by its request, with its tokens and the token that ended it; to be scored together."""
        decoder, rows = self._get_decoder(), list[RunningAnswer]()
        self.require_the_same_model()
        for request, tokens, record in written:
            row = RecordedAnswer(request, decoder, record)
            row.epoch = self._epoch
            for token in tokens:
                if not row.done:
                    row.take(token)
            rows.append(row)
        return self.generations(rows)
