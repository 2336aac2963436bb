"""From a scored draft to the delivered answer: a policy applied to verdicts, and the verdicts on withheld answers."""

from __future__ import annotations

from typing import Any

from semgrad_guard.calibration.binding import Binding
from semgrad_guard.errors import BindingMismatchError, UnfamiliarPromptError
from semgrad_guard.guard.policy import Policy
from semgrad_guard.records import OWN_CODE, Action, PromptForm, ToolCall, Verdict, digest_of

UNSCORED = "none"
"""The estimator of an answer without a score."""

_OWN_CODE = "the model runs code that cannot be compared with that of the calibration (a hook, a replaced method)"
_OTHER_PROMPT = "the answer was given to another prompt (it comes from a cache, say)"


def decide(
    draft: Verdict,
    policy: Policy,
    *,
    can_escalate: bool,
    prompt: PromptForm | None = None,
    strange: tuple[str, ...] = (),
) -> Verdict:
    """Apply a policy to a scored draft: action, confidence, threshold, and the reason if it is not let through.

    It is promised if a calibrated threshold lets it through and its prompt's form, `prompt`, is like those of the
    calibration. An unknown prompt is unlike them. `strange` are further differences.

    Raises:
        BindingMismatchError: the policy was calibrated for another model, estimator, setting or template.
        UnfamiliarPromptError: the prompt is unlike those calibrated on, and the policy is to raise.
    """
    if draft.estimator != UNSCORED:  # else there is nothing to bind to, and `on_unscored` decides
        policy.check(binding_of(draft))
    calibrated = policy.calibration is not None
    unfamiliar = tuple(dict.fromkeys((*unlike(draft, policy, prompt), *strange))) if calibrated else ()
    action = _action(draft, policy, can_escalate=can_escalate, unfamiliar=unfamiliar)
    let_through = action == "answer"
    changes: dict[str, Any] = {
        "action": action,
        "threshold": policy.recorded_threshold,
        "enforced": policy.compares or not let_through,  # a delivered answer that nothing was compared with
        "confidence": policy.confidence(draft.uncertainty),
        "calibration_id": policy.calibration_id,
        "upstream": None if policy.binding is None else policy.binding.upstream,
        "familiar": not unfamiliar if calibrated else None,
        "unfamiliar": unfamiliar,
        "reason": draft.reason if let_through or draft.reason else _withheld(draft, policy),
    }
    return _with_promise(draft.model_copy(update=changes))


def unlike(draft: Verdict, policy: Policy, prompt: PromptForm | None) -> tuple[str, ...]:
    """The differences of an answer and its prompt from those of the calibration, in words.

    Of several answers in one verdict only the prompt, and the place of the cut, is compared here: the code that joins
    them compares each.
    """
    joined = "aggregate" in (draft.settings or {})
    tokens, text = (0, "") if joined else (draft.scored_tokens, draft.text)
    other = () if draft.prompt is None or prompt is None or draft.prompt == digest_of(prompt.text) else (_OTHER_PROMPT,)
    return (
        *policy.unfamiliar(prompt, cut=draft.cut, tokens=tokens, text=text, options=draft.options),
        *(() if joined else other),
        *((_OWN_CODE,) if OWN_CODE in (draft.fingerprint or "") else ()),
    )


def _action(draft: Verdict, policy: Policy, *, can_escalate: bool, unfamiliar: tuple[str, ...]) -> Action:
    """The policy's action, for an unfamiliar prompt by `on_unfamiliar`. An empty answer is not let through."""
    if says_nothing(draft):
        return "escalate" if can_escalate else "abstain"
    if not unfamiliar or policy.on_unfamiliar == "threshold":
        return policy.decide(draft.uncertainty, can_escalate=can_escalate)
    if policy.on_unfamiliar == "raise":
        raise UnfamiliarPromptError(unfamiliar)
    return "escalate" if policy.on_unfamiliar == "escalate" and can_escalate else "abstain"


def says_nothing(draft: Verdict) -> bool:
    """Whether an answer has neither text nor calls: it ended at once, or it was a call that cannot be read."""
    return not draft.text.strip() and not draft.tool_calls


def decide_unscored(
    text: str,
    policy: Policy,
    *,
    can_escalate: bool,
    model: str = "unknown",
    reason: str = "the answer carries no score",
) -> Verdict:
    """Apply a policy to an answer that came without a score: there is nothing to bind to, `on_unscored` decides."""
    facts: dict[str, Any] = {"threshold": policy.recorded_threshold, "calibration_id": policy.calibration_id}
    action = policy.decide(None, can_escalate=can_escalate)
    return unscored(text, reason=reason, model=model, **facts).model_copy(update={"action": action})


def undecided(verdict: Verdict) -> Verdict:
    """A verdict without the fields of an earlier decision (an annotated answer may come back from a cache)."""
    changes: dict[str, Any] = {
        "action": "answer",
        "threshold": None,
        "confidence": None,
        "calibration_id": None,
        "upstream": None,
        "promised": False,
        "familiar": None,
        "unfamiliar": (),
        "enforced": True,
        "draft": None,
        "decision_id": None,
        "escalated_from": None,
        "reason": None if verdict.status == "scored" else verdict.reason,
    }
    return verdict.model_copy(update=changes)


def as_draft(verdict: Verdict) -> Verdict:
    """The verdict of a message as that of a draft: the delivered text's own, undecided.

    An answer that another guard has withheld stays withheld.
    """
    return verdict if is_withheld(verdict) else undecided(verdict.delivered)


