"""Routers, and questions: the scope in which the first refused call of a model ends all.

A front's `guarded(...)`, or `asking(router)` in own code, opens a question. Each guarded call in it notes its verdict.
A refused call ends the question; every later call ends at once. So a gate stops a run and never alters it: a question
is delivered if and only if the greatest score of its guarded calls is at most the threshold, and on the run without a
gate a calibration computes this very number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.calibration.binding import QUESTIONS
from semgrad_guard.decision_log.entries import DecisionSink
from semgrad_guard.declared import names_in, require_known
from semgrad_guard.errors import InputError, LowConfidenceError, UnenforcedPolicyError
from semgrad_guard.guard.decision import Settlement, decide, doubt_of, unscored, withheld
from semgrad_guard.guard.policy import AbstainMessage, Policy, Terms, require_policy, require_sequel
from semgrad_guard.records import PromptForm, Score, ToolCall, Verdict, digest_of
from semgrad_guard.settings import KeepDraft, Mode, OnError, OnUnscored, Timeout

if TYPE_CHECKING:
    from semgrad_guard.estimators import Estimator

_GOES_ON = "a part of an answer was delivered, and the question continued"


class RouterOptions(TypedDict, total=False):
    """How a router carries decisions out; as in `Terms`."""

    mode: Mode
    abstain_message: AbstainMessage
    on_error: OnError
    timeout: Timeout
    keep_draft: KeepDraft
    monitor: DriftMonitor | None
    notify: Callable[[Verdict], None] | None
    log: DecisionSink | None
    closing_line: str


class Router:
    """The rules by which models decide about their answers, and the target for those that are not let through.

    One router may serve many models; its copies, pickled ones too, are equal to it and decide as one.

    Args:
        policy: which scores to let through.
        escalate_to: answers what is not let through; without it the abstain message goes out.
        on_unscored: the action for an answer without a score, where it is not the policy's.
        trusted_tools: tools whose calls need no score: a message that calls no other keeps its calls, not its text.
        **options: `mode`, `abstain_message`, `on_error`, `timeout`, `keep_draft`, `monitor`, `notify`, `log` and
            `closing_line`, as in `Terms`.

    Raises:
        InputError: an argument is not as described; or a monitor is to watch whole questions, whose scores are not
            known where they end early.
        BindingMismatchError: the target is a guarded model whose calibration does not follow this one's.
    """

    def __init__(
        self,
        policy: Policy,
        escalate_to: Any = None,
        *,
        on_unscored: OnUnscored | None = None,
        trusted_tools: Collection[str] = (),
        **options: Unpack[RouterOptions],
    ) -> None:
        policy = require_policy(policy)
        require_known(type(self).__name__, options, RouterOptions.__annotations__)
        if escalate_to is not None:
            self._require_target(escalate_to)
        if on_unscored is not None:
            policy = replace(policy, on_unscored=on_unscored)
        self.terms = Terms(policy=policy, can_escalate=escalate_to is not None, **options)
        if policy.is_about_questions and self.terms.monitor is not None:
            raise InputError(
                "a question that is refused ends early, so that its score is not known, and a monitor would compare "
                "other numbers than those of the calibration: leave monitor out"
            )
        self.escalate_to: Any = escalate_to
        self.trusted_tools = names_in(trusted_tools, "trusted_tools")
        self._key = uuid4().hex
        following = getattr(getattr(escalate_to, "router", escalate_to), "policy", None)  # that of a guarded target
        if isinstance(following, Policy):
            require_sequel(policy, following)

    @classmethod
    def _require_target(cls, target: Any) -> None:
        """Refuse what is no target of this front, by an `InputError`."""

    @classmethod
    def read(cls, given: Any) -> Self | Literal[False] | None:
        """The router of a model: one of this class; False for a helper, whose texts need no guard; or None.

        Raises:
            InputError: it is something else.
        """
        if given is None or given is False or isinstance(given, cls):
            return given
        raise InputError(f"router is {cls.__name__}(policy, ...), or False for a helper, not {given!r:.60}")

    @classmethod
    def require(cls, given: Any) -> Self:
        """The router itself; callers may have no type checker.

        Raises:
            InputError: it is something else.
        """
        if not isinstance(given, cls):
            raise InputError(f"router is {cls.__name__}(policy, ...), not {given!r:.60}")
        return given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Router) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of its holders share its log and its monitor."""
        return self

    @property
    def policy(self) -> Policy:
        """Which scores are let through."""
        return self.terms.policy

    def trusts(self, calls: Collection[ToolCall]) -> bool:
        """Whether there are calls, of trusted tools alone."""
        return bool(calls) and {call.name for call in calls} <= self.trusted_tools


# A target may hold the guarded model itself: there the model's router still decides, but hands on no further.

_escalating: ContextVar[frozenset[Router]] = ContextVar("semgrad_guard_escalating", default=frozenset())


@contextmanager
def escalating(router: Router) -> Generator[None]:
    """The time during which a router's target answers."""
    token = _escalating.set(_escalating.get() | {router})
    try:
        yield
    finally:
        _escalating.reset(token)


def is_escalating(router: Router) -> bool:
    """Whether this happens inside the router's own escalation."""
    return router in _escalating.get()


