"""The promise of a chain of stages: the error rate among all delivered answers, whichever stage delivered them.

Stage 1 delivers what its threshold lets through and hands the rest to stage 2, and so on. Let stage i be calibrated at
(alpha_i, delta_i) on questions that reach stage i.

Claim. With probability at least 1 - sum delta_i over all calibration sets, the error rate among all answers delivered
is at most max alpha_i.

Proof. Fix the thresholds of the stages before i: then "reaches stage i" is a fixed property of a question, the
calibration set of stage i is an independent sample of the questions that have it, and stage i's own promise fails with
probability at most delta_i. This holds for every value of the earlier thresholds, hence also for the random ones. By
the union bound no stage fails, with probability at least 1 - sum delta_i. Each question is delivered by at most one
stage, so the overall error rate is a weighted mean of the stages' error rates, each at most its alpha_i: at most
max alpha_i.

Assumption. The questions that calibrate stage i are drawn from the same population as later questions, independently of
the earlier calibration sets, and passed through the earlier stages as they will run: every question that those hand on,
and no other. Prompts unlike those of the calibration are not such draws: each answer's verdict tells.
Calibrating stage 2 on *all* questions breaks the promise, because the ones handed on are harder. Answers
delivered without a score are outside it.

Why: docs/decisions.md#0120
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.calibration.calibration_set import read_rate
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard.policy import Policy


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
    for position, stage in enumerate(stages, start=1):
        made_after = None if stage.binding is None else stage.binding.upstream
        needed = None if position == 1 else stages[position - 2].id
        if made_after != needed:
            follows = "no other stage" if needed is None else f"calibration {needed}"
            raise BindingMismatchError(
                f"Stage {position} ({stage.id}) follows {follows} but was calibrated on {_questions(made_after)}. "
                f"Calibrate it again on {_questions(needed)}, with Binding(upstream={needed!r})."
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


def _questions(calibration_id: str | None) -> str:
    if calibration_id is None:
        return "all questions (upstream is None)"
    return f"the questions that calibration {calibration_id} did not let through"
