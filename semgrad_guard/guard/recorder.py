"""Drafts as they are made, for calibrating a chain or an engine on its real prompts."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from semgrad_guard.calibration.prompt_shape import PromptForm
from semgrad_guard.records import Verdict

if TYPE_CHECKING:
    from semgrad_guard.estimators import Estimator


class RecordedScore(BaseModel):
    """An estimator's score of a draft, with the settings that it is bound to; of a learned one, what it reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uncertainty: float | None
    settings: dict[str, Any]
    features: dict[str, float] | None = None


@dataclass(frozen=True)
class RecordedDraft:
    """One scored draft, and the form of its prompt. `source` is its frontend's name for the call.

    `scores` are those of the recorder's estimators, by name; none where the verdict joins several calls.
    """

    verdict: Verdict
    prompt: PromptForm | None
    source: str | None = None
    scores: Mapping[str, RecordedScore] = field(default_factory=dict[str, RecordedScore])


@dataclass
class Recorder:
    """The drafts of one run, in the order in which they were made; safe to fill from several threads.

    Drafts are scored by `estimators` as well, besides their model's own.
    """

    estimators: Sequence[Estimator] = ()
    drafts: list[RecordedDraft] = field(default_factory=list[RecordedDraft])
    closed: bool = False
    """Whether its run is over. Tasks that are still running keep its context, and record nothing more."""
    _scores: dict[tuple[Any, ...], Mapping[str, RecordedScore]] = field(
        default_factory=dict[tuple[Any, ...], Mapping[str, RecordedScore]], repr=False
    )
    _lock: Lock = field(default_factory=Lock, repr=False)

    def note(self, verdict: Verdict, scores: Mapping[str, RecordedScore]) -> None:
        """Keep the estimators' scores of an answer until a draft is recorded that is this answer."""
        with self._lock:
            self._scores[_answer(verdict)] = scores

    def add(self, verdict: Verdict, prompt: PromptForm | None, *, source: str | None = None) -> None:
        """Record a draft."""
        with self._lock:
            scores = self._scores.get(_answer(verdict), {})
            self.drafts.append(RecordedDraft(verdict, prompt, source, scores))


def _answer(verdict: Verdict) -> tuple[Any, ...]:
    """The numbers of one answer; frontends may shorten its text, or take calls out of it."""
    return verdict.prompt, verdict.estimator, verdict.uncertainty, verdict.scored_tokens, verdict.gnll


_recorder: ContextVar[Recorder | None] = ContextVar("semgrad_guard_recorder", default=None)


@contextmanager
def recording(estimators: Sequence[Estimator] = ()) -> Generator[Recorder]:
    """While this lasts, every draft is recorded and delivered: nothing is decided, withheld or escalated.

    Models score their drafts by `estimators` as well.
    """
    recorder = Recorder(estimators)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        recorder.closed = True
        _recorder.reset(token)


def current_recorder() -> Recorder | None:
    """The recorder of the run in progress, if there is one."""
    recorder = _recorder.get()
    return None if recorder is None or recorder.closed else recorder


def record_draft(verdict: Verdict, prompt: PromptForm | None, *, source: str | None = None) -> None:
    """Record a draft that no guard sees (a scored model's answer without a router), within `recording`."""
    recorder = current_recorder()
    if recorder is not None:
        recorder.add(verdict, prompt, source=source)