def is_withheld(verdict: Verdict) -> bool:
    """Whether the answer of this stage, or of the last one that it was handed on to, was kept back."""
    while verdict.escalated is not None:
        verdict = verdict.escalated
    return verdict.action == "abstain" and verdict.enforced


def without_text(decided: Verdict) -> Verdict:
    """The verdict on a draft whose tool calls go out, the decision being advice, and whose text does not."""
    return decided.model_copy(update={"enforced": False, "text": "", "reasoning": None, "draft": decided.text or None})


def late(policy: Policy, reason: str) -> Verdict:
    """The verdict on an answer that was not there in time."""
    return decide_unscored("", policy, can_escalate=False, reason=reason).model_copy(update={"action": "abstain"})


def rejected(decided: Verdict, reason: str) -> Verdict:
    """The verdict on a draft that its target does not let through either."""
    return decided.model_copy(update={"action": "abstain", "promised": False, "reason": reason})


def by_a_person(decided: Verdict, text: str, reason: str) -> Verdict:
    """The verdict on a person's text in an answer's place, without a score and outside any promise."""
    return unscored(text, reason=reason, model="person", estimator=decided.estimator)


def unscored(text: str, *, reason: str, model: str = "unknown", estimator: str = UNSCORED, **facts: Any) -> Verdict:
    """The undecided verdict on an answer that cannot be scored; `facts` are further fields (settings, ...)."""
    return Verdict(
        status="unscored", action="answer", text=text, estimator=estimator, model=model, reason=reason, **facts
    )


def abstained(decided: Verdict, message: str) -> Verdict:
    """The verdict with its answer withheld: the message instead, the answer as `draft`."""
    draft = decided.text or None
    changes: dict[str, Any] = {
        "action": "abstain",
        "text": message,
        "reasoning": None,
        "tool_calls": (),
        "draft": draft,
    }
    return decided.model_copy(update=changes)


def escalated(decided: Verdict, answer: str | Verdict) -> Verdict:
    """The verdict with a target's answer in place of its own; a plain string is passed on unscored."""
    if isinstance(answer, str):
        answer = external(answer, estimator=decided.estimator)
    changes = {
        "action": "escalate",
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": answer.tool_calls,
        "draft": decided.text,
        "escalated": answer,
    }
    return _with_promise(decided.model_copy(update=changes))


def external(text: str, *, tool_calls: tuple[ToolCall, ...] = (), estimator: str = UNSCORED) -> Verdict:
    """The verdict on the answer of a target that carries no score."""
    return unscored(
        text,
        reason="the escalation target cannot be scored; its answer is outside any promise",
        model="external",
        estimator=estimator,
        tool_calls=tool_calls,
    )


def _with_promise(verdict: Verdict) -> Verdict:
    """The verdict with its promise: that of all stages, whichever wrote the text.

    A calibration made after another stage promises something only after that one.
    """
    return verdict.model_copy(update={"promised": verdict.upstream is None and _keeps(verdict)})


def _keeps(verdict: Verdict) -> bool:
    """Whether a stage lets the delivered text through, or hands its question on to one that was calibrated for that."""
    if not verdict.familiar:  # the target expects familiar questions, too
        return False
    if verdict.escalated is not None:
        return verdict.escalated.upstream == verdict.calibration_id and _keeps(verdict.escalated)
    if verdict.uncertainty is None or verdict.threshold is None:
        return False
    return verdict.action == "answer" and verdict.uncertainty <= verdict.threshold


def handed_on(decided: Verdict) -> Verdict:
    """The verdict with its answer withheld and no other in its place: another agent answers, later."""
    changes: dict[str, Any] = {"text": "", "reasoning": None, "tool_calls": (), "draft": decided.text or None}
    return decided.model_copy(update={**changes, "promised": False})


def binding_of(verdict: Verdict) -> Binding:
    """The binding in an answer's own record."""
    return Binding(
        model=verdict.model,
        revision=verdict.revision,
        fingerprint=verdict.fingerprint,
        estimator=verdict.estimator,
        settings=verdict.settings,
        prompt_template=verdict.prompt_template,
        options=verdict.options,
    )


def require_sequel(policy: Policy, target: Policy) -> None:
    """Refuse a calibrated target that was not calibrated on the questions that this stage does not let through."""
    if policy.calibration_id is None or target.calibration_id is None:
        return
    upstream = None if target.binding is None else target.binding.upstream
    if upstream != policy.calibration_id:
        raise BindingMismatchError(
            f"the escalation target's calibration was made after {upstream or 'no other stage'}, not after this "
            f"guard's ({policy.calibration_id}): the questions handed on are harder than all questions. Calibrate the "
            f"target on what this guard does not let through, with Binding(upstream={policy.calibration_id!r})."
        )


def _withheld(draft: Verdict, policy: Policy) -> str:
    if says_nothing(draft):
        return "the answer is empty"
    if policy.decide(draft.uncertainty, can_escalate=False) == "answer":
        return "the prompt is unlike those that the calibration was made on"
    if draft.uncertainty is None:
        return "the answer carries no score"
    if policy.threshold is None:
        return "the calibration found no threshold that keeps its promise, so nothing is let through"
    return f"uncertainty {draft.uncertainty:.4g} is above the threshold {policy.threshold:.4g}"
