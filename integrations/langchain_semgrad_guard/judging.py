"""Who decides about the answer of the run in progress: a router, an agent's middleware, or nobody.

Tracers hear of an answer when its run ends, before anything is done about it. What is decided they learn here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from langchain_semgrad_guard.docket import current_router
from langchain_semgrad_guard.messages import get_verdict, message_text
from semgrad_guard import Policy, Verdict
from semgrad_guard.guard import decide, decide_unscored

Judge = Callable[[AIMessage], Verdict]

_judge: ContextVar[Judge | None] = ContextVar("semgrad_guard_judge", default=None)


@contextmanager
def judged_by(judge: Judge | None) -> Generator[None]:
    """The time during which answers will be judged like this; None: as they come."""
    token = _judge.set(judge)
    try:
        yield
    finally:
        _judge.reset(token)


def judgement(message: BaseMessage, policy: Policy, *, can_escalate: bool) -> Verdict:
    """A policy's decision about a message; one that carries no score goes by the policy's `on_unscored`.

    Raises:
        BindingMismatchError: the policy was calibrated for something else.
    """
    draft = get_verdict(message)
    if draft is not None:
        return decide(undecided(draft), policy, can_escalate=can_escalate)
    return decide_unscored(message_text(message), policy, can_escalate=can_escalate)


def undecided(verdict: Verdict) -> Verdict:
    """A verdict without what another router may have written on it: an annotated answer may come back from a cache."""
    changes: dict[str, Any] = {
        "action": "answer",
        "threshold": None,
        "confidence": None,
        "calibration_id": None,
        "promised": False,
        "enforced": True,
        "reason": None if verdict.status == "scored" else verdict.reason,
    }
    return verdict.model_copy(update=changes)


def verdict_of(response: LLMResult) -> Verdict | None:
    """What is decided about a run's answer, or else the record it carries; None where it carries none.

    Raises:
        BindingMismatchError: whoever decides was calibrated for something else.
    """
    generation = response.generations[0][0] if response.generations and response.generations[0] else None
    message = generation.message if isinstance(generation, ChatGeneration) else None
    if not isinstance(message, AIMessage) or get_verdict(message) is None:
        return None
    if (router := current_router()) is not None:
        return router.judge(response)
    judge = _judge.get()
    return get_verdict(message) if judge is None else judge(message)
