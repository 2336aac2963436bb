"""`ScoringWorker`: in vLLM's worker, between two steps of its engine, answers are scored on its own weights.

The messages between vLLM's server and its worker come first. They are JSON: plain records, and errors by their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from pydantic import TypeAdapter

from semgrad_guard import errors
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.prompts.thoughts import Thinking
from semgrad_guard.engine.text_units import Span
from semgrad_guard.errors import SemGradGuardError, UnsupportedModelError
from semgrad_guard.guard import Answerer, Draft
from semgrad_guard.guard.policy import judged_by
from semgrad_guard.loading import load_estimator
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.assembly import options_of, policy_of
from semgrad_guard.server.scheduler import AnswerRequest, Assignment, ForeignText, Segment, judged, segments
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.vllm.engine import WrittenAnswers, require_taken
from semgrad_guard.vllm.listener import Listener, VLLMAnswer
from semgrad_guard.vllm.vllm_language_model import TwinLanguageModel

A = TypeVar("A")
R = TypeVar("R")
A_contra = TypeVar("A_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

METHOD = "semgrad_guard"
"""The worker's one method. It takes the name of a message and the message, and returns JSON as well."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How the worker shall score: the server's settings, and the model's name."""

    settings: ServerSettings
    name: str


@dataclass(frozen=True, kw_only=True)
class ToRead:
    """A request, the names under which vLLM will write its answers, and those of abandoned answers."""

    request: AnswerRequest
    names: tuple[str, ...]
    abandoned: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Read:
    """How it is written: the prompt's tokens, the options of each answer, and the tokens that end one.

    `thinking` tells thoughts and answer apart. With `has_parts` sentences may leave before the answer ends.
    """

    ids: tuple[int, ...]
    options: tuple[GenerationOptions, ...]
    end_tokens: tuple[int, ...]
    thinking: Thinking | None = None
    has_parts: bool = False


@dataclass(frozen=True, kw_only=True)
class Written:
    """The tokens of each answer to a request that was read, those that ended them included, and its name.

    `stopped`: it was ended behind a sentence. `known` is the verdict on the sentences that have been scored.
    """

    names: tuple[str, ...]
    answers: tuple[tuple[int, ...], ...]
    stopped: bool = False
    known: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The tokens of an answer that is being written, and the sentences that have ended in it; `known` as above."""

    name: str
    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    known: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredPart:
    """The part of an answer that has ended. With its first `tokens` the answer would end behind its last sentence."""

    draft: Draft[None]
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An error by the name of its class."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """One of ours as it is; of others only the kind, since their text may quote a question."""
        ours = isinstance(error, SemGradGuardError)
        return cls(kind=type(error).__name__, text=str(error) if ours else "the worker failed at this request")

    def error(self) -> SemGradGuardError:
        """The error, to be raised."""
        named = getattr(errors, self.kind, errors.ScoringError)
        # One that carries more than a text is raised as its base class.
        kind: type[SemGradGuardError] = next(base for base in named.__mro__ if "__init__" not in vars(base))
        return kind(self.text)


@dataclass(frozen=True)
class Call(Generic[A, R]):
    """One message to the worker: its name, its form, and the form of the reply."""

    name: str
    sent: TypeAdapter[A]
    reply: TypeAdapter[R]

    def answered(self, payload: str, work: Callable[[A], R]) -> str:
        """The reply to a message: the result of `work`, or its error."""
        try:
            return json.dumps({"reply": self.reply.dump_python(work(self.sent.validate_json(payload)), mode="json")})
        except Exception as error:  # noqa: BLE001 - raised again in the other process
            return json.dumps({"failed": vars(Failed.of(error))})

    def read(self, reply: str) -> R:
        """The worker's result.

        Raises:
            SemGradGuardError: the worker's error.
        """
        fields: dict[str, Any] = json.loads(reply)
        if "failed" in fields:
            raise Failed(**fields["failed"]).error()
        return self.reply.validate_python(fields["reply"])


OPEN = Call("open", TypeAdapter(Opening), TypeAdapter(str))
READ = Call("read", TypeAdapter(ToRead), TypeAdapter(Read))
SENTENCES = Call("sentences", TypeAdapter(list[Begun]), TypeAdapter(list[ScoredPart | Failed | None]))
"""None where an answer's tokens spell another text."""
SCORE = Call("score", TypeAdapter(list[Written]), TypeAdapter(list[list[Draft[Answer]] | Failed]))
ELSEWHERE = Call("elsewhere", TypeAdapter(ForeignText), TypeAdapter(Draft[None]))
SEGMENTS = Call("segments", TypeAdapter(ForeignText), TypeAdapter(list[Segment]))
CALLS: Mapping[str, Call[Any, Any]] = {call.name: call for call in (READ, SENTENCES, SCORE, ELSEWHERE, SEGMENTS)}


class ScoringWorker:
    """One method more for vLLM's worker (`vllm serve --worker-extension-cls ...scoring_worker.ScoringWorker`)."""

    def semgrad_guard(self, name: str, payload: str) -> str:
        """Answer a message of the server (a `Call`)."""
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
                self._answers[one.names[0]][0].drafts([next(generations) for _ in one.names], one.known)
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


class _Work(Protocol[A_contra, R_co]):
    """The results for some answers; `again`: these have failed together with others."""

    def __call__(self, sent: Sequence[A_contra], /, *, again: bool) -> Sequence[R_co]: ...


def _together(sent: Sequence[A], work: _Work[A, R]) -> list[R | Failed]:
    """The results in one backward pass; where that fails, for each by itself, and read again."""
    try:
        return list(work(sent, again=False))
    except Exception:  # noqa: BLE001 - raised by the caller
        return [_alone(one, work) for one in sent]


def _alone(one: A, work: _Work[A, R]) -> R | Failed:
    try:
        (result,) = work([one], again=True)
    except Exception as error:  # noqa: BLE001 - raised by the caller
        return Failed.of(error)
    return result
