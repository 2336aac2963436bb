"""The common part of guarded engines and agents: settings, the records that they attach, and their errors.

LlamaIndex's parsers put the model's words into their errors, an agent shows the error of a tool to its model, and
loggers write down a whole chain of errors: an error is a way out like any other. Where answers may be withheld, the
error that is raised instead holds no text of the model's, and `on_error` decides about it (`sealed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, cast

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms.llm import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixin
from llama_index.core.query_engine import MultiStepQueryEngine, SubQuestionQueryEngine
from llama_index.core.response_synthesizers import Refine
from llama_index.core.tools import BaseTool

from llama_index_semgrad_guard.authorship import Aggregate, Answering, Counting, Delivery
from llama_index_semgrad_guard.calls import Leaving, is_ours, reports
from llama_index_semgrad_guard.events import Source, report
from llama_index_semgrad_guard.records import decided_of, text_of
from llama_index_semgrad_guard.turn import Turn, current_turn
from semgrad_guard import METADATA_KEY, Policy, Promise, Verdict
from semgrad_guard.adapters.settings import require_known
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.errors import (
    AnswerFailedError,
    DeadlineExceededError,
    InputError,
    LowConfidenceError,
    PromptTooLongError,
    SemGradGuardError,
)
from semgrad_guard.guard import (
    AbstainMessage,
    DecisionSink,
    Draft,
    JudgedBy,
    KeepDraft,
    Mode,
    OnDoubt,
    OnError,
    Reply,
    ReportedScorer,
    Steps,
    Terms,
    Timeout,
    current_recorder,
    judged_by,
    promise_along,
    require_policy,
    require_sequel,
)
from semgrad_guard.records import digest_of

T = TypeVar("T")
QUESTION_KEY = "question"
"""In a record: the digest of the question."""

_STRUCTURE = "Text cannot stand in for a structured answer."


class GuardOptions(TypedDict, total=False):
    """The settings that guarded query engines and chat engines have in common."""

    abstain_message: AbstainMessage
    """Delivered in the place of an answer that is neither let through nor escalated; a text, or a function of the
    verdict."""
    mode: Mode
    keep_draft: KeepDraft
    on_error: OnError
    timeout: Timeout
    monitor: DriftMonitor | None
    """Watches the scores for drift, and the share of unscored answers."""
    log: DecisionSink | None
    """A `DecisionLog`, which every decision is written to."""
    by: JudgedBy | None
    """"sentence": every sentence has a score of its own, for an LLM that is scored by its server's log-probabilities; a
    `SemGradLLM` has this setting itself. Default: as the policy's calibration, or "answer"."""
    on_doubt: OnDoubt | None
    """By sentence, as in `SemGradLLM`."""
    aggregate: Aggregate | None
    """The "max" or "mean" of the scores of all the model's calls; default: those that wrote the answer count."""
    answering: Answering | None
    """The calls that answer, where they are unknown: the name of a component or method within which the model runs
    ("MyEngine", "Refine.get_response"), or a function of a `ModelCall`. You vouch for it."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The terms of a guard, and the model's calls that count."""

    terms: Terms
    counting: Counting
    by_sentence: OnDoubt | None = None
    """What happens at a doubtful sentence of an LLM that is scored by its server's log-probabilities."""

    @classmethod
    def of(
        cls,
        policy: Policy,
        *,
        source: Source,
        can_escalate: bool,
        whole: bool = False,
        aggregate: Aggregate | None = None,
        answering: Answering | None = None,
        by: JudgedBy | None = None,
        on_doubt: OnDoubt | None = None,
        **terms: Any,
    ) -> Routing:
        """The settings of engines and agents (`GuardOptions`), and where their verdicts are reported.

        Raises:
            InputError: an unknown setting, or a value out of its range, or one that an agent has not.
        """
        if whole and (by is not None or on_doubt is not None):
            raise InputError("an agent's messages are judged as a whole: leave by and on_doubt out")
        require_known(f"a guarded {source.replace('_', ' ')}", terms, GuardOptions.__annotations__)
        keep_draft = bool(terms.get("keep_draft"))

        def notify(verdict: Verdict) -> None:
            report(verdict, source, keep_draft=keep_draft)

        made = Terms(policy=policy, can_escalate=can_escalate, continues=not whole, notify=notify, **terms)
        unit = None if whole else judged_by(policy.calibration, by, on_doubt)
        if by is not None:
            made.require_finisher(unit)
        return cls(
            terms=made,
            counting=Counting(aggregate=aggregate, answering=answering, whole=whole),
            by_sentence=unit,
        )

    def now(self) -> Routing:
        """The same settings, for the questions of the current kind also where a stream is read later."""
        return replace(self, terms=replace(self.terms, policy=self.terms.policy.of_current_kind()))

    def leaving(self) -> Leaving | None:
        """The sentences that leave early in a turn that begins; None where only the end of the answer decides.

        An engine within another guarded one delivers whole answers, from which the outer one's are made.
        """
        terms = self.terms
        early = terms.withholds and terms.delivers_early and current_turn() is None and current_recorder() is None
        return Leaving(terms, self.scorer) if early else None

    def scorer(self, model: str) -> ReportedScorer:
        """The scorer of an LLM's answers by the log-probabilities that its server reports.

        Raises:
            BindingMismatchError: the policy was calibrated for scores of a local model.
        """
        return ReportedScorer.of(model, self.terms.policy.of_current_kind().calibration, by_sentence=self.by_sentence)

    def draft(self, turn: Turn, delivery: Delivery) -> Draft[Any]:
        """The scored draft of an answer that was made in a turn.

        Raises:
            InputError: a synthesizer was to stream a structure.
        """
        if any(streams_structures(step.component) for step in turn.ended):
            raise InputError(STREAMED_STRUCTURE)
        advice = "" if delivery.structure is None else _STRUCTURE
        policy = self.terms.policy.of_current_kind()
        turn.score_by(self.scorer)
        return self.counting.draft(turn, delivery, policy, irreplaceable=advice)

    def attached(self, metadata: Mapping[str, Any] | None, verdict: Verdict, turn: Turn) -> dict[str, Any]:
        """Metadata with the verdict's record and the question's digest in it; without them in mode "observe"."""
        if self.terms.observes:
            return dict(metadata or {})
        question = {} if turn.question is None else {QUESTION_KEY: digest_of(turn.question)}
        record = verdict.metadata(keep_draft=self.terms.keep_draft)
        return {**(metadata or {}), METADATA_KEY: {**record, **question}}


