"""The decision about an answer: by its uncertainty, the familiarity of its prompt, and the mode of the guard.

`Policy` has the threshold and what it was calibrated on, `Terms` adds the mode and how a decision is carried out.
`decide` makes the action, `settle` what happens to the draft. Nothing else decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_record import Calibration, is_score
from semgrad_guard.decision_log.entries import DecisionSink
from semgrad_guard.declared import require_valid
from semgrad_guard.engine.interruption import Stop
from semgrad_guard.errors import InputError
from semgrad_guard.guard.cut_answers import without_cut_score
from semgrad_guard.guard.familiarity import as_fields, is_of_fields, is_of_question, require_same_unit, unlike
from semgrad_guard.guard.parts import decided_fields, without_values
from semgrad_guard.guard.sentences import decided_sentences, with_delivered
from semgrad_guard.guard.verdicts import (
    UNSCORED,
    Settlement,
    abstained,
    binding_of,
    is_withheld,
    says_nothing,
    with_promise,
    without_text,
)
from semgrad_guard.records import Action, PromptForm, Verdict
from semgrad_guard.settings import (
    ABSTAIN_MESSAGE,
    CLOSING_LINE,
    DeliveryOptions,
    KeepDraft,
    MinConfidence,
    Mode,
    OnCut,
    OnNoThreshold,
    OnOtherOptions,
    OnUnfamiliar,
    OnUnscored,
    PolicyOptions,
    Timeout,
)

AbstainMessage = str | Callable[[Verdict], str]


_ESTIMATED = "min_confidence decides by an estimate, which promises nothing"
_LISTENERS = (
    ("monitor", "add", "a DriftMonitor"),
    ("notify", "__call__", "a function of the verdict"),
    ("log", "write", "a DecisionLog"),
)


@dataclass(frozen=True, kw_only=True)
class Policy(PolicyOptions):
    """Let through uncertainties at or below `threshold`; escalate or abstain above it.

    `Policy(threshold=x)` is bare: no promise, no confidence. `Policy.from_calibration(calibration)` carries the
    calibration's threshold (None lets nothing through), its id, its P(correct) and the binding to check answers
    against. `on_unscored` is the action for an answer without a finite score: "answer" lets it through *outside* any
    promise.

    `on_unfamiliar` is for an answer to a prompt that is unknown, or unlike those that the policy was calibrated on:
    "threshold" decides by the score as usual, outside any promise; "abstain" lets nothing through.

    `on_other_options` is for an answer that was decoded otherwise than those of the calibration, that had to be JSON,
    or could call tools: "refuse" raises `BindingMismatchError`, "deliver" treats it as one to an unfamiliar prompt.

    `on_no_threshold` is for a calibration without a threshold: "abstain" delivers nothing, "reachable" what its labels
    support, under the promise that they support (`calibration` is then `calibration.reached()`).

    `on_cut` is for answers that a limit cut off (`max_tokens`): one that ends within its first sentence
    has no score ("unscored", the default), none has one ("abstain"), or each has ("score"). A bound calibration has
    decided it.

    `min_confidence` takes the place of the calibration's threshold: let through what is right with at least this
    probability, by the calibration's P(correct). That is an estimate, so nothing is promised.

    Raises:
        InputError: an argument is not as described, or `on_unfamiliar` needs a shape that the calibration lacks.
        CalibrationError: the calibration was changed after it was made, or its labels support no promise.
    """

    on_unfamiliar: OnUnfamiliar = "threshold"
    on_other_options: OnOtherOptions = "refuse"
    calibration: Calibration | None = None
    min_confidence: MinConfidence = None

    def __post_init__(self) -> None:
        require_valid(self)
        if self.min_confidence is not None and (self.calibration is None or self.on_unfamiliar != "threshold"):
            raise InputError(
                "min_confidence needs a calibration, whose P(correct) it reads, and promises nothing: "
                "Policy(calibration=..., min_confidence=0.8), with on_unfamiliar as it is by default"
            )
        if self.on_unfamiliar != "threshold" and (self.calibration is None or self.calibration.shape is None):
            raise InputError(
                f"on_unfamiliar={self.on_unfamiliar!r} needs a calibration that knows the shape of its prompts, or "
                "nothing would ever be let through. Make one with `semgrad-guard calibrate`."
            )
        object.__setattr__(self, "on_cut", _on_cut(self.binding, self.on_cut))
        given: Any = self.threshold
        threshold = None if given is None else float(given)
        if self.calibration is not None:
            self.calibration.require_intact()
            if self.on_no_threshold == "reachable":
                object.__setattr__(self, "calibration", self.calibration.reached())
            if threshold is not None and threshold != self.calibration.threshold:
                raise InputError(
                    f"The threshold {given!r} is not the calibration's ({self.calibration.threshold!r}): the promise "
                    "would not hold. Use Policy.from_calibration(calibration), or Policy(threshold=...) without a "
                    "calibration."
                )
            threshold = self.calibration.threshold
            if self.min_confidence is not None:
                threshold = _surest(self.calibration, self.min_confidence)
        elif threshold is None:
            raise InputError(
                "A policy needs a threshold: Policy(threshold=...) or Policy.from_calibration(calibration)."
            )
        object.__setattr__(self, "threshold", threshold)

    @classmethod
    def from_calibration(
        cls,
        calibration: Calibration,
        *,
        on_unscored: OnUnscored = PolicyOptions.on_unscored,
        on_unfamiliar: OnUnfamiliar = "threshold",
        on_other_options: OnOtherOptions = "refuse",
        on_no_threshold: OnNoThreshold = PolicyOptions.on_no_threshold,
        on_cut: OnCut | None = PolicyOptions.on_cut,
        min_confidence: MinConfidence = None,
    ) -> Policy:
        """A policy that keeps the calibration's promise; with `min_confidence` one that promises nothing.

        Raises:
            InputError: it is not a calibration.
            CalibrationError: with `on_no_threshold="reachable"`, its labels support no promise.
        """
        given: Any = calibration
        if not isinstance(given, Calibration):
            raise InputError(f"a policy is made from a Calibration (Calibration.load(path)), not {given!r:.60}")
        return cls(
            on_unscored=on_unscored,
            on_unfamiliar=on_unfamiliar,
            on_other_options=on_other_options,
            on_no_threshold=on_no_threshold,
            on_cut=on_cut,
            calibration=calibration,
            min_confidence=min_confidence,
        )

    @property
    def calibration_id(self) -> str | None:
        """The calibration's id; None for a bare policy."""
        return None if self.calibration is None else self.calibration.id

    @property
    def binding(self) -> Binding | None:
        """The calibration's binding; None for a bare policy or an unbound calibration."""
        return None if self.calibration is None else self.calibration.binding

    @property
    def alpha(self) -> float | None:
        """The promised error rate; None where nothing is promised."""
        promises = self.threshold is not None and self.min_confidence is None
        return self.calibration.alpha if self.calibration is not None and promises else None

    @property
    def is_about_questions(self) -> bool:
        """Whether the threshold is for whole questions, each of which may take several answers."""
        return is_of_question(self.binding)

    @property
    def compares(self) -> bool:
        """Whether scores are compared with a threshold; `lets_every_score_through` compares none."""
        return self.threshold != sys.float_info.max

    @property
    def recorded_threshold(self) -> float | None:
        """The threshold in records: None where a calibration found none, and where none is compared with."""
        return self.threshold if self.compares else None

    @property
    def delivers_unfamiliar(self) -> bool:
        """Whether an answer to an unfamiliar prompt may be delivered, outside any promise."""
        return self.on_unfamiliar == "threshold"

    def decide(self, uncertainty: float | None, *, can_escalate: bool) -> Action:
        """The action for one answer; `can_escalate` tells whether there is a target."""
        elsewhere: Action = "escalate" if can_escalate else "abstain"
        if not is_score(uncertainty):
            return elsewhere if self.on_unscored == "escalate" else self.on_unscored
        return "answer" if self.lets_through(uncertainty) else elsewhere

    def lets_through(self, uncertainty: float | None) -> bool:
        """Whether a finite uncertainty is at or below the threshold."""
        return is_score(uncertainty) and self.threshold is not None and uncertainty <= self.threshold

    def confidence(self, uncertainty: float | None) -> float | None:
        """P(correct) in [0, 1] from the calibration; None for a bare policy or without a finite score."""
        return None if self.calibration is None else self.calibration.confidence(uncertainty)

    def check(self, binding: Binding, *, options: bool = True) -> tuple[str, ...]:
        """Raise `BindingMismatchError` unless the calibration was made for `binding`, an answer's record.

        Without `options` an answer may have others than those of the calibration: the differences, in words.
        A name for the prompts ("chat" in "chat@8924c11b89e2") binds only where the shape of the prompts is not known.
        """
        if self.calibration is None:
            return ()
        require_same_unit(self.calibration, binding)
        mine = self.calibration.binding
        if mine is None:
            return ()
        if self.calibration.shape is not None:
            mine, binding = mine.without_prompt_name(), binding.without_prompt_name()
        (mine if options else mine.with_options_of(binding)).require(binding)
        return () if options else mine.in_words(binding)


