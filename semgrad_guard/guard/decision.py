"""The decision about a scored draft: its action, by how it compares with the calibration, and what happens to it.

`decide` makes the action, `settle` what happens to the draft: it is delivered, withheld, or replaced by a target's
answer. Nothing else decides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from semgrad_guard.calibration.binding import FIELDS, Binding, unlike_calls
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.sentence_gates import compared_scores, depending_on
from semgrad_guard.engine.text_units import Path, Span, fields_of, is_unfinished, sentences
from semgrad_guard.guard.policy import Policy, Terms
from semgrad_guard.records import (
    OWN_CODE,
    Action,
    FieldVerdict,
    PromptForm,
    SentenceVerdict,
    ToolCall,
    Verdict,
    VerdictDetails,
    digest_of,
    is_blank,
)
from semgrad_guard.settings import OnCut, OnDoubt

# Verdicts: undecided, and with what goes out.

UNSCORED = "none"
"""The estimator of an answer without a score."""


def unscored(text: str, *, reason: str, model: str = "unknown", estimator: str = UNSCORED, **facts: Any) -> Verdict:
    """The undecided verdict on an answer that cannot be scored; `facts` are further fields (settings, ...)."""
    return Verdict.of(
        status="unscored", action="answer", text=text, estimator=estimator, model=model, reason=reason, **facts
    )


def external(text: str, *, tool_calls: tuple[ToolCall, ...] = (), estimator: str = UNSCORED, **facts: Any) -> Verdict:
    """The verdict on the answer of a target that carries no score; `facts` are further fields."""
    return unscored(
        text,
        reason="the escalation target cannot be scored; its answer is outside any promise",
        model="external",
        estimator=estimator,
        tool_calls=tool_calls,
        **facts,
    )


def binding_of(verdict: Verdict) -> Binding:
    """The binding in an answer's own record."""
    details = verdict.details
    return Binding(
        model=details.model,
        revision=details.revision,
        fingerprint=details.fingerprint,
        estimator=verdict.estimator,
        settings=details.settings,
        prompt_template=details.prompt_template,
        on_cut="unscored",
        options=details.options,
    )


def says_nothing(draft: Verdict) -> bool:
    """Whether an answer has neither text nor calls: it ended at once, or it was a call that cannot be read."""
    return is_blank(draft.text) and not draft.tool_calls


_DECIDED = frozenset(
    {"threshold", "confidence", "promised", "enforced", "draft", "decision_id", "calibration_id", "alpha"}
    | {"requested_alpha", "upstream", "familiar", "unfamiliar", "escalated_from"}
)
"""The fields that a decision writes."""


def undecided(verdict: Verdict) -> Verdict:
    """A verdict without the fields of an earlier decision (an annotated answer may come back from a cache)."""
    known = {**VerdictDetails.model_fields, **Verdict.model_fields}
    changes: dict[str, Any] = {name: known[name].default for name in _DECIDED}
    changes |= {"action": "answer", "reason": None if verdict.status == "scored" else verdict.reason}
    nothing = {"action": "deliver", "compared": None, "confidence": None, "promised": False}
    delivered = [number for number, sentence in enumerate(verdict.sentences) if sentence.end > sentence.start]
    places: dict[int | None, int] = {number: place for place, number in enumerate(delivered)}
    kept = [verdict.sentences[number] for number in delivered]
    changes["sentences"] = tuple(
        one.model_copy(update={**nothing, "leans_on": places.get(one.leans_on)}) for one in kept
    )
    return verdict.revised(**changes)


def is_withheld(verdict: Verdict) -> bool:
    """Whether the answer of this stage, or of the last one that it was handed on to, was kept back."""
    while verdict.escalated is not None:
        verdict = verdict.escalated
    return verdict.action == "abstain" and verdict.details.enforced


def escalated(decided: Verdict, answer: str | Verdict) -> Verdict:
    """The verdict with a target's answer in place of its own; a plain string is passed on unscored."""
    if isinstance(answer, str):
        answer = external(answer, estimator=decided.estimator)
    own: dict[str, Any] = {"reasoning": answer.details.reasoning, "tool_calls": answer.tool_calls}
    return with_promise(withheld(decided, text=answer.text, action="escalate", escalated=answer, **own))


def withheld(decided: Verdict, **instead: Any) -> Verdict:
    """The verdict on a draft that is withheld, the answer and all that tells of its parts; `instead` are its fields."""
    nowhere = {"start": 0, "end": 0, "promised": False}
    sentences = tuple(
        one.model_copy(update={**nowhere, "action": "stop" if one.action == "deliver" else one.action})
        for one in decided.sentences
    )
    nothing: dict[str, Any] = {"reasoning": None, "tool_calls": (), "calls": (), "fields": ()}
    return decided.revised(**{**nothing, "draft": decided.text or decided.draft, "sentences": sentences, **instead})


def with_promise(verdict: Verdict) -> Verdict:
    """The verdict with its promise: that of all stages, whichever wrote the text.

    A calibration made after another stage promises something only after that one.
    """
    return verdict.revised(promised=verdict.details.upstream is None and _keeps(verdict))


def _keeps(verdict: Verdict) -> bool:
    """Whether a stage lets the delivered text through, or hands its question on to one that was calibrated for that."""
    if not verdict.details.familiar:  # the target expects familiar questions, too
        return False
    if verdict.escalated is not None:
        return verdict.escalated.details.upstream == verdict.details.calibration_id and _keeps(verdict.escalated)
    if verdict.sentences:
        delivered = [sentence.promised for sentence in verdict.sentences if sentence.action == "deliver"]
        return verdict.action == "answer" and bool(delivered) and all(delivered)
    if verdict.uncertainty is None or verdict.threshold is None:
        return False
    return verdict.action == "answer" and verdict.uncertainty <= verdict.threshold