class Guarded:
    """A guarded engine: it has settings, and perhaps a target."""

    routing: Routing
    escalate_to: Any

    @property
    def policy(self) -> Policy:
        """Which scores are let through."""
        return self.routing.terms.policy

    @property
    def mode(self) -> Mode:
        """How the decision is carried out."""
        return self.routing.terms.mode

    @property
    def promise(self) -> Promise | None:
        """The promise for all answers that this engine and its targets deliver, or for the promised ones (`covers`).

        None where a stage is uncalibrated or unscored, or found no threshold.
        """
        return promise_along(self, Guarded)


def require_target(target: Any, policy: Policy, *, kinds: tuple[type, ...], remedy: str) -> None:
    """Refuse a target that cannot answer.

    Raises:
        InputError: it is of the wrong kind, or does not show its verdicts.
        BindingMismatchError: its calibration does not follow this one's.
    """
    if target is None:
        return
    function = callable(target) and not isinstance(target, (BaseQueryEngine, BaseChatEngine, BaseTool))
    if isinstance(target, type) or not (isinstance(target, kinds) or function):
        name = target.__name__ if isinstance(target, type) else type(target).__name__
        raise InputError(f"escalate_to cannot be a {name}: {remedy}")
    if isinstance(target, Guarded):
        if target.routing.terms.observes:
            raise InputError("escalate_to only observes, so that it is unknown which answers its own policy rejects")
        require_sequel(require_policy(policy), target.policy)


def reply_of(answer: Any, kinds: tuple[type[Any], ...]) -> Reply[Any]:
    """A target's answer: a text, a verdict, or a response of one of these kinds.

    Raises:
        InputError: it is something else.
    """
    if isinstance(answer, kinds):
        return Reply(decided_of(answer) or text_of(answer), answer)
    if isinstance(answer, (str, Verdict)):
        return Reply(answer)
    raise InputError(f"the escalation target returned a {type(answer).__name__}; expected a string or a response")


def require_guardable(engine: Any, terms: Terms) -> None:
    """Refuse an engine that cannot be guarded, and silence one that prints its models' texts.

    Raises:
        InputError: there is a guarded engine in it, whose answer it does not write anew; or it streams structures.
    """
    writes_anew = (Guarded, SubQuestionQueryEngine, MultiStepQueryEngine)
    parts = list(_within(engine, _ANSWERING, lambda part: not isinstance(part, writes_anew), {}))
    if any(isinstance(part, Guarded) for part in parts):
        raise InputError(
            f"the {type(engine).__name__} is guarded already, by itself or by an engine in it whose answers it "
            "passes on; guard one of them, and use escalate_to to chain guarded engines"
        )
    if any(streams_structures(field) for part in parts for field in cast("dict[str, Any]", vars(part)).values()):
        raise InputError(STREAMED_STRUCTURE)
    # A guard in the engine silences its own parts, by its own mode.
    for part in _within(engine, _PRINTING, lambda _part: True, {}) if terms.withholds else ():
        for name in ("_verbose", "verbose"):
            if getattr(part, name, False) is True:
                setattr(part, name, False)


