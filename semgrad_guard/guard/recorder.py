"""Drafts as they are made, for calibrating a chain or an engine on its real prompts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock

from semgrad_guard.calibration.prompt_shape import PromptForm
from semgrad_guard.records import Verdict


@dataclass(frozen=True)
class RecordedDraft:
    """One scored draft, and the form of its prompt. `source` is its frontend's name for the call."""

    verdict: Verdict
    prompt: PromptForm | None
    source: str | None = None


@dataclass
class Recorder:
    """The drafts of one run, in the order in which they were made; safe to fill from several threads."""

    drafts: list[RecordedDraft] = field(default_factory=list[RecordedDraft])
    closed: bool = False
    """Whether its run is over. Tasks that are still running keep its context, and record nothing more."""
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, verdict: Verdict, prompt: PromptForm | None, *, source: str | None = None) -> None:
        """Record a draft."""
        with self._lock:
            self.drafts.append(RecordedDraft(verdict, prompt, source))


_recorder: ContextVar[Recorder | None] = ContextVar("semgrad_guard_recorder", default=None)


@contextmanager
def recording() -> Generator[Recorder]:
    """While this lasts, every draft is recorded and delivered: nothing is decided, withheld or escalated."""
    recorder = Recorder()
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