@dataclass(eq=False)
class Question:
    """The verdicts on the guarded calls of one question, and the one that ended it.

    No verdict holds a withheld text, unless drafts are kept.

    Safe to share between the threads and tasks of the question.
    """

    router: Router
    around: Question | None = None
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    refused: Verdict | None = None
    _is_over: bool = False

    @property
    def terms(self) -> Terms:
        """How its calls are decided about. The target, the log and `notify` get the question, once."""
        return replace(self.router.terms, on_error="raise", log=None, notify=None)

    @property
    def is_asked(self) -> bool:
        """Whether it, or a question within it, is being asked here."""
        innermost = _question.get()
        return innermost is not None and innermost.outward(self.router) is self

    def outward(self, router: object) -> Question | None:
        """This question, or the nearest around it, that has this router."""
        question: Question | None = self
        while question is not None and question.router != router:
            question = question.around
        return question

    def about(self, verdict: Verdict) -> Verdict:
        """The undecided verdict on a call, as a part of this question: bound as the policy's calibration is."""
        if not self.router.policy.is_about_questions:
            return verdict
        return verdict.revised(settings=QUESTIONS.among(verdict.details.settings))

    def require_open(self) -> None:
        """Return if another call may begin.

        Raises:
            LowConfidenceError: the question has ended.
        """
        if self._is_over:
            raise LowConfidenceError(self._ended(), draft=None)

    def note(self, settled: Settlement, *, trusted: bool = False) -> Settlement:
        """The settlement of a call: its own where it is let through, else an error.

        A part of an answer may only be delivered last: a call after it ends the question.
        """
        if self._is_over:
            return Settlement("raise", self._ended())
        shown = self.router.terms.shown
        if settled.kind == "deliver":
            if not trusted:
                self.verdicts.append(shown(settled.verdict))
            self._is_over = settled.verdict.is_part
            return settled
        self.refused = shown(withheld(settled.verdict, text="", promised=False))
        self.verdicts.append(self.refused)
        self._is_over = True
        return Settlement("raise", settled.verdict)

    def settled(self, text: str, *, failed: str = "") -> Settlement:
        """What happens to the question as a whole: `text` is its result, `failed` why there is none."""
        terms, verdict = self.router.terms, self.refused
        if verdict is None and (failed or not self.verdicts):
            draft = unscored("" if failed else text, reason=failed or "no guarded model has answered")
            verdict = decide(draft, terms.policy, can_escalate=terms.can_escalate and not failed)
            if not terms.withholds or verdict.action == "answer":
                return Settlement("deliver", verdict.revised(enforced=terms.withholds))
        if verdict is None:
            return Settlement("deliver", self._worst(text))
        if terms.raises:
            return Settlement("raise", verdict)
        return Settlement("escalate" if verdict.action == "escalate" else "abstain", verdict)

    def _worst(self, text: str) -> Verdict:
        """The verdict on its most doubtful call, about this text.

        A calibration of questions promises whatever the engine made of its calls, which is what was graded. One of
        answers promises a model's own text alone.
        """
        worst = max(self.verdicts, key=doubt_of)
        own = digest_of(worst.text) == digest_of(text)
        changes: dict[str, Any] = {"text": text}
        if not own:
            changes |= {"tool_calls": (), "reasoning": None, "sentences": (), "draft": None}
        if self.router.policy.is_about_questions:
            changes["promised"] = all(one.promised for one in self.verdicts)
        else:
            changes["promised"] = worst.promised and own and len(self.verdicts) == 1
        return worst.revised(**changes)

    def _ended(self) -> Verdict:
        if self.refused is None:
            verdict = unscored("", reason=_GOES_ON)
            self.refused = decide(verdict, self.router.policy, can_escalate=self.router.terms.can_escalate)
        return self.refused


_question: ContextVar[Question | None] = ContextVar("semgrad_guard_question", default=None)


def question_of(router: Router | Literal[False] | None) -> Question | None:
    """The question to which a call of a model with this router belongs: the nearest around it that has this router.

    Threads and tasks that a framework starts belong to their question. `False` is the router of a helper, whose texts
    need no guard; it belongs to none.

    Raises:
        UnenforcedPolicyError: the questions around it have other routers, which would not judge this call.
    """
    if router is False or (innermost := _question.get()) is None:
        return None
    if (question := innermost.outward(router)) is None:
        raise UnenforcedPolicyError(
            "a model without the question's router is called in a question, and its answer would not be judged: give "
            "it this router (router=...), or router=False where it is a helper whose texts need no guard"
        )
    return question


@contextmanager
def asking(router: Router) -> Generator[Question]:
    """One question, asked by own code: a refused call of a model with this router raises, and ends it.

    An error that leaves the block after a refused call ends here; read `question.refused` behind it. Within a question
    of the same router the block is a part of it.

        with asking(router) as question:
            answer = await agent.run("Who built it?")
        text = str(answer) if question.refused is None else "I don't know."

    Raises:
        InputError: it is no router.
    """
    Router.require(router)
    around = _question.get()
    if around is not None and (known := around.outward(router)) is not None:
        yield known
        return
    token = _question.set(question := Question(router, around))
    try:
        yield question
    except Exception:
        if question.refused is None:
            raise
    finally:
        _question.reset(token)


# Recorded runs: their drafts are scored, delivered and kept, for calibrations on the real prompts of a chain.


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