def judges_by_sentence(engine: Any, routing: Routing, given: GuardOptions) -> bool:
    """Whether every sentence of an LLM in an engine is judged by itself.

    Raises:
        InputError: a target is to finish its answers, and there is none; or `given` are settings that a `SemGradLLM`
            has itself.
    """
    found = _within(engine, (*_PRINTING, LLM), lambda part: not isinstance(part, LLM), {})
    parts = [part for part in found if isinstance(part, LLM)]
    forms = [getattr(part, "by_sentence", None) for part in parts]
    if any(map(is_ours, parts)) and (given.get("by") or given.get("on_doubt")):
        raise InputError("by and on_doubt are settings of the SemGradLLM in this engine: give them there")
    for form in forms:
        routing.terms.require_finisher(form)
    return any(forms) or (routing.by_sentence is not None and any(map(reports, parts)))


_ANSWERING = (BaseQueryEngine, BaseChatEngine, BaseTool)
_PRINTING = (PromptMixin, BaseNodePostprocessor, BaseChatEngine, BaseTool)


def _within(value: Any, kinds: tuple[type, ...], into: Callable[[Any], bool], seen: dict[int, Any]) -> Iterator[Any]:
    """The objects of these kinds in a value, itself first; `into`: whether one's own fields are searched.

    `seen` keeps what was searched alive: the id of an object that is gone may be another one's.
    """
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, (list, tuple)):
        for inner in cast("list[Any]", value):
            yield from _within(inner, kinds, into, seen)
    elif isinstance(value, kinds):
        yield value
        if into(value):
            yield from _within(cast("dict[str, Any]", vars(value)), kinds, into, seen)


STREAMED_STRUCTURE = (
    "LlamaIndex streams nothing where a compact or refine synthesizer has an output_cls; leave out streaming=True, or "
    "output_cls"
)


def streams_structures(component: Any) -> bool:
    """Whether a synthesizer is to stream structures, which it can only read as a whole."""
    held: Any = component
    return isinstance(component, Refine) and bool(held._streaming) and held._output_cls is not None


# Errors.


def sealed(steps: Steps[T], turn: Turn, terms: Terms) -> Steps[T]:
    """The steps, whose errors hold nothing that a model wrote.

    Raises:
        AnswerFailedError: they failed, and their error may hold a model's text, or `on_error` is to abstain.
        Exception: the error itself, where it holds nothing of that, or nothing is withheld.
    """
    try:
        return (yield from steps)
    except BaseException as error:
        if not terms.withholds or current_recorder() is not None:
            raise
        failure = _harmless(error, turn, terms)
    raise failure  # outside of the handler: an error that is raised within it keeps the other one as its context


def _harmless(error: BaseException, turn: Turn, terms: Terms) -> BaseException:
    """The error without its causes, if it is ours or no model has run yet; another one otherwise.

    An interruption (Ctrl-C, a cancelled task) stays what it is.
    """
    if isinstance(error, Exception):
        replaceable = terms.on_error == "abstain" and isinstance(error, LowConfidenceError | PromptTooLongError)
        ours = _is_ours(error) and not replaceable
        if isinstance(error, DeadlineExceededError) and not ours:
            return DeadlineExceededError("the engine took too long")
        if not ours and (turn.has_begun or terms.on_error == "abstain"):
            return AnswerFailedError(f"the engine failed ({type(error).__name__})")
        if isinstance(error, LowConfidenceError):
            return LowConfidenceError(error.verdict, draft=None)
    error.__cause__ = error.__context__ = None
    vars(error).pop("__notes__", None)
    return error


def _is_ours(error: Exception) -> bool:
    """Whether our own code has raised an error of ours: an engine may put the model's words into one as well."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    raised_in = str(trace.tb_frame.f_globals.get("__name__")) if trace else ""
    packages = {module.partition(".")[0] for module in (raised_in, type(error).__module__)}
    return isinstance(error, SemGradGuardError) and packages <= {"semgrad_guard", "llama_index_semgrad_guard"}
