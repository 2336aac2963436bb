"""One draft verdict for a query that took several model calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from llama_index.core.response_synthesizers import Accumulate

from llama_index_semgrad_guard.calls import ModelCall
from semgrad_guard import Policy, Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import binding_of, decide_unscored

Aggregate = Literal["last", "max", "mean"]


def aggregate_for(engine: Any, chosen: Aggregate | None) -> Aggregate:
    """The chosen aggregate, or what suits an engine: `max` where answers are put side by side, `last` elsewhere.

    Raises:
        InputError: there is no such aggregate.
    """
    if chosen is None:
        return "max" if isinstance(getattr(engine, "_response_synthesizer", None), Accumulate) else "last"
    if chosen not in get_args(Aggregate):
        raise InputError(f"aggregate must be 'last', 'max' or 'mean', not {chosen!r}")
    return chosen


def aggregated(calls: Sequence[ModelCall], aggregate: Aggregate, text: str, policy: Policy) -> Verdict:
    """The draft verdict on `text`, the response made of these calls; `last` scores the last one only.

    A call without a score leaves the whole without one. Other aggregates than `last` are part of the settings, so that
    a calibration made for single answers is refused.

    Raises:
        BindingMismatchError: one of the calls is not what the policy was calibrated for.
    """
    if aggregate == "last":
        return calls[-1].verdict.model_copy(update={"text": text})
    verdicts = [_marked(call.verdict, aggregate) for call in calls]
    for verdict in verdicts:
        policy.check(binding_of(verdict))
    unscored = next((v for v in verdicts if v.uncertainty is None), None)
    if unscored is not None:
        return unscored.model_copy(update={"text": text})
    scores = [v.uncertainty for v in verdicts if v.uncertainty is not None]
    worst = verdicts[scores.index(max(scores))]
    changes: dict[str, Any] = {
        "text": text,
        "scored_tokens": sum(v.scored_tokens for v in verdicts),
        "scoring_ms": sum(v.scoring_ms or 0.0 for v in verdicts),
    }
    if aggregate == "mean":
        changes |= {"uncertainty": sum(scores) / len(scores), "semgrad": None, "paragrad": None, "mean_entropy": None}
    return worst.model_copy(update=changes)


def wrote(call: ModelCall, text: str) -> bool:
    """Whether a text is what a call generated, or a part of it, or contains it; white space aside.

    Where nothing is retrieved, "Empty Response" follows a call that condensed or rewrote the question.
    """
    generated, delivered = " ".join(call.generation.text.split()), " ".join(text.split())
    return generated in delivered or delivered in generated


def uncalled(text: str, policy: Policy, *, can_escalate: bool) -> Verdict:
    """The decision about a response that no `SemGradLLM` wrote: nothing to score, so nothing to bind to."""
    return decide_unscored(
        text,
        policy,
        can_escalate=can_escalate,
        model="none",
        reason="no SemGradLLM wrote this answer (nothing retrieved, or another LLM)",
    )


def _marked(verdict: Verdict, aggregate: Aggregate) -> Verdict:
    return verdict.model_copy(update={"settings": {**(verdict.settings or {}), "aggregate": aggregate}})
