"""The flow, once: draft, settle, ask the target, settle again, record; and its drivers for calls and coroutines.

A frontend (a framework, the command line, a server) says how the model is asked and how the target is asked; what is
delivered is said here. Its own objects (messages, responses) travel beside the records as `answer`. Streams are in
`streams.py`.

Why: docs/adr/0084-one-flow.md
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.calibration.prompt_shape import PromptForm
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.errors import AnswerFailedError, DeadlineExceededError, InputError, LowConfidenceError, UpstreamError
from semgrad_guard.guard.modes import Mode, withholds
from semgrad_guard.guard.policy import Policy
from semgrad_guard.guard.recorder import current_recorder
from semgrad_guard.guard.terms import Terms
from semgrad_guard.guard.timing import ain_time, cancelling, in_time, off_loop
from semgrad_guard.guard.verdicts import (
    abstained,
    decide,
    escalated,
    handed_on,
    is_withheld,
    late,
    rejected,
    says_nothing,
    without_text,
)
from semgrad_guard.records import METADATA_KEY, Verdict

A = TypeVar("A")
"""What a frontend delivers: a message, a response, or nothing beside the text."""

logger = logging.getLogger(METADATA_KEY)


@dataclass(frozen=True)
class Draft(Generic[A]):
    """A scored draft: its undecided verdict, what the frontend would deliver, and what its prompt looked like.

    `trusted` drafts are delivered whatever their score; `can_escalate` set to False holds this one back from the
    target (it *is* the target's). `irreplaceable` says why no text can stand in this answer's place (it is a
    structure): where it would be withheld, and no target answers instead, a `LowConfidenceError` goes out. `strange`
    says in what the question is none of those that the policy was calibrated on, as far as the frontend knows. `source`
    names the call that made it, for whoever records.
    """

    verdict: Verdict
    answer: A
    prompt: PromptForm | None = None
    trusted: bool = False
    can_escalate: bool = True
    irreplaceable: str = ""
    strange: tuple[str, ...] = ()
    source: str | None = None


@dataclass(frozen=True)
class Waiting(Generic[A]):
    """A draft that a target must be asked about: its place among the drafts, its verdict, and what would go out."""

    index: int
    verdict: Verdict
    answer: A


@dataclass(frozen=True)
class Reply(Generic[A]):
    """What a target said: its own verdict, or its text where it is not scored; and what the frontend would deliver."""

    said: Verdict | str
    answer: A | None = None


@dataclass(frozen=True)
class Refusal:
    """A target's decision to deliver nothing (a person's rejection). `message` None: the guard's own words."""

    reason: str
    message: str | None = None


@dataclass(frozen=True)
class HandedOn:
    """Somebody else answers, later and under their own guard: nothing is delivered in this draft's place now."""


Said = Reply[A] | Refusal | HandedOn | Exception


@dataclass(frozen=True)
class Outcome(Generic[A]):
    """What goes out. `verdict.text` is the delivered text; `answer` the draft's or the target's object, None where an
    abstention stands in its place, which the frontend words from the verdict."""

    verdict: Verdict
    answer: A | None


@dataclass(frozen=True)
class Deliver:
    """The draft goes out. Where the mode does not withhold, its verdict is advice (`enforced` is False)."""

    verdict: Verdict


@dataclass(frozen=True)
class Escalate:
    """The target is asked; nothing of the draft goes out."""

    verdict: Verdict


@dataclass(frozen=True)
class Abstain:
    """The abstain message goes out in the draft's place."""

    verdict: Verdict


@dataclass(frozen=True)
class Raise:
    """A `LowConfidenceError` goes out in the draft's place."""

    verdict: Verdict


Settlement = Deliver | Escalate | Abstain | Raise


def settle(
    draft: Verdict,
    policy: Policy,
    mode: Mode,
    *,
    can_escalate: bool,
    prompt: PromptForm | None = None,
    trusted: bool = False,
    strange: tuple[str, ...] = (),
) -> Settlement:
    """What becomes of a draft. Pure: records in, a record out.

    Args:
        draft: the scored draft, undecided; its `text` is the answer.
        policy: what to let through.
        mode: what to do with the decision.
        can_escalate: whether there is a target to ask.
        prompt: what the prompt looked like; without it nothing is promised.
        trusted: what the draft does may go out whatever its score (an agent's calls of harmless tools): the decision
            about that is advice. Text that stands beside it is let through only by its score.
        strange: why the question is unlike those of the calibration, beside what its prompt shows.

    Raises:
        BindingMismatchError: the policy was calibrated for another model, estimator, setting or template.
        UnfamiliarPromptError: the prompt is unlike those calibrated on, and the policy is to raise.
    """
    if is_withheld(draft):  # by another guard: there is no answer left to judge
        return Deliver(draft)
    if not withholds(mode) and policy.on_unfamiliar == "raise":
        policy = replace(policy, on_unfamiliar="abstain")  # advice is given, not raised
    verdict = decide(draft, policy, can_escalate=can_escalate, prompt=prompt, strange=strange)
    if not withholds(mode):
        return Deliver(verdict.model_copy(update={"enforced": False}))
    if trusted and verdict.action != "answer":
        return Deliver(without_text(verdict))
    if verdict.action == "answer":
        return Deliver(verdict)
    if mode == "raise":
        return Raise(verdict)
    return Escalate(verdict) if verdict.action == "escalate" else Abstain(verdict)