def _on_cut(binding: Binding | None, given: OnCut | None) -> OnCut:
    """The rule about answers that a limit cut off: the calibration's, or the given one.

    Raises:
        InputError: they differ.
    """
    if binding is None:
        return given or "unscored"
    bound = binding.on_cut or "score"
    if given not in (None, bound):
        raise InputError(
            f"on_cut={given!r} is another rule than that of the calibration ({bound!r}): it is chosen before labels "
            "are seen. Leave it out, or calibrate again with it."
        )
    return bound


def _surest(calibration: Calibration, confidence: float) -> float | None:
    """The greatest score at which P(correct) is at least this; None where it is at no score."""
    right = ((score, calibration.confidence(score)) for score in calibration.scores)
    return max((score for score, own in right if own is not None and own >= confidence), default=None)


def withholds(mode: Mode) -> bool:
    """Whether a mode may keep an answer back, so that nothing of it may leave before it is judged."""
    return mode in ("enforce", "raise")


def require_policy(policy: object) -> Policy:
    """The policy itself; callers may have no type checker.

    Raises:
        InputError: it is not a policy.
    """
    if not isinstance(policy, Policy):
        raise InputError("a guard needs a policy: Policy(threshold=...) or Policy.from_calibration(calibration)")
    return policy


def lets_every_score_through(on_unscored: OnUnscored) -> Policy:
    """The policy where none is given: only answers without a score are decided about."""
    return Policy(threshold=sys.float_info.max, on_unscored=on_unscored)


