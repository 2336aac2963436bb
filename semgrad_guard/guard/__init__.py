"""The guard: policies, verdicts, and the flow from a scored draft to what is delivered.

The names load lazily: a `Policy` needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semgrad_guard.decision_log.sink import DecisionSink
    from semgrad_guard.engine.interruption import Stop, current_stop, stopping
    from semgrad_guard.guard.answering import (
        Answerer,
        AsyncLiveAnswer,
        LiveAnswer,
        assess,
        scoring_settings,
        template_name,
    )
    from semgrad_guard.guard.calibrated_estimator import as_estimator, estimator_of
    from semgrad_guard.guard.flow import (
        Abstain,
        Deliver,
        Draft,
        Escalate,
        HandedOn,
        Outcome,
        Pending,
        Raise,
        Refusal,
        Reply,
        Settlement,
        Waiting,
        arun,
        conclude,
        one,
        run,
        settle,
    )
    from semgrad_guard.guard.guard import AsyncGuardedStream, Guard, GuardedStream, Target
    from semgrad_guard.guard.modes import ABSTAIN_MESSAGE, Mode, require_mode, withholds
    from semgrad_guard.guard.policy import OnUnscored, Policy, require_policy
    from semgrad_guard.guard.promise import Promise, combined_promise, promise_along, split_delta
    from semgrad_guard.guard.recorder import Recorder, current_recorder, record_draft, recording
    from semgrad_guard.guard.streams import AsyncLiveDraft, LiveDraft, arun_stream, run_stream
    from semgrad_guard.guard.terms import AbstainMessage, OnError, Terms
    from semgrad_guard.guard.timing import ain_time, cancelling, in_thread, in_time, off_loop
    from semgrad_guard.guard.verdicts import (
        abstained,
        as_draft,
        binding_of,
        by_a_person,
        decide,
        decide_unscored,
        escalated,
        external,
        handed_on,
        is_withheld,
        require_sequel,
        undecided,
        unlike,
        unscored,
    )

_HOMES = {
    "answering": (
        "Answerer",
        "AsyncLiveAnswer",
        "LiveAnswer",
        "assess",
        "scoring_settings",
        "template_name",
    ),
    "calibrated_estimator": (
        "as_estimator",
        "estimator_of",
    ),
    "flow": (
        "Abstain",
        "Deliver",
        "Draft",
        "Escalate",
        "HandedOn",
        "Outcome",
        "Pending",
        "Raise",
        "Refusal",
        "Reply",
        "Settlement",
        "Waiting",
        "arun",
        "conclude",
        "one",
        "run",
        "settle",
    ),
    "guard": (
        "AsyncGuardedStream",
        "Guard",
        "GuardedStream",
        "Target",
    ),
    "modes": (
        "ABSTAIN_MESSAGE",
        "Mode",
        "require_mode",
        "withholds",
    ),
    "policy": (
        "OnUnscored",
        "Policy",
        "require_policy",
    ),
    "promise": (
        "Promise",
        "combined_promise",
        "promise_along",
        "split_delta",
    ),
    "recorder": (
        "Recorder",
        "current_recorder",
        "record_draft",
        "recording",
    ),
    "streams": (
        "AsyncLiveDraft",
        "LiveDraft",
        "arun_stream",
        "run_stream",
    ),
    "terms": (
        "AbstainMessage",
        "DecisionSink",
        "OnError",
        "Terms",
    ),
    "timing": (
        "Stop",
        "ain_time",
        "cancelling",
        "current_stop",
        "in_thread",
        "in_time",
        "off_loop",
        "stopping",
    ),
    "verdicts": (
        "abstained",
        "as_draft",
        "binding_of",
        "by_a_person",
        "decide",
        "decide_unscored",
        "escalated",
        "external",
        "handed_on",
        "is_withheld",
        "require_sequel",
        "undecided",
        "unlike",
        "unscored",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ABSTAIN_MESSAGE",
    "Abstain",
    "AbstainMessage",
    "Answerer",
    "AsyncGuardedStream",
    "AsyncLiveAnswer",
    "AsyncLiveDraft",
    "DecisionSink",
    "Deliver",
    "Draft",
    "Escalate",
    "Guard",
    "GuardedStream",
    "HandedOn",
    "LiveAnswer",
    "LiveDraft",
    "Mode",
    "OnError",
    "OnUnscored",
    "Outcome",
    "Pending",
    "Policy",
    "Promise",
    "Raise",
    "Recorder",
    "Refusal",
    "Reply",
    "Settlement",
    "Stop",
    "Target",
    "Terms",
    "Waiting",
    "abstained",
    "ain_time",
    "arun",
    "arun_stream",
    "as_draft",
    "as_estimator",
    "assess",
    "binding_of",
    "by_a_person",
    "cancelling",
    "combined_promise",
    "conclude",
    "current_recorder",
    "current_stop",
    "decide",
    "decide_unscored",
    "escalated",
    "estimator_of",
    "external",
    "handed_on",
    "in_thread",
    "in_time",
    "is_withheld",
    "off_loop",
    "one",
    "promise_along",
    "record_draft",
    "recording",
    "require_mode",
    "require_policy",
    "require_sequel",
    "run",
    "run_stream",
    "scoring_settings",
    "settle",
    "split_delta",
    "stopping",
    "template_name",
    "undecided",
    "unlike",
    "unscored",
    "withholds",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