class Pending(Generic[A]):
    """Drafts that have been settled, some of which wait for a target; or the errors that stand in drafts' places."""

    def __init__(self, drafts: Sequence[Draft[A] | Exception], terms: Terms) -> None:
        self._drafts, self._terms = drafts, terms
        self._settled = [self._settle(draft) for draft in drafts]

    @property
    def waiting(self) -> list[Waiting[A]]:
        """The drafts whose target must be asked."""
        return [
            Waiting(index, settled.verdict, draft.answer)
            for index, (draft, settled) in enumerate(zip(self._drafts, self._settled, strict=True))
            if isinstance(settled, Escalate) and isinstance(draft, Draft)
        ]

    def outcomes(self, replies: Sequence[Said[A]] = ()) -> list[Outcome[A] | Exception]:
        """What goes out, in the drafts' order; an error in the place of what must be raised."""
        waiting = iter(replies)
        return [
            self._outcome(draft, settled, next(waiting) if isinstance(settled, Escalate) else None)
            for draft, settled in zip(self._drafts, self._settled, strict=True)
        ]

    async def aoutcomes(self, replies: Sequence[Said[A]] = ()) -> list[Outcome[A] | Exception]:
        """Like `outcomes`, on the event loop: writing decisions down waits for a disk."""
        return self.outcomes(replies) if self._terms.log is None else await off_loop(lambda: self.outcomes(replies))

    def _settle(self, draft: Draft[A] | Exception) -> Settlement | Exception:
        if isinstance(draft, Exception):
            return draft
        recorder, terms = current_recorder(), self._terms
        if recorder is not None:
            recorder.add(draft.verdict, draft.prompt, source=draft.source)
            return Deliver(draft.verdict.model_copy(update={"enforced": False}))
        try:
            settled = settle(
                draft.verdict,
                terms.policy,
                terms.mode,
                can_escalate=terms.can_escalate and draft.can_escalate,
                prompt=draft.prompt,
                trusted=draft.trusted,
                strange=draft.strange,
            )
        except Exception as error:  # noqa: BLE001 - raised in this draft's place, once the others have had their turn
            return error
        return watched(settled, terms.monitor)

    def _outcome(
        self, draft: Draft[A] | Exception, settled: Settlement | Exception, said: Said[A] | None
    ) -> Outcome[A] | Exception:
        try:
            if isinstance(settled, UNWRITTEN):
                return not_written(settled, self._terms)
            if isinstance(settled, Exception) or isinstance(draft, Exception):
                return cast("Exception", settled)
            return conclude(settled, draft.answer, self._terms, said=said, irreplaceable=draft.irreplaceable)
        except Exception as error:  # noqa: BLE001 - as above
            return error


def watched(settled: Settlement, monitor: DriftMonitor | None) -> Settlement:
    """The settlement with what the monitor says after this score."""
    if monitor is None:
        return settled
    moved = monitor.add(settled.verdict.uncertainty).alarm
    return type(settled)(settled.verdict.model_copy(update={"drift": moved}))


def conclude(
    settled: Settlement, answer: A, terms: Terms, *, said: Said[A] | None = None, irreplaceable: str = ""
) -> Outcome[A]:
    """What goes out for one settled draft; `said` is the target's, where the settlement is to escalate.

    Raises:
        LowConfidenceError: the settlement is to raise, or to withhold what is irreplaceable.
        Exception: the target's own, where `on_error` is to raise.
    """
    if isinstance(settled, Deliver):
        verdict, left = (settled.verdict, answer) if terms.trim is None else terms.trim(settled.verdict, answer)
        return _told(Outcome(verdict, left), terms)
    if isinstance(settled, Raise):
        raise _refused(settled.verdict, terms)
    withheld, message = settled.verdict, None
    if isinstance(settled, Escalate):
        if isinstance(said, Reply) and not _annotated(said.said) and not _is_empty(said.said):
            return _told(Outcome(escalated(settled.verdict, said.said), said.answer), terms)
        if isinstance(said, HandedOn):
            return Outcome(handed_on(settled.verdict), None)
        withheld, message = _rejection(settled.verdict, said, terms)
    if irreplaceable:
        raise _refused(withheld, terms, advice=irreplaceable)
    words = terms.words(withheld) if message is None else message
    return _told(Outcome(abstained(withheld, words), None), terms)


def _annotated(said: Verdict | str) -> bool:
    """Whether a target delivered what its own policy rejects, because its mode only writes that down."""
    return isinstance(said, Verdict) and said.action != "answer" and not said.enforced


def _is_empty(said: Verdict | str) -> bool:
    return says_nothing(said) if isinstance(said, Verdict) else not said.strip()


