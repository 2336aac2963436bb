"""The flow, once: draft, settle, escalate, settle again, record; as steps for calls and for coroutines.

A frontend (a framework, the command line, a server) gives the drafts and calls the target; the decision about delivery
is made here. The frontend's own objects (messages, responses) travel next to the records as `answer`.

Why: docs/decisions.md#0084
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from semgrad_guard.decision_log.entries import Facts
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.errors import (
    AnswerFailedError,
    AnswerInterruptedError,
    DeadlineExceededError,
    InputError,
    LowConfidenceError,
    SemGradGuardError,
    UpstreamError,
)
from semgrad_guard.guard.decision import (
    Settlement,
    decide,
    escalated,
    says_nothing,
    settle,
    unscored,
    watched_score,
    withheld,
)
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.question import Question, Router, asking, current_recorder
from semgrad_guard.guard.steps import P, Steps, StreamSteps, Work, cancelling, sealed, written
from semgrad_guard.records import METADATA_KEY, PromptForm, SentenceVerdict, Verdict, is_blank

A = TypeVar("A")
"""The frontend's object: a message, a response, or nothing but the text."""

logger = logging.getLogger(METADATA_KEY)
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no record, stream or response can hold


@dataclass(frozen=True)
class Draft(Generic[A]):
    """A scored draft: its undecided verdict, the object that the frontend would deliver, and the form of its prompt.

    `trusted` drafts are delivered whatever their score. `irreplaceable` is the reason why no text can replace this
    answer (it is a structure): where it would be withheld, and no target answers instead, a `LowConfidenceError` goes
    out.
    """

    verdict: Verdict
    answer: A
    prompt: PromptForm | None = None
    trusted: bool = False
    irreplaceable: str = ""


@dataclass(frozen=True)
class Reply(Generic[A]):
    """A target's reply: its own verdict, or its text without a score; and the frontend's object.

    `seconds` are those that it took.
    """

    content: Verdict | str
    answer: A | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Paused:
    """The program around the guard stops here, by this error, and repeats the call later: nothing is decided now."""

    error: Exception


TargetReply = Reply[A] | Paused | Exception
Ask = Callable[[Sequence[int]], Work]
"""The target's work for the drafts of these numbers, which returns a `TargetReply` for each."""


@dataclass(frozen=True)
class Outcome(Generic[A]):
    """The decided answer: `verdict.text` is the delivered text, `answer` the draft's or the target's object. It is None
    for an abstention, or where sentences are left out: the frontend makes that object from the verdict."""

    verdict: Verdict
    answer: A | None


def concluded(
    drafts: Sequence[Draft[A]], terms: Terms, ask: Ask | None, *, question: Question | None = None
) -> Steps[list[Outcome[A] | Exception]]:
    """Settle drafts, have the target answer where that is due, and conclude: an outcome for each, or its error.

    Raises:
        Exception: the target has paused the program around the guard by it.
    """
    settled = [_settled(draft, terms, question) for draft in drafts]
    waiting = [number for number, one in enumerate(settled) if isinstance(one, Settlement) and one.kind == "escalate"]
    replies = dict(zip(waiting, (yield from _replies(ask, waiting)), strict=False))

    def outcomes() -> list[Outcome[A] | Exception]:
        pairs = enumerate(zip(drafts, settled, strict=True))
        return [_outcome(draft, one, terms, replies.get(number)) for number, (draft, one) in pairs]

    return outcomes() if terms.log is None else (yield Work(outcomes))  # a log is written off the event loop


def _settled(draft: Draft[Any], terms: Terms, question: Question | None) -> Settlement | Exception:
    recorder = current_recorder()
    if recorder is not None and recorder.records(question):
        if question is None or not draft.trusted:  # the question's score counts the calls that its gate judges
            recorder.add(draft.verdict, draft.prompt)
        return Settlement("deliver", draft.verdict.revised(enforced=False))
    try:
        verdict = draft.verdict if question is None else question.about(draft.verdict)
        whole = bool(draft.irreplaceable)
        settled = settle(verdict, terms, prompt=draft.prompt, trusted=draft.trusted, whole=whole)
        return settled if question is None else question.note(settled, trusted=draft.trusted)
    except Exception as error:  # noqa: BLE001 - raised in this draft's place, after the others are concluded
        return error


def _outcome(
    draft: Draft[A], settled: Settlement | Exception, terms: Terms, reply: TargetReply[A] | None
) -> Outcome[A] | Exception:
    if isinstance(settled, Exception):
        return settled
    try:
        # Not in `_settled`: an answer that a target has paused is counted once. One unlike those of the calibration
        # tells nothing about drift.
        verdict = settled.verdict
        if terms.monitor is not None and current_recorder() is None and verdict.details.familiar is not False:
            drift = terms.monitor.add(watched_score(verdict)).alarm
            settled = replace(settled, verdict=verdict.revised(drift=drift))
        return _concluded(settled, draft.answer, terms, reply=reply, irreplaceable=draft.irreplaceable)
    except Exception as error:  # noqa: BLE001 - as above
        return error