@dataclass(frozen=True, kw_only=True)
class Terms(DeliveryOptions):
    """How a guard decides, and how it carries the decision out.

    Args:
        policy: which scores to let through.
        mode: "enforce", "annotate" or "raise".
        can_escalate: whether there is a target.
        abstain_message: delivered in the place of an answer that is neither let through nor escalated; a function gets
            the verdict, without the withheld text unless drafts are kept.
        keep_draft: whether metadata may hold withheld text.
        on_error: where a target fails or is late; "abstain" also for a deadline that the model itself does not meet,
            and for an inner engine that fails.
        timeout: seconds for generating, scoring and escalating together; None: no limit.
        monitor: watches the scores for drift.
        notify: called with every verdict, without the withheld text unless drafts are kept.
        log: records every decision; the verdict then carries its `decision_id`.
        part: makes what goes out of an answer that is let through, and its verdict, of a part of it within these
            ranges; without it no object goes out for a part.
        closing_line: delivered behind an answer that ends before a doubtful sentence.

    Raises:
        InputError: an argument is not as described.
    """

    policy: Policy
    can_escalate: bool = False
    abstain_message: AbstainMessage = ABSTAIN_MESSAGE
    keep_draft: KeepDraft = False
    timeout: Timeout = None
    monitor: DriftMonitor | None = None
    notify: Callable[[Verdict], None] | None = None
    log: DecisionSink | None = None
    part: Callable[[Verdict, Any, tuple[tuple[int, int], ...]], tuple[Verdict, Any]] | None = None
    closing_line: str = CLOSING_LINE

    def __post_init__(self) -> None:
        require_policy(self.policy)
        require_valid(self)
        if not isinstance(self.abstain_message, str) and not callable(self.abstain_message):
            raise InputError("abstain_message is a text, or a function of the verdict")
        for name, method, kind in _LISTENERS:
            given = getattr(self, name)
            if given is not None and not callable(getattr(given, method, None)):
                raise InputError(f"{name} must be {kind}, not a {type(given).__name__}")

    @property
    def withholds(self) -> bool:
        """Whether an answer may be kept back, so that nothing of it may leave before it is judged."""
        return withholds(self.mode)

    @property
    def raises(self) -> bool:
        """Whether an error goes out in the place of an answer that is not let through."""
        return self.mode == "raise"

    @property
    def delivers_early(self) -> bool:
        """Whether sentences may leave before their answer ends: nothing that only its end can tell withholds it."""
        return self.mode == "enforce" and self.policy.delivers_unfamiliar

    @property
    def replaces_failed(self) -> bool:
        """Whether the abstain message goes out where there is no draft: its author failed, or was late."""
        return self.on_error == "abstain" and self.mode == "enforce"

    def stop(self) -> Stop:
        """The deadline of one call, from now on."""
        return Stop(self.timeout)

    def shown(self, verdict: Verdict) -> Verdict:
        """The verdict as functions of the user get it: without the withheld text, unless drafts are kept."""
        return verdict if self.keep_draft else verdict.revised(draft=None)

    def words(self, verdict: Verdict) -> str:
        """The abstain message for a verdict. A function gets it without the withheld text, unless drafts are kept.

        Raises:
            InputError: a function returned something else than a text.
        """
        given = self.shown(abstained(verdict, ""))
        text = self.abstain_message if isinstance(self.abstain_message, str) else self.abstain_message(given)
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            raise InputError(f"abstain_message must return a text, not a {type(text).__name__}")
        return text


def settle(
    draft: Verdict,
    terms: Terms,
    *,
    prompt: PromptForm | None = None,
    trusted: bool = False,
    whole: bool = False,
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
        return Settlement("deliver", without_text(verdict))
    if verdict.action == "answer":
        return Settlement("deliver", without_values(verdict))
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
    by_field = is_of_fields(policy.calibration)
    if by_field:
        draft = draft.revised(settings=as_fields(draft.details.settings))
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
