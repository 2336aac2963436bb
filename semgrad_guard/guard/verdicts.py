"""Drafts on record: what happens to each, and what holds for all drafts of a block.

A draft is delivered, withheld, or replaced by a target's answer. Those of a block may be recorded, for calibrations on
the real prompts of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from semgrad_guard.calibration.binding import Binding
from semgrad_guard.records import (
    CallVerdict,
    FieldVerdict,
    PromptForm,
    Score,
    SentenceVerdict,
    ToolCall,
    Verdict,
    VerdictDetails,
    is_blank,
)

if TYPE_CHECKING:
    from semgrad_guard.estimators import Estimator

UNSCORED = "none"
"""The estimator of an answer without a score."""


def says_nothing(draft: Verdict) -> bool:
    """Whether an answer has neither text nor calls: it ended at once, or it was a call that cannot be read."""
    return is_blank(draft.text) and not draft.tool_calls


_DECIDED = frozenset(
    {"threshold", "confidence", "promised", "enforced", "draft", "decision_id", "calibration_id", "alpha"}
    | {"requested_alpha", "upstream", "familiar", "unfamiliar", "escalated_from"}
)
"""The fields that a decision writes."""


def undecided(verdict: Verdict) -> Verdict:
    """A verdict without the fields of an earlier decision (an annotated answer may come back from a cache)."""
    known = {**VerdictDetails.model_fields, **Verdict.model_fields}
    changes: dict[str, Any] = {name: known[name].default for name in _DECIDED}
    changes |= {"action": "answer", "reason": None if verdict.status == "scored" else verdict.reason}
    return verdict.revised(**changes, sentences=undecided_sentences(verdict.sentences))


def undecided_sentences(sentences: Sequence[SentenceVerdict]) -> tuple[SentenceVerdict, ...]:
    """The delivered sentences without the decision about them."""
    nothing = {"action": "deliver", "compared": None, "confidence": None, "promised": False}
    kept = [number for number, sentence in enumerate(sentences) if sentence.end > sentence.start]
    places: dict[int | None, int] = {number: place for place, number in enumerate(kept)}
    return tuple(
        sentences[number].model_copy(update={**nothing, "leans_on": places.get(sentences[number].leans_on)})
        for number in kept
    )


def is_withheld(verdict: Verdict) -> bool:
    """Whether the answer of this stage, or of the last one that it was handed on to, was kept back."""
    while verdict.escalated is not None:
        verdict = verdict.escalated
    return verdict.action == "abstain" and verdict.details.enforced


def unscored(text: str, *, reason: str, model: str = "unknown", estimator: str = UNSCORED, **facts: Any) -> Verdict:
    """The undecided verdict on an answer that cannot be scored; `facts` are further fields (settings, ...)."""
    return Verdict.of(
        status="unscored", action="answer", text=text, estimator=estimator, model=model, reason=reason, **facts
    )


def abstained(decided: Verdict, message: str) -> Verdict:
    """The verdict with its answer withheld: the message instead, the answer as `draft`."""
    return withheld(decided, text=message, action="abstain")


def escalated(decided: Verdict, answer: str | Verdict) -> Verdict:
    """The verdict with a target's answer in place of its own; a plain string is passed on unscored."""
    if isinstance(answer, str):
        answer = external(answer, estimator=decided.estimator)
    own: dict[str, Any] = {"reasoning": answer.details.reasoning, "tool_calls": answer.tool_calls}
    return with_promise(withheld(decided, text=answer.text, action="escalate", escalated=answer, **own))


def withheld(decided: Verdict, **instead: Any) -> Verdict:
    """The verdict on a draft that is withheld, the answer and all that tells of its parts; `instead` are its fields."""
    draft, sentences = decided.text or decided.draft, none_delivered(decided.sentences)
    nothing: dict[str, Any] = {"reasoning": None, "tool_calls": (), "calls": (), "fields": ()}
    return decided.revised(**{**nothing, "draft": draft, "sentences": sentences, **instead})


def none_delivered(sentences: Sequence[SentenceVerdict]) -> tuple[SentenceVerdict, ...]:
    """The sentences of a draft that does not go out, whatever goes out instead."""
    nowhere = {"start": 0, "end": 0, "promised": False}
    return tuple(
        sentence.model_copy(update={**nowhere, **({"action": "stop"} if sentence.action == "deliver" else {})})
        for sentence in sentences
    )


def external(text: str, *, tool_calls: tuple[ToolCall, ...] = (), estimator: str = UNSCORED, **facts: Any) -> Verdict:
    """The verdict on the answer of a target that carries no score; `facts` are further fields."""
    return unscored(
        text,
        reason="the escalation target cannot be scored; its answer is outside any promise",
        model="external",
        estimator=estimator,
        tool_calls=tool_calls,
        **facts,
    )