class Scored(Protocol):
    """A verdict on an answer or on a part of it, or a score on record."""

    @property
    def uncertainty(self) -> float | None:
        """None where there is none."""
        ...


def doubt_of(scored: Scored) -> float:
    """Its uncertainty, to find the least certain of several by: one without a score is less certain than any other."""
    return math.inf if scored.uncertainty is None else scored.uncertainty


# The decision.

_ESTIMATED = "min_confidence decides by an estimate, which promises nothing"
_OWN_CODE = "the model runs code that cannot be compared with that of the calibration (a hook, a replaced method)"
_OTHER_PROMPT = "the answer was given to another prompt (it comes from a cache, say)"


@dataclass(frozen=True)
class Settlement:
    """What happens to a draft.

    "deliver": it goes out; of a part of it, `ranges` are those of its sentences in the draft. Where the mode does not
    withhold, its verdict is advice (`enforced` is False). Else nothing of it goes out: "escalate": the target answers;
    "abstain": the abstain message; "raise": a `LowConfidenceError`.
    """

    kind: Literal["deliver", "escalate", "abstain", "raise"]
    verdict: Verdict
    ranges: tuple[tuple[int, int], ...] = ()


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


# Answers that a limit cut off (`max_tokens`): which of them have a score.
#
# One that ends within its first sentence is seldom right, and often looks sure: copied passages, beginnings. So it
# has no score, by default; with "abstain" no answer that was cut off has one. Which rule holds is decided before labels
# are seen, and bound to the calibration (`Binding.on_cut`): one that was made before these rules scored all of them
# ("score"), and still does. By sentence, the sentence that was cut off is the one without a score.

FIRST_SENTENCE = "a limit (max_tokens) cut it off within its first sentence"
LATER = 'a limit (max_tokens) cut it off, and on_cut is "abstain"'


def why_unscored(text: str, on_cut: OnCut, *, by_sentence: bool = False) -> str | None:
    """Why an answer that a limit cut off has no score, or by sentence the last of its sentences; None where it has."""
    unfinished = is_unfinished(text)
    if on_cut == "score" or (by_sentence and not unfinished):
        return None
    if unfinished and len(sentences(text)) == 1:
        return FIRST_SENTENCE
    return LATER if on_cut == "abstain" else None


def without_cut_score(draft: Verdict, on_cut: OnCut) -> Verdict:
    """The undecided draft; unscored where a limit cut it off, and the rule says so.

    Tool calls and values of a structure are whole or not there, so these drafts keep their scores.
    """
    details = draft.details
    if not isinstance(details.cut, int) or draft.status != "scored" or draft.tool_calls or details.fields:
        return draft
    if (why := why_unscored(draft.text, on_cut, by_sentence=bool(draft.sentences))) is None:
        return draft
    changes = {"status": "unscored", "uncertainty": None, "reason": why}
    if not draft.sentences:
        return draft.revised(**changes)
    last = draft.sentences[-1].model_copy(update={"uncertainty": None, "reason": why})
    return draft.revised(**changes, sentences=(*draft.sentences[:-1], last))


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


# By value of a structure: null takes the place of one that is not let through.


def decided_fields(
    fields: Sequence[FieldVerdict],
    lets_through: Callable[[float | None], bool],
    confidence: Callable[[float | None], float | None],
) -> tuple[tuple[FieldVerdict, ...], float | None]:
    """The values with the decision about each, and the uncertainty by which the answer is judged.

    That is the greatest of the values that go out, where null may replace every other; else the greatest of those
    that may not be missing. None without a value.
    """
    decided = tuple(
        one.model_copy(
            update={
                "action": "deliver" if lets_through(one.uncertainty) else "null",
                "confidence": confidence(one.uncertainty),
            }
        )
        for one in fields
    )
    held = [one for one in decided if one.action == "null"]
    owed = [one for one in held if not one.nullable] or (held if len(held) == len(decided) else [])
    judged = owed or [one for one in decided if one.action == "deliver"]
    return decided, max(judged, key=doubt_of).uncertainty if judged else None


def without_values(verdict: Verdict) -> Verdict:
    """The verdict on a structured answer with null in the place of each value that is withheld.

    A text around the values may tell them, and does not go out.
    """
    held = {one.path for one in verdict.fields if one.action == "null"}
    if verdict.tool_calls:
        (call,) = verdict.tool_calls
        found = json.loads(_nulled(json.dumps(dict(call.arguments)), 0, held))
        return verdict.revised(text="", tool_calls=(replace(call, arguments=found),), draft=None)
    _, (begin, end) = json_in(verdict.text)
    return verdict.revised(text=_nulled(verdict.text[begin:end], 0, held))


def _nulled(text: str, at: int, held: Collection[Path]) -> str:
    for one in reversed(fields_of(text, at)):
        if one.path in held:
            quotes = isinstance(one.value, str) and one.end - one.start > 0 and text[one.start - 1 : one.start] == '"'
            text = f"{text[: one.start - quotes]}null{text[one.end + quotes :]}"
    return text


def json_start(text: str) -> int:
    """Where an answer's JSON begins: at its first bracket, or nowhere."""
    return min((text.find(mark) for mark in "{[" if mark in text), default=len(text))


def json_in(text: str) -> tuple[Any, Span]:
    """The JSON of an answer that has fields, and its place."""
    begin = json_start(text)
    found, end = json.JSONDecoder().raw_decode(text, begin)
    return found, (begin, end)
