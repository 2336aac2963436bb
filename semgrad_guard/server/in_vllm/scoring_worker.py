"""`ScoringWorker`: in vLLM's worker, between two steps of its engine, answers are scored on its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from semgrad_guard.errors import UnsupportedModelError
from semgrad_guard.guard import Answerer, Draft
from semgrad_guard.guard.policy import judged_by
from semgrad_guard.loading import load_estimator
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.assembly import options_of, policy_of
from semgrad_guard.server.in_vllm.messages import (
    CALLS,
    OPEN,
    Begun,
    Failed,
    Opening,
    Read,
    ScoredPart,
    ToRead,
    Written,
)
from semgrad_guard.server.scheduler import Assignment, ForeignText, Segment, judged, segments
from semgrad_guard.vllm.engine import WrittenAnswers, require_taken
from semgrad_guard.vllm.listener import Listener, VLLMAnswer
from semgrad_guard.vllm.vllm_language_model import TwinLanguageModel

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class ScoringWorker:
    """One method more for vLLM's worker (`vllm serve --worker-extension-cls ...scoring_worker.ScoringWorker`)."""

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
    listener = Listener(worker.model_runner)
    if worker.model_config.enforce_eager:  # compiled graphs cannot be recorded
        listener.record(model.scorer)
    worker.semgrad_guard_scoring = Scoring(model, opening, worker.vllm_config, listener)
    return model.identity.fingerprint


class Scoring:
    """One model, and the replies to all messages about it; `config` is vLLM's `VllmConfig`.

    `listener` hears vLLM's passes over the answers. Each is kept from the moment that its request is read until it is
    scored, or abandoned.

    Raises:
        BindingMismatchError: the calibration is not of this model, engine and estimator.
    """

    def __init__(self, model: TwinLanguageModel, opening: Opening, config: Any, listener: Listener) -> None:
        policy = policy_of(opening.settings, opening.name)
        self._model, estimator = model, load_estimator(opening.settings.estimator, policy)
        if estimator.objective.gradients:
            estimator.objective.span(model.n_layers)  # refused here, and not at each request
        by_sentence = judged_by(policy.calibration, opening.settings.by, opening.settings.on_doubt)
        self._answerer = Answerer(model, estimator, options_of(opening.settings), by_sentence=by_sentence)
        policy.check(self._answerer.binding())
        self._has_sentences = by_sentence is not None and estimator.objective.gradients  # with replays of their own
        self._config, self._written = config, WrittenAnswers(model, estimator.objective, listener=listener)
        self._answers: dict[str, tuple[Assignment, VLLMAnswer]] = {}

    @torch.inference_mode(False)
    def answered(self, name: str, payload: str) -> str:
        """The answer to a message, by the method of its name."""
        return CALLS[name].answered(payload, getattr(self, name))

    def read(self, request: ToRead) -> Read:
        """READ."""
        for name in request.abandoned:
            self._let_go(name)
        assignment = Assignment.of(request.request, self._answerer)
        require_taken(assignment.options[0], self._config)
        for name, options in zip(request.names, assignment.options, strict=True):
            row = self._written.answer(assignment.prompt, options, name=name)
            self._written.join([row])
            self._answers[name] = assignment, row
        return Read(
            ids=tuple(assignment.prompt.ids),
            options=assignment.options,
            end_tokens=tuple(self._model.end_tokens),
            thinking=assignment.prompt.thinking,
            has_parts=assignment.has_parts,
        )

    def _let_go(self, name: str) -> None:
        if name in self._answers:
            self._written.drop([self._answers.pop(name)[1]])

    def _told(self, name: str, tokens: Sequence[int], *, again: bool, stopped: bool = False) -> VLLMAnswer:
        """An answer with its tokens so far; `again`: without what passes left of it."""
        row = self._answers[name][1]
        row.replayed = again
        row.take_all(tokens)
        if stopped:
            row.end(len(tokens))
        return row

    def sentences(self, begun: list[Begun]) -> list[ScoredPart | Failed | None]:
        """SENTENCES."""
        return _together(begun, self._parts)

    def _parts(self, begun: Sequence[Begun], *, again: bool) -> Sequence[ScoredPart | None]:
        assignments = [self._answers[one.name][0] for one in begun]
        with self._model.turn:  # in which the model is looked at once
            rows = [self._told(one.name, one.tokens, again=again) for one in begun]
            ended = self._written.ended(rows, [one.spans for one in begun], [_count(one.known) for one in begun])
            return [
                found and ScoredPart(draft=own.opened(found, one.known), tokens=found.tokens)
                for own, one, found in zip(assignments, begun, ended, strict=True)
            ]

    def score(self, written: list[Written]) -> list[list[Draft[Answer]] | Failed]:
        """SCORE."""
        try:
            return _together(written, self._drafts)
        finally:
            for one in written:
                for name in one.names:
                    self._let_go(name)

    def _drafts(self, written: Sequence[Written], *, again: bool) -> Sequence[list[Draft[Answer]]]:
        with self._model.turn:  # in which the model is looked at once
            rows = [
                self._told(name, own, stopped=one.stopped, again=again)
                for one in written
                for name, own in zip(one.names, one.answers, strict=True)
            ]
            known = [_count(one.known) for one in written for _ in one.names] if self._has_sentences else ()
            generations = iter(self._written.generations(rows, known))
            return [
                self._answers[one.names[0]][0].drafts([next(generations) for _ in one.names], known=one.known)
                for one in written
            ]

    def elsewhere(self, text: ForeignText) -> Draft[None]:
        """ELSEWHERE."""
        return judged(text, self._answerer)

    def segments(self, text: ForeignText) -> list[Segment]:
        """SEGMENTS."""
        return segments(text, self._answerer)


def _count(known: Verdict | None) -> int:
    """How many sentences have been scored."""
    return 0 if known is None else len(known.sentences)


class _Work(Protocol[S_contra, R_co]):
    """The results for some answers; `again`: these have failed together with others."""

    def __call__(self, sent: Sequence[S_contra], /, *, again: bool) -> Sequence[R_co]: ...


def _together(sent: Sequence[S], work: _Work[S, R]) -> list[R | Failed]:
    """The results in one backward pass; where that fails, for each by itself, and read again."""
    try:
        return list(work(sent, again=False))
    except Exception:  # noqa: BLE001 - raised by the caller
        return [_alone(one, work) for one in sent]


def _alone(one: S, work: _Work[S, R]) -> R | Failed:
    try:
        (result,) = work([one], again=True)
    except Exception as error:  # noqa: BLE001 - raised by the caller
        return Failed.of(error)
    return result
