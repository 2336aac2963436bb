"""`Policy`, which has the threshold and what it was calibrated on, and `Terms`: how a decision is carried out."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.calibration.binding import FIELDS, QUESTIONS, Binding
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.calibration_set import read_rate
from semgrad_guard.decision_log.entries import DecisionSink
from semgrad_guard.declared import declared, is_score, require_valid
from semgrad_guard.engine.interruption import Stop
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.records import Action, Verdict
from semgrad_guard.settings import (
    ABSTAIN_MESSAGE,
    CLOSING_LINE,
    DeliveryOptions,
    JudgedBy,
    KeepDraft,
    MinConfidence,
    Mode,
    OnCut,
    OnDoubt,
    OnOtherOptions,
    OnUnfamiliar,
    OnUnscored,
    PolicyOptions,
    Timeout,
)

AbstainMessage = str | Callable[[Verdict], str]


_LISTENERS = {
    "monitor": ("add", "a DriftMonitor"),
    "notify": ("__call__", "a function of the verdict"),
    "log": ("write", "a DecisionLog"),
}


def require_listener(name: str, given: object) -> None:
    """Refuse what cannot take decisions; None takes none.

    Raises:
        InputError: it is of another kind.
    """
    method, kind = _LISTENERS[name]
    if given is not None and not callable(getattr(given, method, None)):
        raise InputError(f"{name} must be {kind}, not a {type(given).__name__}")


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
        if self.min_confidence is not None and self.on_no_threshold == "reachable":
            raise InputError('min_confidence promises nothing, and on_no_threshold="reachable" promises: leave one out')
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
                threshold = self.calibration.surest(self.min_confidence)
        elif self.on_no_threshold == "reachable":
            raise InputError(
                'on_no_threshold="reachable" is about a calibration, and none is given: give one, or leave it out'
            )
        elif threshold is None:
            raise InputError(
                "A policy needs a threshold: Policy(threshold=...) or Policy.from_calibration(calibration)."
            )
        object.__setattr__(self, "threshold", threshold)

    @classmethod
    def from_calibration(cls, calibration: Calibration, **options: Any) -> Policy:
        """A policy that keeps the calibration's promise; with `min_confidence` one that promises nothing.

        `options` are the policy's other fields.

        Raises:
            InputError: it is not a calibration.
            CalibrationError: with `on_no_threshold="reachable"`, its labels support no promise.
        """
        given: Any = calibration
        if not isinstance(given, Calibration):
            raise InputError(f"a policy is made from a Calibration (Calibration.load(path)), not {given!r:.60}")
        return cls(calibration=calibration, **options)

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
        return QUESTIONS.is_of(self.binding)

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
        _require_same_unit(self.calibration, binding)
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


def _require_same_unit(calibration: Calibration, binding: Binding) -> None:
    """Refuse a threshold for whole answers about sentences, and the other way round: its promise is another.

    Raises:
        BindingMismatchError: the calibration is about another unit than the scores, or another `on_doubt`.
    """
    if QUESTIONS.is_of(calibration.binding) and not QUESTIONS.is_of(binding):
        raise BindingMismatchError(
            f"The calibration {calibration.id} is about whole questions, and this answer is not part of one. Ask the "
            "chain or engine that was calibrated through guarded(...), or within asking(router)."
        )
    judged: Any = (binding.settings or {}).get("on_doubt")
    calibrated = None if calibration.sentences is None else calibration.sentences.on_doubt
    if judged != calibrated:
        raise BindingMismatchError(
            f"The calibration {calibration.id} is about {_unit(calibrated)}, and the answers are judged as "
            f"{_unit(judged)}. Calibrate again in that form, or give the guard the calibration's."
        )


def _unit(on_doubt: str | None) -> str:
    return "whole answers" if on_doubt is None else f'sentences with on_doubt="{on_doubt}"'


def judged_by(calibration: Calibration | None, by: JudgedBy | None, on_doubt: OnDoubt | None) -> OnDoubt | None:
    """The action at a doubtful sentence, by the settings or else the calibration; None: whole answers are judged.

    Raises:
        InputError: a setting is none of its choices, or `on_doubt` is given for whole answers.
    """
    for name, kind, given in (("by", JudgedBy, by), ("on_doubt", OnDoubt, on_doubt)):
        if given is not None:
            declared(name, kind).require(given)
    made = None if calibration is None or FIELDS.is_of(calibration.binding) else calibration.sentences
    calibrated = None if made is None else made.on_doubt
    if (by or ("answer" if calibrated is None else "sentence")) == "sentence":
        return on_doubt or calibrated or "stop"
    if on_doubt is not None:
        raise InputError(f'on_doubt="{on_doubt}" is about sentences: judge answers by="sentence", or leave it out')
    return None


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
        for name in _LISTENERS:
            require_listener(name, getattr(self, name))

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
        """The verdict as functions of the user get it: no withheld text, nor a target's, unless drafts are kept."""
        if self.keep_draft:
            return verdict
        target = None if verdict.escalated is None else self.shown(verdict.escalated)
        return verdict.revised(draft=None, escalated=target)


