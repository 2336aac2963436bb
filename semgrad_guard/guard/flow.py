"""The flow, once: draft, settle, escalate, settle again, record; and its drivers for calls and coroutines.

A frontend (a framework, the command line, a server) gives the drafts and calls the target; the decision about delivery
is made here. The frontend's own objects (messages, responses) travel next to the records as `answer`. Streams are in
`streams.py`.

Why: docs/decisions.md#0084
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from semgrad_guard.decision_log.entries import Facts
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.errors import (
    AnswerFailedError,
    DeadlineExceededError,
    InputError,
    LowConfidenceError,
    SemGradGuardError,
    UpstreamError,
)
from semgrad_guard.guard.policy import Terms, decide, settle
from semgrad_guard.guard.question import Question, Router
from semgrad_guard.guard.question import asking as asking_question
from semgrad_guard.guard.sentences import watched_score
from semgrad_guard.guard.timing import Steps, Work, adrive, cancelling, drive, sealed
from semgrad_guard.guard.verdicts import (
    Deliver,
    Escalate,
    Raise,
    Settlement,
    abstained,
    current_recorder,
    escalated,
    rejected,
    says_nothing,
    unscored,
)
from semgrad_guard.records import METADATA_KEY, PromptForm, Verdict

A = TypeVar("A")
"""The frontend's object: a message, a response, or nothing but the text."""

logger = logging.getLogger(METADATA_KEY)
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no record, stream or response can hold


@dataclass(frozen=True)
class Draft(Generic[A]):
    """A scored draft: its undecided verdict, the object that the frontend would deliver, and the form of its prompt.

    `trusted` drafts are delivered whatever their score; `can_escalate` set to False keeps this one from the target (it
    *is* the target's). `irreplaceable` is the reason why no text can replace this answer (it is a structure): where it
    would be withheld, and no target answers instead, a `LowConfidenceError` goes out. `strange` are the reasons known
    to the frontend why the question is unlike those of the calibration. `source` names the call that made it, for
    recorders.
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
    """A draft that must be escalated: its place among the drafts, its verdict, and the object that would go out."""

    index: int
    verdict: Verdict
    answer: A


@dataclass(frozen=True)
class Reply(Generic[A]):
    """A target's reply: its own verdict, or its text without a score; and the frontend's object.

    `seconds` are those that it took.
    """

    content: Verdict | str
    answer: A | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A target's decision to deliver nothing (a person's rejection). `message` None: the guard's own words."""

    reason: str
    message: str | None = None


@dataclass(frozen=True)
class Paused:
    """The program around the guard stops here, by this error, and repeats the call later: nothing is decided now."""

    error: Exception


TargetReply = Reply[A] | Refusal | Paused | Exception


@dataclass(frozen=True)
class Outcome(Generic[A]):
    """The decided answer: `verdict.text` is the delivered text, `answer` the draft's or the target's object. It is None
    for an abstention, or where sentences are left out: the frontend makes that object from the verdict."""

    verdict: Verdict
    answer: A | None


