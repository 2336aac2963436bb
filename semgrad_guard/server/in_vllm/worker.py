"""`ScoringWorker`: in vLLM's worker, between two steps of its engine, answers are scored on its own weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from semgrad_guard.engine.generation.running_answer import BatchRequest
from semgrad_guard.engine.sentences import By
from semgrad_guard.errors import UnsupportedModelError
from semgrad_guard.guard import Draft
from semgrad_guard.guard.sentences import judged_by
from semgrad_guard.loading import load_estimator
from semgrad_guard.server.assembly import options_of, policy_of
from semgrad_guard.server.in_vllm.messages import (
    ELSEWHERE,
    OPEN,
    READ,
    SCORE,
    SEGMENTS,
    Failed,
    Opening,
    Read,
    ScoredDraft,
    Segments,
    ToRead,
    Written,
)
from semgrad_guard.server.writing import ForeignText, Writer
from semgrad_guard.vllm.engine import require_taken
from semgrad_guard.vllm.language_model import TwinLanguageModel
from semgrad_guard.vllm.recorder import Record, Recorder
from semgrad_guard.vllm.thought_limits import ThoughtLimits


class ScoringWorker:
    """`vllm serve --worker-extension-cls semgrad_guard.server.in_vllm.worker.ScoringWorker`: one method more."""

    def semgrad_guard(self, name: str, payload: str) -> str:
        """Answer a message of the server (see `messages`)."""
        worker: Any = self
        if name == OPEN.name:
            return OPEN.answered(payload, lambda opening: _open(worker, opening))
        scoring: Scoring = worker.semgrad_guard_scoring
        return scoring.answered(name, payload)


def _open(worker: Any, opening: Opening) -> str:
    """Make the scoring model; the writing model has been loaded."""
    if (size := worker.parallel_config.world_size) > 1:
        raise UnsupportedModelError(
            f"vLLM spreads this model over {size} processes, and scoring takes whole weights: serve it with "
            "--tensor-parallel-size 1 --pipeline-parallel-size 1"
        )
    model = TwinLanguageModel.on(
        worker.model_runner.model, worker.model_config, template_options=opening.settings.template_options
    )
    # Compiled graphs cannot be recorded.
    recorder = model.listening(worker.model_runner) if worker.model_config.enforce_eager else None
    thoughts = ThoughtLimits(worker.model_runner)
    worker.semgrad_guard_scoring = Scoring(model, opening, worker.vllm_config, recorder, thoughts)
    return model.identity.fingerprint


class Scoring:
    """One model, and the replies to all messages about it; `config` is vLLM's `VllmConfig`.

    `recorder` keeps the states of vLLM's passes over the answers, and `thoughts` the ends of their thoughts, from the
    moment that a request is read until its answers are scored, or abandoned.

    Raises:
        BindingMismatchError: the calibration is not of this model, engine and estimator.
    """

    def __init__(
        self,
        model: TwinLanguageModel,
        opening: Opening,
        config: Any,
        recorder: Recorder | None,
        thoughts: ThoughtLimits,
    ) -> None:
        policy = policy_of(opening.settings, opening.name)
        self._model, self._estimator = model, load_estimator(opening.settings.estimator, policy)
        if self._estimator.objective.gradients:
            self._estimator.objective.span(model.n_layers)  # refused here, and not at each request
        by_sentence = judged_by(policy.calibration, opening.settings.by, opening.settings.on_doubt)
        self._writer, self._config = Writer(model, self._estimator, by_sentence=by_sentence), config
        self._recorder, self._thoughts = recorder, thoughts
        policy.check(self._writer.answerer(options_of(opening.settings)).binding())

    @torch.inference_mode(False)
    def answered(self, name: str, payload: str) -> str:
        """The answer to a message."""
        match name:
            case READ.name:
                return READ.answered(payload, self._read)
            case SCORE.name:
                return SCORE.answered(payload, self._score)
            case SEGMENTS.name:
                return SEGMENTS.answered(payload, self._segments)
            case _:
                return ELSEWHERE.answered(payload, lambda text: _scored(self._writer.judged(text)))

    def _read(self, request: ToRead) -> Read:
        for name in request.abandoned:
            self._record(name)
        assignment = self._writer.assigned(request.request)
        require_taken(assignment.options[0], self._config)
        for name, options in zip(request.names, assignment.options, strict=True):
            if self._recorder is not None:
                record = Record.for_scoring(assignment.prompt, self._estimator.objective)
                self._recorder.records[name] = record
            if limit := self._model.thought_limit(assignment.prompt, options):
                self._thoughts.limits[name] = limit
        thinking = assignment.prompt.thinking
        return Read(
            ids=tuple(assignment.prompt.ids),
            options=assignment.options,
            end_tokens=tuple(self._model.end_tokens),
            thinks=thinking is not None and not thinking.settled,
        )

    def _record(self, name: str) -> Record | None:
        """The states that passes left of an answer; they are removed here, and the end of its thought."""
        self._thoughts.limits.pop(name, None)
        return None if self._recorder is None else self._recorder.records.pop(name, None)

    def _score(self, written: list[Written]) -> list[list[ScoredDraft] | Failed]:
        """All requests in one backward pass; where that fails, each by itself, and read again."""
        records = {name: self._record(name) for one in written for name in one.names}
        try:
            return list(self._drafts(written, records))
        except Exception as error:  # noqa: BLE001 - raised by the caller
            return [Failed.of(error)] if len(written) == 1 else [self._score([one])[0] for one in written]

    def _drafts(self, written: Sequence[Written], records: Mapping[str, Record | None]) -> Sequence[list[ScoredDraft]]:
        with self._model.turn:  # in which the model is looked at once
            assignments = [self._writer.assigned(one.request) for one in written]
            answers = [
                (BatchRequest(assignment.prompt, options), tokens, records[name] or Record(len(assignment.prompt.ids)))
                for assignment, one in zip(assignments, written, strict=True)
                for options, tokens, name in zip(assignment.options, one.answers, one.names, strict=True)
            ]
            generations = iter(self._model.written(answers, self._recorder))
            return [
                [_scored(draft) for draft in self._writer.drafts(one, [next(generations) for _ in one.options])]
                for one in assignments
            ]

    def _segments(self, text_and_kind: tuple[ForeignText, By]) -> Segments:
        segments = self._writer.segments(*text_and_kind)
        return [(segment.text, segment.start, segment.end, value) for segment, value in segments]


def _scored(draft: Draft[Any]) -> ScoredDraft:
    return ScoredDraft(verdict=draft.verdict, answer=draft.answer, prompt=draft.prompt)