def _replies(ask: Ask | None, waiting: Sequence[int]) -> Steps[Sequence[TargetReply[Any]]]:
    """The target's replies to these drafts; its error in their place, for `on_error` to decide.

    Raises:
        Exception: the target has paused the program around the guard by it.
    """
    if ask is None or not waiting:
        return ()
    began = time.monotonic()
    try:
        replies: Sequence[TargetReply[Any]] = yield ask(waiting).in_time()
    except Exception as error:  # noqa: BLE001 - see above
        return [error] * len(waiting)
    took = time.monotonic() - began
    replies = [replace(one, seconds=took) if isinstance(one, Reply) else one for one in replies]
    for reply in replies:
        if isinstance(reply, Paused):
            raise reply.error
    return replies


def _concluded(
    settled: Settlement, answer: A, terms: Terms, *, reply: TargetReply[A] | None = None, irreplaceable: str = ""
) -> Outcome[A]:
    """The outcome for one settled draft; `reply` is the target's, where the settlement is to escalate.

    Raises:
        LowConfidenceError: the settlement is to raise, or to withhold an irreplaceable answer.
        Exception: the target's own, where `on_error` is to raise.
    """
    verdict = settled.verdict
    if settled.kind == "deliver":
        outcome = Outcome(verdict, None if verdict.is_part else answer)
        if terms.part is not None:
            outcome = Outcome(*terms.part(verdict, answer, settled.ranges))
        return _recorded(outcome, terms)
    if settled.kind == "escalate":
        why = _rejection(reply, terms)
        if isinstance(reply, Reply) and not why:
            outcome = Outcome(escalated(verdict, reply.content), reply.answer)
            return _recorded(outcome, terms, target_seconds=reply.seconds)
        verdict = verdict.revised(action="abstain", promised=False, reason=why)
    if settled.kind == "raise" or irreplaceable:
        draft = verdict.text if terms.keep_draft else None
        refused = LowConfidenceError(verdict, draft=draft, advice=irreplaceable)
        written: Outcome[Any] = _recorded(Outcome(refused.verdict, None), terms)
        refused.verdict = written.verdict
        raise refused
    return _abstention(verdict, terms)


def _abstention(verdict: Verdict, terms: Terms) -> Outcome[Any]:
    """The outcome with the abstain message. A function of it gets the verdict without the withheld text, unless drafts
    are kept.

    Raises:
        InputError: the function returned something else than a text.
    """
    bare, message = withheld(verdict, text="", action="abstain"), terms.abstain_message
    text = message if isinstance(message, str) else message(terms.shown(bare))
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
        raise InputError(f"abstain_message must return a text, not a {type(text).__name__}")
    return _recorded(Outcome(bare.revised(text=text), None), terms)


def _rejection(reply: TargetReply[Any] | None, terms: Terms) -> str:
    """Why a target's reply is not delivered, or "": it failed, its answer is empty or cannot be sent, or its own policy
    rejects it and its mode only notes that.

    Raises:
        Exception: the target's own, where `on_error` is to raise.
    """
    if isinstance(reply, Exception):
        if terms.on_error == "raise":
            raise reply
        logger.error("the escalation target failed; the answer is withheld", exc_info=sealed(reply))
        return f"the escalation target failed ({type(reply).__name__})"
    if not isinstance(reply, Reply):
        raise InputError("an answer was to be escalated and the target has not replied")
    content = reply.content
    if says_nothing(content) if isinstance(content, Verdict) else is_blank(content):
        return "the escalation target's answer is empty"
    if _SURROGATE.search(content.text if isinstance(content, Verdict) else content):
        return "the escalation target's answer holds a lone surrogate and is no valid Unicode text"
    if isinstance(content, Verdict) and content.action != "answer" and not content.details.enforced:
        return "the escalation target's own guard does not let its answer through"
    return ""


def _recorded(outcome: Outcome[A], terms: Terms, *, target_seconds: float | None = None) -> Outcome[A]:
    """The outcome, its decision logged and notified."""
    if terms.log is not None:
        calibration, facts = terms.policy.calibration, Facts(target_seconds=target_seconds)
        if calibration is not None and calibration.is_about_answers:
            facts = replace(facts, alpha=calibration.alpha, delta=calibration.delta)
        shown = terms.shown(outcome.verdict)  # no log keeps a draft, but an error in one would carry it along
        if outcome.verdict.draft is not None:
            shown = shown.revised(draft=shown.draft or "")  # that something is withheld
        decision_id = terms.log.write(shown, seconds=current_stop().elapsed, facts=facts)
        outcome = replace(outcome, verdict=outcome.verdict.revised(decision_id=decision_id))
    if terms.notify is not None:
        terms.notify(terms.shown(outcome.verdict))
    return outcome


