"""The decision about a scored draft: its action, by how it compares with the calibration, and what happens to it.

`decide` makes the action, `settle` what happens to the draft. Nothing else decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from semgrad_guard.calibration.binding import FIELDS, unlike_calls
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.sentence_gates import compared_scores, depending_on
from semgrad_guard.guard.cut_answers import without_cut_score
from semgrad_guard.guard.parts import decided_fields, without_values
from semgrad_guard.guard.policy import Policy, Terms
from semgrad_guard.guard.verdicts import (
    UNSCORED,
    Settlement,
    binding_of,
    is_withheld,
    says_nothing,
    with_promise,
)
from semgrad_guard.records import OWN_CODE, Action, PromptForm, SentenceVerdict, Verdict, digest_of
from semgrad_guard.settings import OnDoubt

_ESTIMATED = "min_confidence decides by an estimate, which promises nothing"
_OWN_CODE = "the model runs code that cannot be compared with that of the calibration (a hook, a replaced method)"
_OTHER_PROMPT = "the answer was given to another prompt (it comes from a cache, say)"


def unlike(draft: Verdict, calibration: Calibration | None, prompt: PromptForm | None) -> tuple[str, ...]:
    """The differences from the calibration, in words; empty without one: of the prompt, of the place where the answer
    ends (see `Binding.cut_elsewhere`), and of a call to another server (see `unlike_calls`)."""
    if calibration is None:
        return ()
    details, bound = draft.details, calibration.binding
    written: Any = {"tokens": details.scored_tokens, "text": draft.text}
    found = list(calibration.unfamiliar(prompt))
    if bound is not None and (elsewhere := bound.cut_elsewhere(details.cut, **written)) is not None:
        found.append(elsewhere)
    found += unlike_calls(details.options, bound, **written)
    if details.prompt is not None and prompt is not None and details.prompt != digest_of(prompt.text):
        found.append(_OTHER_PROMPT)
    if OWN_CODE in (details.fingerprint or ""):
        found.append(_OWN_CODE)
    return tuple(found)


def settle(
    draft: Verdict, terms: Terms, *, prompt: PromptForm | None = None, trusted: bool = False, whole: bool = False
) -> Settlement:
    """The decision about a draft. Pure: records in, a record out.

    Args:
        draft: the scored draft, undecided; its `text` is the answer.
        terms: the policy, and how it is carried out.
        prompt: the form of the prompt; without it nothing is promised.
        trusted: the draft's actions may go out whatever its score (an agent's calls of harmless tools): the decision
            about them is advice. Text next to them is let through only by its score.
        whole: nothing may be delivered in the answer's place, and so no part of it.

    Raises:
        BindingMismatchError: the policy was calibrated for another model, estimator, setting or template.
    """
    if is_withheld(draft):  # by another guard: there is no answer left to judge
        return Settlement("deliver", draft)
    verdict = decide(draft, terms.policy, can_escalate=terms.can_escalate, prompt=prompt)
    if not terms.withholds:
        return Settlement("deliver", verdict.revised(enforced=False))
    if trusted and verdict.action != "answer":
        hidden = {"text": "", "reasoning": None, "draft": verdict.text or None}
        return Settlement("deliver", verdict.revised(enforced=False, **hidden))
    if verdict.action == "answer":
        return Settlement("deliver", without_values(verdict) if verdict.has_nulls else verdict)
    if terms.raises:
        return Settlement("raise", verdict)
    ranges = tuple((one.start, one.end) for one in verdict.sentences if one.action == "deliver")
    if ranges and not whole:
        return Settlement("deliver", with_promise(with_delivered(verdict, closing_line=terms.closing_line)), ranges)
    return Settlement(verdict.action, verdict)


def decide(draft: Verdict, policy: Policy, *, can_escalate: bool, prompt: PromptForm | None = None) -> Verdict:
    """Apply a policy to a scored draft: action, confidence, threshold, and the reason if it is not let through.

    Of a draft that was scored by sentence the action is that about all of it; each sentence has a decision of its own.
    `on_doubt` is among the settings that its scores are bound to.

    It is promised if a calibrated threshold lets it through and its prompt's form, `prompt`, is like those of the
    calibration. An unknown prompt is unlike them.

    Raises:
        BindingMismatchError: the policy was calibrated for another model, estimator, setting or template.
    """
    if policy.compares:
        draft = without_cut_score(draft, policy.on_cut or "unscored")
    by_field = policy.calibration is not None and FIELDS.is_of(policy.binding)
    if by_field:
        draft = draft.revised(settings=FIELDS.among(draft.details.settings))
    options: tuple[str, ...] = ()
    if draft.estimator != UNSCORED:  # else there is nothing to bind to, and `on_unscored` decides
        options = policy.check(binding_of(draft), options=policy.on_other_options == "refuse")
    calibrated = policy.calibration is not None
    estimated = () if policy.min_confidence is None else (_ESTIMATED,)
    unfamiliar = (*unlike(draft, policy.calibration, prompt), *options, *estimated)
    judged = not unfamiliar or policy.delivers_unfamiliar

    def passes(score: float | None) -> bool:
        return judged and policy.decide(score, can_escalate=False) == "answer"

    if by_field:
        fields, uncertainty = decided_fields(draft.fields, passes, policy.confidence)
        draft = draft.revised(fields=fields, uncertainty=uncertainty)
    if says_nothing(draft):
        action: Action = "escalate" if can_escalate else "abstain"
    else:
        action = policy.decide(draft.uncertainty, can_escalate=can_escalate) if judged else "abstain"
    let_through = action == "answer"

    changes: dict[str, Any] = {
        "action": action,
        "threshold": policy.recorded_threshold,
        "enforced": policy.compares or not let_through,  # a delivered answer that nothing was compared with
        "confidence": policy.confidence(draft.uncertainty),
        "calibration_id": policy.calibration_id,
        "alpha": policy.alpha,
        "requested_alpha": None if policy.calibration is None else policy.calibration.requested,
        "upstream": None if policy.binding is None else policy.binding.upstream,
        "familiar": not unfamiliar if calibrated else None,
        "unfamiliar": unfamiliar,
        "reason": draft.reason if let_through or draft.reason else _withheld(draft, policy),
    }
    if draft.sentences:
        changes["sentences"] = decided_sentences(
            draft.sentences,
            on_doubt=(draft.details.settings or {}).get("on_doubt", "stop") if judged else "stop",
            lets_through=passes,
            promises=lambda score: calibrated and not unfamiliar and policy.lets_through(score),
            confidence=policy.confidence,
        )
    return with_promise(draft.revised(**changes))


def _withheld(draft: Verdict, policy: Policy) -> str:
    if says_nothing(draft):
        return "the answer is empty"
    if policy.decide(draft.uncertainty, can_escalate=False) == "answer":
        return "the prompt is unlike those that the calibration was made on"
    if draft.uncertainty is None:
        return "the answer carries no score"
    if policy.threshold is None:
        return "the calibration found no threshold that keeps its promise, so nothing is let through"
    return "its uncertainty is above the threshold"


# By sentence: one is let through where its score, and those of all that it depends on, are.


def decided_sentences(
    sentences: Sequence[SentenceVerdict],
    *,
    on_doubt: OnDoubt,
    lets_through: Callable[[float | None], bool],
    promises: Callable[[float | None], bool],
    confidence: Callable[[float | None], float | None],
) -> tuple[SentenceVerdict, ...]:
    """The sentences with the decision about each; their ranges are still those of the whole draft."""
    leans_on = [sentence.leans_on for sentence in sentences]
    compared = compared_scores([sentence.uncertainty for sentence in sentences], leans_on, on_doubt=on_doubt)
    through: list[bool] = []
    for sentence, earlier in zip(sentences, depending_on(leans_on, on_doubt=on_doubt), strict=True):
        through.append(lets_through(sentence.uncertainty) and (earlier is None or through[earlier]))
    return tuple(
        sentence.model_copy(
            update={
                "action": "deliver" if passes else on_doubt,
                "compared": score,
                "confidence": confidence(score),
                "promised": passes and promises(score),
            }
        )
        for sentence, passes, score in zip(sentences, through, compared, strict=True)
    )


def watched_score(verdict: Verdict) -> float | None:
    """The score of an answer that a calibration keeps, and drift compares: by sentence that of the most certain one."""
    if not verdict.sentences:
        return verdict.uncertainty
    return min((sentence.compared for sentence in verdict.sentences if sentence.compared is not None), default=None)


def with_delivered(draft: Verdict, *, closing_line: str) -> Verdict:
    """The verdict with the part of its text that is delivered; behind an answer that was ended early, the line."""
    text, kept = "", list[SentenceVerdict]()
    for sentence in draft.sentences:
        begin = len(text)
        text += draft.text[sentence.start : sentence.end] if sentence.action == "deliver" else ""
        kept.append(sentence.model_copy(update={"start": begin, "end": len(text)}))
    if closing_line and any(sentence.action == "stop" for sentence in kept):
        text += closing_line if text[-1:].isspace() else f" {closing_line}"
    withheld = sum(sentence.action != "deliver" for sentence in kept)
    changes = {
        "action": "answer",
        "text": text,
        "sentences": tuple(kept),
        "draft": draft.text,
        "reasoning": None,
        "reason": f"{withheld} of {len(kept)} sentences are not let through",
    }
    return draft.revised(**changes)