def _rejection(verdict: Verdict, said: Said[A] | None, terms: Terms) -> tuple[Verdict, str | None]:
    """The verdict on an answer whose target delivers nothing, and the target's words for it if it has some.

    Raises:
        Exception: the target's own, where `on_error` is to raise.
    """
    if isinstance(said, Refusal):
        return rejected(verdict, said.reason), said.message
    if isinstance(said, Reply) and _is_empty(said.said):
        return rejected(verdict, "the escalation target's answer is empty"), None
    if isinstance(said, Reply):
        return rejected(verdict, "the escalation target's own guard does not let its answer through"), None
    if not isinstance(said, Exception):
        raise InputError("an answer was to be escalated and no target has said anything")
    if terms.on_error == "raise":
        raise said
    logger.error("the escalation target failed; the answer is withheld", exc_info=said)
    return rejected(verdict, f"the escalation target failed ({type(said).__name__})"), None


def _refused(verdict: Verdict, terms: Terms, *, advice: str = "") -> LowConfidenceError:
    refused = LowConfidenceError(verdict, draft=verdict.text if terms.keep_draft else None, advice=advice)
    refused.verdict = _recorded(refused.verdict, terms)
    return refused


def _told(outcome: Outcome[A], terms: Terms) -> Outcome[A]:
    verdict = _recorded(outcome.verdict, terms)
    return outcome if verdict is outcome.verdict else replace(outcome, verdict=verdict)


def _recorded(verdict: Verdict, terms: Terms) -> Verdict:
    """The verdict, written down and told to whoever wants to hear it."""
    if terms.log is not None:
        taken = current_stop().elapsed
        verdict = verdict.model_copy(update={"decision_id": terms.log.write(verdict, seconds=taken)})
    if terms.notify is not None:
        terms.notify(verdict)
    return verdict


# Drivers: the same steps for calls and for coroutines.

Ask = Callable[[Sequence[Waiting[A]]], Sequence[Said[A]]]
AsyncAsk = Callable[[Sequence[Waiting[A]]], Awaitable[Sequence[Said[A]]]]


def run(
    terms: Terms,
    draft: Callable[[], Sequence[Draft[A] | Exception]],
    ask: Ask[A],
    *,
    count: int = 1,
    stop: Stop | None = None,
) -> list[Outcome[A] | Exception]:
    """Draft, settle, ask the target about what must be escalated, and conclude; `count` answers are due.

    `stop` is the deadline, where it has begun before (`terms.stop()`).

    Raises:
        Exception: whatever drafting raises.
    """
    stop = terms.stop() if stop is None else stop
    with stopping(stop):
        try:
            pending = Pending(draft(), terms)
        except UNWRITTEN as error:
            return [not_written(error, terms) for _ in range(count)]
        return finished(pending, ask)


async def arun(
    terms: Terms,
    draft: Callable[[], Awaitable[Sequence[Draft[A] | Exception]]],
    ask: AsyncAsk[A],
    *,
    count: int = 1,
    stop: Stop | None = None,
) -> list[Outcome[A] | Exception]:
    """Like `run`, without blocking the event loop; a cancelled task stops the model."""
    stop = terms.stop() if stop is None else stop
    with stopping(stop), cancelling(stop):
        try:
            pending = Pending(await draft(), terms)
        except UNWRITTEN as error:
            return [not_written(error, terms) for _ in range(count)]
        return await afinished(pending, ask)


def one(outcomes: Sequence[Outcome[A] | Exception]) -> Outcome[A]:
    """The only outcome.

    Raises:
        Exception: the one that stands in its place.
    """
    (outcome,) = outcomes
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def finished(pending: Pending[A], ask: Ask[A]) -> list[Outcome[A] | Exception]:
    waiting = pending.waiting
    if not waiting:
        return pending.outcomes()
    try:
        return pending.outcomes(in_time(lambda: ask(waiting)))
    except Exception as error:  # noqa: BLE001 - the target's; `on_error` decides
        return pending.outcomes([error] * len(waiting))


async def afinished(pending: Pending[A], ask: AsyncAsk[A]) -> list[Outcome[A] | Exception]:
    waiting = pending.waiting
    if not waiting:
        return await pending.aoutcomes()
    try:
        replies = await ain_time(ask(waiting))
    except Exception as error:  # noqa: BLE001 - as above
        replies = [error] * len(waiting)
    return await pending.aoutcomes(replies)


UNWRITTEN = (AnswerFailedError, DeadlineExceededError, UpstreamError)
"""Why there is no draft: who was to write it failed, or did not meet the deadline."""


def not_written(error: AnswerFailedError | DeadlineExceededError | UpstreamError, terms: Terms) -> Outcome[Any]:
    """What goes out where there is no draft.

    Raises:
        AnswerFailedError, DeadlineExceededError, UpstreamError: `on_error` is to raise, or the mode puts nothing in an
            answer's place.
    """
    if terms.on_error == "raise" or terms.mode != "enforce":
        raise error
    verdict = late(terms.policy, error.reason if isinstance(error, AnswerFailedError) else str(error))
    withheld: Outcome[Any] = Outcome(abstained(verdict, terms.words(verdict)), None)
    return _told(withheld, terms)