def answers(
    terms: Terms, draft: Work, ask: Ask | None = None, *, count: int = 1, stop: Stop | None = None
) -> Steps[list[Outcome[Any] | Exception]]:
    """Draft, and conclude; `count` answers are due.

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
        return (yield from concluded(drafts, terms, ask))


def answered(
    router: Router, run: Work, read: Callable[[Any], Work], ask: Ask, *, terms: Terms | None = None
) -> Steps[Outcome[Any]]:
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
    terms, failed, text, result = terms or router.terms, "", "", None
    stop = terms.stop()
    with stopping(stop), cancelling(stop):
        with asking(router) as question:
            try:
                result = yield run.in_time()
                text = "" if isinstance(result, Paused) else (yield read(result))
            except Exception as error:
                ours = isinstance(error, SemGradGuardError) and not isinstance(error, UNWRITTEN)
                if question.refused is not None or ours or not terms.replaces_failed:  # ours: a mistake in its use
                    raise
                failed = f"the engine failed ({type(error).__name__})"
            if isinstance(result, Paused) and question.refused is None:
                raise result.error
        recorder = current_recorder()
        if recorder is not None and recorder.records(question):
            return Outcome(unscored(text, reason="it is recorded, and not decided about"), result)
        settled = question.settled(text, failed=failed)
        replies = yield from _replies(ask, [0] if settled.kind == "escalate" else [])
        own = question.terms if question.is_asked else terms
        if settled.kind == "deliver":  # as the engine made it
            return (yield Work(lambda: _recorded(Outcome(settled.verdict, result), own)))
        return (yield Work(lambda: _concluded(settled, result, own, reply=next(iter(replies), None))))


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
    return _abstention(decide(unscored("", reason=reason), terms.policy, can_escalate=False), terms)


# Streams: live where nothing may be withheld; else by sentence, or the outcome alone.


@dataclass(frozen=True)
class SentencePiece:
    """A sentence that is let through while its answer is being written: its text, and the verdict on it."""

    text: str
    sentence: SentenceVerdict


def streamed(
    terms: Terms | None,
    answer: StreamSteps[Any, Draft[Any]],
    ask: Ask | None = None,
    *,
    show: Callable[[Any], Iterable[P]] = lambda step: (step,),
    stop: Stop | None = None,
    question: Question | None = None,
    is_recorded: bool = True,
) -> StreamSteps[P, None]:
    """The pieces of an answer as they come, where nothing may be withheld, and the outcome last.

    Else the sentences that are let through while the answer is being written, and the outcome, which begins with them.
    A call of a `question`, which has such terms, is noted in it. Without terms nothing is decided, and the draft goes
    out; unless it is a helper's, a recorder gets it.

    Raises:
        LowConfidenceError: the question has ended, or this call ends it.
        Exception: whatever drafting raises; the one in the outcome's place.
    """
    if terms is None:
        draft = yield from written(answer, stop or Stop(), show=show)
        if is_recorded and (recorder := current_recorder()) is not None:
            recorder.add(draft.verdict, draft.prompt)
        yield from show(Outcome(draft.verdict, draft.answer))
        return
    stop, left = terms.stop() if stop is None else stop, ""

    def let_through(piece: Any) -> Iterable[P]:
        nonlocal left
        if not isinstance(piece, SentencePiece):
            return ()
        left += piece.text
        return show(piece)

    if question is not None:
        question.require_open()
    try:
        draft = yield from written(answer, stop, show=let_through if terms.withholds else show)
        with stopping(stop), cancelling(stop):
            outcome = one((yield from concluded([draft], terms, ask, question=question)))
    except UNWRITTEN as error:
        if left:
            raise
        outcome = not_written(error, terms)
    if not outcome.verdict.text.startswith(left):
        raise AnswerInterruptedError(
            "the end of the answer does not follow the sentences that were delivered; ask again"
        )
    yield from show(outcome)


class EarlySentences:
    """Hands on the sentences of one answer that these terms let through, as they end.

    `known` is the undecided verdict on those that have ended.
    """

    def __init__(self, terms: Terms, put: Callable[[Any], None]) -> None:
        self._terms, self._put = replace(terms, closing_line=""), put
        self.known: Verdict | None = None
        self._left = 0  # characters that have left

    def add(self, draft: Draft[Any]) -> bool:
        """Decide about those that have ended, scored; whether the model continues to write."""
        self.known = draft.verdict
        settled = settle(draft.verdict, self._terms, prompt=draft.prompt)
        verdict = settled.verdict
        if settled.kind == "deliver":
            for sentence in verdict.sentences:
                if sentence.action == "deliver" and sentence.end > self._left:
                    text, self._left = verdict.text[self._left : sentence.end], sentence.end
                    self._put(SentencePiece(text, sentence))
        return not any(sentence.action == "stop" for sentence in verdict.sentences)