class Pending(Generic[A]):
    """Drafts that have been settled, some of which wait for a target; or errors in drafts' places."""

    def __init__(
        self, drafts: Sequence[Draft[A] | Exception], terms: Terms, *, question: Question | None = None
    ) -> None:
        self._drafts, self._terms, self._question = drafts, terms, question
        self._settled = [self._settle(draft) for draft in drafts]

    @property
    def waiting(self) -> list[Waiting[A]]:
        """The drafts that must be escalated."""
        return [
            Waiting(index, settled.verdict, draft.answer)
            for index, (draft, settled) in enumerate(zip(self._drafts, self._settled, strict=True))
            if isinstance(settled, Escalate) and isinstance(draft, Draft)
        ]

    def outcomes(self, replies: Sequence[TargetReply[A]] = ()) -> list[Outcome[A] | Exception]:
        """The outcomes in the drafts' order; an error in the place of one that must be raised."""
        waiting = iter(replies)
        return [
            self._outcome(draft, settled, next(waiting, None) if isinstance(settled, Escalate) else None)
            for draft, settled in zip(self._drafts, self._settled, strict=True)
        ]

    def concluded(self, ask: AskWork[A]) -> Steps[list[Outcome[A] | Exception]]:
        """The outcomes, after the target's replies; where decisions are logged, off the event loop.

        Raises:
            Exception: the target has paused the program around the guard by it.
        """
        replies = yield from _replies(ask, self.waiting)
        if self._terms.log is None:
            return self.outcomes(replies)
        return (yield Work(lambda: self.outcomes(replies)))

    def _settle(self, draft: Draft[A] | Exception) -> Settlement | Exception:
        if isinstance(draft, Exception):
            return draft
        recorder, terms, question = current_recorder(), self._terms, self._question
        if recorder is not None and recorder.records(question):
            if question is None or not draft.trusted:  # the question's score counts the calls that its gate judges
                recorder.add(draft.verdict, draft.prompt, source=draft.source)
            return Deliver(draft.verdict.revised(enforced=False))
        try:
            settled = settle(
                draft.verdict if question is None else question.about(draft.verdict),
                terms.policy,
                terms.mode,
                can_escalate=terms.can_escalate and draft.can_escalate,
                prompt=draft.prompt,
                trusted=draft.trusted,
                strange=draft.strange,
                whole=bool(draft.irreplaceable),
                closing_line=terms.closing_line,
            )
            return settled if question is None else question.note(settled, trusted=draft.trusted)
        except Exception as error:  # noqa: BLE001 - raised in this draft's place, after the others are settled
            return error

    def _outcome(
        self, draft: Draft[A] | Exception, settled: Settlement | Exception, reply: TargetReply[A] | None
    ) -> Outcome[A] | Exception:
        try:
            if isinstance(settled, UNWRITTEN):
                return not_written(settled, self._terms)
            if isinstance(settled, Exception) or isinstance(draft, Exception):
                return cast("Exception", settled)
            # Not in `_settle`: an answer that a target has paused is counted once.
            if current_recorder() is None:
                settled = _watched(settled, self._terms)
            return conclude(settled, draft.answer, self._terms, reply=reply, irreplaceable=draft.irreplaceable)
        except Exception as error:  # noqa: BLE001 - as above
            return error


def _replies(ask: AskWork[A], waiting: Sequence[Waiting[A]]) -> Steps[Sequence[TargetReply[A]]]:
    """The target's replies to these drafts; its error in their place, for `on_error` to decide.

    Raises:
        Exception: the target has paused the program around the guard by it.
    """
    replies: Sequence[TargetReply[A]] = ()
    if waiting:
        try:
            began = time.monotonic()
            replies = yield ask(waiting).in_time()
            took = time.monotonic() - began
            replies = [replace(one, seconds=took) if isinstance(one, Reply) else one for one in replies]
        except Exception as error:  # noqa: BLE001 - see above
            replies = [error] * len(waiting)
    for reply in replies:
        if isinstance(reply, Paused):
            raise reply.error
    return replies


def _watched(settled: Settlement, terms: Terms) -> Settlement:
    """The settlement after drift was looked for. An answer unlike those of the calibration tells nothing about it."""
    verdict = settled.verdict
    if terms.monitor is None or verdict.details.familiar is False:
        return settled
    drift = terms.monitor.add(watched_score(verdict)).alarm
    return replace(settled, verdict=verdict.revised(drift=drift))


def conclude(
    settled: Settlement, answer: A, terms: Terms, *, reply: TargetReply[A] | None = None, irreplaceable: str = ""
) -> Outcome[A]:
    """The outcome for one settled draft; `reply` is the target's, where the settlement is to escalate.

    Raises:
        LowConfidenceError: the settlement is to raise, or to withhold an irreplaceable answer.
        Exception: the target's own, where `on_error` is to raise.
    """
    if isinstance(settled, Deliver):
        return _delivered(settled, answer, terms)
    if isinstance(settled, Raise):
        raise _refused(settled.verdict, terms)
    withheld, message = settled.verdict, None
    if isinstance(settled, Escalate):
        if isinstance(reply, Reply) and not _is_rejected(reply.content):
            outcome = Outcome(escalated(settled.verdict, reply.content), reply.answer)
            return _recorded(outcome, terms, target_seconds=reply.seconds)
        reason, message = _rejection(reply, terms)
        withheld = rejected(settled.verdict, reason)
    if irreplaceable:
        raise _refused(withheld, terms, advice=irreplaceable)
    words = terms.words(withheld) if message is None else message
    return _recorded(Outcome(abstained(withheld, words), None), terms)