def with_promise(verdict: Verdict) -> Verdict:
    """The verdict with its promise: that of all stages, whichever wrote the text.

    A calibration made after another stage promises something only after that one.
    """
    return verdict.revised(promised=verdict.details.upstream is None and _keeps(verdict))


def _keeps(verdict: Verdict) -> bool:
    """Whether a stage lets the delivered text through, or hands its question on to one that was calibrated for that."""
    if not verdict.details.familiar:  # the target expects familiar questions, too
        return False
    if verdict.escalated is not None:
        return verdict.escalated.details.upstream == verdict.details.calibration_id and _keeps(verdict.escalated)
    if verdict.sentences:
        delivered = [sentence.promised for sentence in verdict.sentences if sentence.action == "deliver"]
        return verdict.action == "answer" and bool(delivered) and all(delivered)
    if verdict.uncertainty is None or verdict.threshold is None:
        return False
    return verdict.action == "answer" and verdict.uncertainty <= verdict.threshold


def binding_of(verdict: Verdict) -> Binding:
    """The binding in an answer's own record."""
    details = verdict.details
    return Binding(
        model=details.model,
        revision=details.revision,
        fingerprint=details.fingerprint,
        estimator=verdict.estimator,
        settings=details.settings,
        prompt_template=details.prompt_template,
        on_cut="unscored",
        options=details.options,
    )


@dataclass(frozen=True)
class Settlement:
    """What happens to a draft.

    "deliver": it goes out; of a part of it, `ranges` are those of its sentences in the draft. Where the mode does not
    withhold, its verdict is advice (`enforced` is False). Else nothing of it goes out: "escalate": the target answers;
    "abstain": the abstain message; "raise": a `LowConfidenceError`.
    """

    kind: Literal["deliver", "escalate", "abstain", "raise"]
    verdict: Verdict
    ranges: tuple[tuple[int, int], ...] = ()


class RecordedScore(BaseModel):
    """An estimator's score of a draft, with the settings that it is bound to; of a learned one, what it reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uncertainty: float | None
    settings: dict[str, Any]
    features: dict[str, float] | None = None

    @classmethod
    def of(cls, score: Score, settings: dict[str, Any]) -> RecordedScore:
        """A score as a line of a record."""
        features = None if score.features is None else dict(score.features)
        return cls(uncertainty=score.uncertainty, settings=settings, features=features)


def doubt_of(scored: Verdict | RecordedScore | CallVerdict | FieldVerdict) -> float:
    """Its uncertainty, to find the least certain of several by: one without a score is less certain than any other."""
    return math.inf if scored.uncertainty is None else scored.uncertainty


@dataclass(frozen=True)
class RecordedDraft:
    """One scored draft, and the form of its prompt.

    `scores` are those of the recorder's estimators, by name; none where the verdict joins several calls.
    """

    verdict: Verdict
    prompt: PromptForm | None
    scores: Mapping[str, RecordedScore] = field(default_factory=dict[str, RecordedScore])


@dataclass
class Recorder:
    """The drafts of one run, in the order in which they were made; safe to fill from several threads.

    Drafts are scored by `estimators` as well, besides their model's own. With a `question`, only those of its calls are
    recorded; the questions of other routers within it are decided about.
    """

    estimators: Sequence[Estimator] = ()
    question: object = None
    drafts: list[RecordedDraft] = field(default_factory=list[RecordedDraft])
    closed: bool = False
    """Whether its run is over. Tasks that are still running keep its context, and record nothing more."""
    _scores: dict[tuple[Any, ...], Mapping[str, RecordedScore]] = field(
        default_factory=dict[tuple[Any, ...], Mapping[str, RecordedScore]], repr=False
    )
    _lock: Lock = field(default_factory=Lock, repr=False)

    def records(self, question: object) -> bool:
        """Whether it records the calls of a question; None: a call outside any."""
        return self.question is None or self.question is question

    def note(self, verdict: Verdict, scores: Mapping[str, RecordedScore]) -> None:
        """Keep the estimators' scores of an answer until a draft is recorded that is this answer."""
        with self._lock:
            self._scores[_answer(verdict)] = scores

    def add(self, verdict: Verdict, prompt: PromptForm | None) -> None:
        """Record a draft."""
        with self._lock:
            scores = self._scores.get(_answer(verdict), {})
            self.drafts.append(RecordedDraft(verdict, prompt, scores))


def _answer(verdict: Verdict) -> tuple[Any, ...]:
    """The numbers of one answer; frontends may shorten its text, or take calls out of it."""
    details = verdict.details
    return details.prompt, verdict.estimator, verdict.uncertainty, details.scored_tokens, details.gnll


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