# The promise of a chain of stages: the error rate among all delivered answers, whichever stage delivered them.
#
# Stage 1 delivers what its threshold lets through and hands the rest to stage 2, and so on. Let stage i be calibrated
# at (alpha_i, delta_i) on questions that reach stage i.
#
# Claim. With probability at least 1 - sum delta_i over all calibration sets, the error rate among all answers delivered
# is at most max alpha_i.
#
# Proof. Fix the thresholds of the stages before i: then "reaches stage i" is a fixed property of a question, the
# calibration set of stage i is an independent sample of the questions that have it, and stage i's own promise fails
# with probability at most delta_i. This holds for every value of the earlier thresholds, hence also for the random
# ones. By the union bound no stage fails, with probability at least 1 - sum delta_i. Each question is delivered by at
# most one stage, so the overall error rate is a weighted mean of the stages' error rates, each at most its alpha_i: at
# most max alpha_i.
#
# Assumption. The questions that calibrate stage i are drawn from the same population as later questions, independently
# of the earlier calibration sets, and passed through the earlier stages as they will run: every question that those
# hand on, and no other. Prompts unlike those of the calibration are not such draws: each answer's verdict tells.
# Calibrating stage 2 on *all* questions breaks the promise, because the ones handed on are harder. Answers delivered
# without a score are outside it.
#
# Why: docs/decisions.md#0120


class Promise(BaseModel):
    """The error rate among the answers that it covers is at most `alpha`, with probability at least 1 - `delta`.

    It covers all delivered answers where nothing unfamiliar or doubtful is delivered; else the answers whose verdict
    has `promised` True, and no other.
    """

    model_config = ConfigDict(frozen=True)

    alpha: float = Field(gt=0, lt=1)
    delta: float = Field(gt=0, le=1)
    covers: Literal["answers with promised=True", "everything delivered"] = "answers with promised=True"


def split_delta(delta: float, stages: int) -> tuple[float, ...]:
    """Each stage's equal share of `delta`, which lies in (0, 1), for a chain of `stages` stages."""
    total = read_rate(delta, "delta")
    if stages < 1:
        raise InputError(f"A chain has at least one stage, not {stages!r}.")
    return (total / stages,) * stages


def combined_promise(policies: Sequence[Policy], *, enforced: bool = True) -> Promise | None:
    """The promise for a chain's delivered answers, its policies given in order; None where there is none.

    There is none where a stage is uncalibrated, decides by `min_confidence`, or its calibration is about sentences,
    found no threshold, has no shape of its prompts or was graded by rules that have changed since, or where it lets
    answers without a score through. A stage that was not calibrated on the questions that the stage before it hands on
    is an error, not a weaker promise.
    `enforced`: every stage withholds the answers that it does not let through; without that, or where a policy decides
    about unfamiliar prompts by the threshold, more is delivered than the promise covers.
    """
    if not policies:
        raise InputError("A chain has at least one stage: pass its policies in order.")
    calibrations = [policy.calibration for policy in policies]
    stages = [calibration for calibration in calibrations if calibration is not None]
    unscored = [policy.decide(None, can_escalate=False) for policy in policies]
    if len(stages) < len(policies) or "answer" in unscored or any(p.min_confidence for p in policies):
        return None

    def those_after(stage: str | None) -> str:
        if stage is None:
            return "all questions (upstream is None)"
        return f"the questions that calibration {stage} did not let through"

    for position, stage in enumerate(stages, start=1):
        made_after = None if stage.binding is None else stage.binding.upstream
        needed = None if position == 1 else stages[position - 2].id
        if made_after != needed:
            follows = "no other stage" if needed is None else f"calibration {needed}"
            raise BindingMismatchError(
                f"Stage {position} ({stage.id}) follows {follows} but was calibrated on {those_after(made_after)}. "
                f"Calibrate it again on {those_after(needed)}, with Binding(upstream={needed!r})."
            )
    if any(stage.sentences is not None or stage.shape is None or stage.threshold is None for stage in stages):
        return None
    if any(stage.binding is not None and stage.binding.outdated_grader for stage in stages):
        return None
    total = math.fsum(stage.delta for stage in stages)
    whole = enforced and not any(policy.delivers_unfamiliar for policy in policies)
    return Promise(
        alpha=max(stage.alpha for stage in stages),
        delta=min(1.0, total),
        covers="everything delivered" if whole else "answers with promised=True",
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