def _delivered(settled: Deliver, answer: A, terms: Terms) -> Outcome[A]:
    """The outcome for a draft that goes out, or a part of it."""
    verdict, left = settled.verdict, answer
    if verdict.is_part:
        if terms.part is None:
            return _recorded(Outcome(verdict, None), terms)
        left = terms.part(verdict, answer, settled.ranges)
    if terms.trim is not None:
        verdict, left = terms.trim(verdict, left)
    return _recorded(Outcome(verdict, left), terms)


def _is_rejected(content: Verdict | str) -> str:
    """Why a target's reply is not delivered: it is empty, cannot be sent, or its own policy rejects it and its mode
    only notes that."""
    if says_nothing(content) if isinstance(content, Verdict) else not content.strip():
        return "the escalation target's answer is empty"
    if _SURROGATE.search(content.text if isinstance(content, Verdict) else content):
        return "the escalation target's answer holds a lone surrogate and is no valid Unicode text"
    if isinstance(content, Verdict) and content.action != "answer" and not content.details.enforced:
        return "the escalation target's own guard does not let its answer through"
    return ""


def _rejection(reply: TargetReply[A] | None, terms: Terms) -> tuple[str, str | None]:
    """Why a target delivers nothing, and the target's words for it if it has some.

    Raises:
        Exception: the target's own, where `on_error` is to raise.
    """
    if isinstance(reply, Refusal):
        return reply.reason, reply.message
    if isinstance(reply, Reply):
        return _is_rejected(reply.content), None
    if not isinstance(reply, Exception):
        raise InputError("an answer was to be escalated and the target has not replied")
    if terms.on_error == "raise":
        raise reply
    logger.error("the escalation target failed; the answer is withheld", exc_info=reply)
    return f"the escalation target failed ({type(reply).__name__})", None


def _refused(verdict: Verdict, terms: Terms, *, advice: str = "") -> LowConfidenceError:
    refused = LowConfidenceError(verdict, draft=verdict.text if terms.keep_draft else None, advice=advice)
    written: Outcome[Any] = _recorded(Outcome(refused.verdict, None), terms)
    refused.verdict = written.verdict
    return refused


def _recorded(outcome: Outcome[A], terms: Terms, *, target_seconds: float | None = None) -> Outcome[A]:
    """The outcome, its decision logged and notified."""
    if terms.log is not None:
        calibration, facts = terms.policy.calibration, Facts(target_seconds=target_seconds)
        if calibration is not None and calibration.is_about_answers:
            facts = replace(facts, alpha=calibration.alpha, delta=calibration.delta)
        decision_id = terms.log.write(outcome.verdict, seconds=current_stop().elapsed, facts=facts)
        outcome = replace(outcome, verdict=outcome.verdict.revised(decision_id=decision_id))
    if terms.notify is not None:
        terms.notify(terms.shown(outcome.verdict))
    return outcome


# Drivers: the same steps for calls and for coroutines.

Ask = Callable[[Sequence[Waiting[A]]], Sequence[TargetReply[A]]]
AsyncAsk = Callable[[Sequence[Waiting[A]]], Awaitable[Sequence[TargetReply[A]]]]
AskWork = Callable[[Sequence[Waiting[A]]], Work]
"""The work of the target on these drafts, which returns a `TargetReply` for each."""


def answers(
    terms: Terms, draft: Work, ask: AskWork[A], *, count: int = 1, stop: Stop | None = None
) -> Steps[list[Outcome[A] | Exception]]:
    """Draft, settle, escalate where that is due, and conclude; `count` answers are due.

    `stop` is the deadline, where it has begun before (`terms.stop()`). A cancelled task stops the model.

    Raises:
        Exception: whatever drafting raises.
    """
    stop = terms.stop() if stop is None else stop
    with stopping(stop), cancelling(stop):
        try:
            drafts = yield draft
        except UNWRITTEN as error:
            return [not_written(error, terms) for _ in range(count)]
        return (yield from Pending[A](drafts, terms).concluded(ask))


