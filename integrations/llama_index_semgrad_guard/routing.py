"""What guarded engines and agents share: their settings, the records that they attach, and how to find them inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixin
from llama_index.core.query_engine import MultiStepQueryEngine, SubQuestionQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer, Refine
from llama_index.core.tools import BaseTool

from llama_index_semgrad_guard.authorship import Aggregate, Answering, Counting, Delivery
from llama_index_semgrad_guard.calls import Turn
from llama_index_semgrad_guard.events import Source, report
from semgrad_guard import METADATA_KEY, Policy, Promise, Verdict
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    AbstainMessage,
    DecisionSink,
    Draft,
    Mode,
    OnError,
    Terms,
    promise_along,
    require_policy,
    require_sequel,
)
from semgrad_guard.records import digest_of

QUESTION_KEY = "question"
"""In a record: the digest of what was asked."""

_STRUCTURE = "Text cannot stand in for a structured answer."


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The terms of a guard, and which of the model's calls count."""

    terms: Terms
    counting: Counting

    @classmethod
    def of(  # noqa: PLR0913 - engines and agents hand everything over here
        cls,
        policy: Policy,
        *,
        source: Source,
        mode: Mode,
        can_escalate: bool,
        abstain_message: AbstainMessage,
        keep_draft: bool,
        on_error: OnError,
        timeout: float | None,
        monitor: DriftMonitor | None,
        log: DecisionSink | None = None,
        aggregate: Aggregate | None = None,
        answering: Answering | None = None,
        whole: bool = False,
    ) -> Routing:
        """Settings as engines and agents take them.

        Raises:
            InputError: one of them is none.
        """
        terms = Terms(
            policy=policy,
            mode=mode,
            can_escalate=can_escalate,
            abstain_message=abstain_message,
            keep_draft=keep_draft,
            on_error=on_error,
            timeout=timeout,
            monitor=monitor,
            log=log,
            notify=lambda verdict: report(verdict, source, keep_draft=keep_draft),
        )
        return cls(terms=terms, counting=Counting(aggregate=aggregate, answering=answering, whole=whole))

    def draft(self, turn: Turn, delivery: Delivery) -> Draft[Any]:
        """The scored draft of an answer that was made in a turn.

        Raises:
            InputError: a synthesizer was to stream a structure.
        """
        if any(streams_structures(step.component) for step in turn.ended):
            raise InputError(STREAMED_STRUCTURE)
        advice = "" if delivery.structure is None else _STRUCTURE
        return self.counting.draft(turn, delivery, self.terms.policy, irreplaceable=advice)

    def attached(self, metadata: Mapping[str, Any] | None, verdict: Verdict, turn: Turn) -> dict[str, Any]:
        """Metadata with the verdict's record, and in that a name for the question; without, where the mode observes."""
        if self.terms.mode == "observe":
            return dict(metadata or {})
        asked = {} if turn.question is None else {QUESTION_KEY: digest_of(turn.question)}
        record = verdict.metadata(keep_draft=self.terms.keep_draft)
        return {**(metadata or {}), METADATA_KEY: {**record, **asked}}


class Guarded:
    """A guarded engine: it has settings, and perhaps a target."""

    routing: Routing
    escalate_to: Any

    @property
    def policy(self) -> Policy:
        """What is let through."""
        return self.routing.terms.policy

    @property
    def mode(self) -> Mode:
        """What is done with the decision."""
        return self.routing.terms.mode

    @property
    def promise(self) -> Promise | None:
        """What holds for what this engine and its targets deliver, or for the promised answers among it (`covers`);
        None where a stage is uncalibrated or unscored, or found no threshold.
        """
        return promise_along(self, Guarded)


def require_target(target: Any, policy: Policy, *, kinds: tuple[type, ...], remedy: str) -> None:
    """Refuse what cannot be asked in an answer's place.

    Raises:
        InputError: it is of the wrong kind, or keeps its verdicts to itself.
        BindingMismatchError: its calibration does not follow this one's.
    """
    if target is None:
        return
    if isinstance(target, type) or not (isinstance(target, kinds) or _is_function(target)):
        name = target.__name__ if isinstance(target, type) else type(target).__name__
        raise InputError(f"escalate_to cannot be a {name}: {remedy}")
    if isinstance(target, Guarded):
        if target.routing.terms.mode == "observe":
            raise InputError("escalate_to only observes, so that nobody can know what its own policy rejects")
        require_sequel(require_policy(policy), target.policy)


def require_guardable(engine: Any, terms: Terms) -> None:
    """Refuse an engine that no guard can stand around, and silence one that prints what its models say.

    Raises:
        InputError: there is a guarded engine in it, and nothing that writes a new answer of what that one says; or it
            streams structures.
    """
    parts = list(_parts(engine, set()))
    if any(isinstance(part, Guarded) for part in parts):
        raise InputError(
            f"the {type(engine).__name__} is guarded already, by itself or by an engine in it whose answers it hands "
            "on; guard one of them, and use escalate_to to chain guarded engines"
        )
    held = [each for part in parts for each in cast("dict[str, Any]", vars(part)).values()]
    synthesizers = [each for each in held if isinstance(each, BaseSynthesizer)]
    if any(streams_structures(each) for each in synthesizers):
        raise InputError(STREAMED_STRUCTURE)
    if terms.withholds:
        _silence(engine, set())


def _silence(value: Any, seen: set[int]) -> None:
    """Have no part of an engine print; a guard in it sees to its own parts by its own mode."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, (list, tuple)):
        for inner in cast("list[Any]", value):
            _silence(inner, seen)
    elif isinstance(value, (PromptMixin, BaseNodePostprocessor, BaseChatEngine, BaseTool)):
        for name in ("_verbose", "verbose"):
            if getattr(value, name, False) is True:
                setattr(value, name, False)
        _silence([*vars(value).values()], seen)


STREAMED_STRUCTURE = (
    "LlamaIndex streams nothing where a compact or refine synthesizer has an output_cls; leave out streaming=True, or "
    "output_cls"
)


def streams_structures(component: Any) -> bool:
    """Whether a synthesizer is to stream what it can only read as a whole."""
    held: Any = component
    return isinstance(component, Refine) and bool(held._streaming) and held._output_cls is not None


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """Whatever may answer in an engine's name, the engine itself first."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, (list, tuple)):
        for inner in cast("list[Any]", value):
            yield from _parts(inner, seen)
    elif isinstance(value, (BaseQueryEngine, BaseChatEngine, BaseTool)):
        yield value
        writes_anew = isinstance(value, (SubQuestionQueryEngine, MultiStepQueryEngine))
        if not isinstance(value, Guarded) and not writes_anew:
            yield from _parts([*vars(value).values()], seen)


def _is_function(target: Any) -> bool:
    return callable(target) and not isinstance(target, (BaseQueryEngine, BaseChatEngine, BaseTool))