def answered(
    router: Router, run: Work, read: Callable[[A], Work], ask: AskWork[A], *, terms: Terms | None = None
) -> Steps[Outcome[A]]:
    """One question: run, and decided about by its most doubtful call, or ended by the first that was refused.

    Args:
        router: that of the models whose calls count.
        run: the chain's or the engine's work; its result goes out where the question is let through. A `Paused` result
            is raised: the program around repeats the question later.
        read: finds the text of a result; a stream is read to its end.
        ask: the target's work, as for whole answers.
        terms: where others than the router's carry the decision out.

    Raises:
        LowConfidenceError: the mode is to raise; or the question is part of another one, which ends.
        Exception: the engine's own, where `on_error` is to raise; the target's.
    """
    terms = replace(terms or router.terms, part=_as_the_engine_made_it)
    failed, text, result = "", "", None
    stop = terms.stop()
    with stopping(stop), cancelling(stop):
        with asking_question(router) as question:
            try:
                result = yield run.in_time()
                text = "" if isinstance(result, Paused) else (yield read(result))
            except Exception as error:
                if question.refused is not None or not _stands_in(terms, error):
                    raise
                failed = f"the engine failed ({type(error).__name__})"
            if isinstance(result, Paused):
                raise result.error
        recorder = current_recorder()
        if recorder is not None and recorder.records(question):
            return Outcome(unscored(text, reason="it is recorded, and not decided about"), result)
        settled, replies = question.settled(text, failed=failed), list[TargetReply[A]]()
        if isinstance(settled, Escalate):
            replies += yield from _replies(ask, [Waiting(0, settled.verdict, cast("A", result))])
        own = replace(question.terms, part=terms.part) if question.is_asked else terms
        return (yield Work(lambda: conclude(settled, cast("A", result), own, reply=next(iter(replies), None))))


def _as_the_engine_made_it(_verdict: Verdict, answer: A, _ranges: Any) -> A:
    return answer


def _stands_in(terms: Terms, error: Exception) -> bool:
    """Whether an abstention stands in for an engine that failed; never for a mistake in how the guard is used."""
    return terms.replaces_failed and (isinstance(error, UNWRITTEN) or not isinstance(error, SemGradGuardError))


def run(
    terms: Terms,
    draft: Callable[[], Sequence[Draft[A] | Exception]],
    ask: Ask[A] | None = None,
    *,
    count: int = 1,
) -> list[Outcome[A] | Exception]:
    """The outcomes of `answers`, by calls."""
    return drive(answers(terms, Work(draft), asking(ask), count=count))


async def arun(
    terms: Terms,
    draft: Callable[[], Awaitable[Sequence[Draft[A] | Exception]]],
    ask: AsyncAsk[A] | None = None,
    *,
    count: int = 1,
    stop: Stop | None = None,
) -> list[Outcome[A] | Exception]:
    """The outcomes of `answers`, by coroutines."""
    return await adrive(answers(terms, Work.awaited(draft), aasking(ask), count=count, stop=stop))


def asking(ask: Ask[A] | None) -> AskWork[A]:
    """A call of the target as work; None where there is no target, and so no draft that waits for it."""
    return lambda waiting: Work(lambda: () if ask is None else ask(waiting))


def aasking(ask: AsyncAsk[A] | None) -> AskWork[A]:
    """A coroutine of the target as work, as `asking`."""
    if ask is None:
        return asking(None)
    return lambda waiting: Work.awaited(lambda: ask(waiting))


def one(outcomes: Sequence[Outcome[A] | Exception]) -> Outcome[A]:
    """The only outcome.

    Raises:
        Exception: the one in its place.
    """
    (outcome,) = outcomes
    if isinstance(outcome, Exception):
        raise sealed(outcome)
    return outcome


UNWRITTEN = (AnswerFailedError, DeadlineExceededError, UpstreamError)
"""Why a draft is missing: its author failed, or did not meet the deadline."""


def not_written(error: AnswerFailedError | DeadlineExceededError | UpstreamError, terms: Terms) -> Outcome[Any]:
    """The abstention that goes out where there is no draft.

    Raises:
        AnswerFailedError, DeadlineExceededError, UpstreamError: `on_error` is to raise, or the mode puts nothing in an
            answer's place.
    """
    if not terms.replaces_failed:
        raise error
    reason = error.reason if isinstance(error, AnswerFailedError) else str(error)
    verdict = decide(unscored("", reason=reason), terms.policy, can_escalate=False)
    abstention: Outcome[Any] = Outcome(abstained(verdict, terms.words(verdict)), None)
    return _recorded(abstention, terms)
