"""`settle`: what becomes of a scored draft. Pure: records in, a record out; the drivers in `flow.py` carry it out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from semgrad_guard.calibration.prompt_shape import PromptForm
from semgrad_guard.guard.modes import Mode, withholds
from semgrad_guard.guard.policy import Policy
from semgrad_guard.guard.verdicts import decide, is_withheld, without_text
from semgrad_guard.records import Verdict


@dataclass(frozen=True)
class Deliver:
    """The draft goes out. Where the mode does not withhold, its verdict is advice (`enforced` is False)."""

    verdict: Verdict


@dataclass(frozen=True)
class Escalate:
    """The target is asked; nothing of the draft goes out."""

    verdict: Verdict


@dataclass(frozen=True)
class Abstain:
    """The abstain message goes out in the draft's place."""

    verdict: Verdict


@dataclass(frozen=True)
class Raise:
    """A `LowConfidenceError` goes out in the draft's place."""

    verdict: Verdict


Settlement = Deliver | Escalate | Abstain | Raise


def settle(
    draft: Verdict,
    policy: Policy,
    mode: Mode,
    *,
    can_escalate: bool,
    prompt: PromptForm | None = None,
    trusted: bool = False,
    strange: tuple[str, ...] = (),
) -> Settlement:
    """What becomes of a draft.

    Args:
        draft: the scored draft, undecided; its `text` is the answer.
        policy: what to let through.
        mode: what to do with the decision.
        can_escalate: whether there is a target to ask.
        prompt: what the prompt looked like; without it nothing is promised.
        trusted: what the draft does may go out whatever its score (an agent's calls of harmless tools): the decision
            about that is advice. Text that stands beside it is let through only by its score.
        strange: why the question is unlike those of the calibration, beside what its prompt shows.

    Raises:
        BindingMismatchError: the policy was calibrated for another model, estimator, setting or template.
        UnfamiliarPromptError: the prompt is unlike those calibrated on, and the policy is to raise.
    """
    if is_withheld(draft):  # by another guard: there is no answer left to judge
        return Deliver(draft)
    if not withholds(mode) and policy.on_unfamiliar == "raise":
        policy = replace(policy, on_unfamiliar="abstain")  # advice is given, not raised
    verdict = decide(draft, policy, can_escalate=can_escalate, prompt=prompt, strange=strange)
    if not withholds(mode):
        return Deliver(verdict.model_copy(update={"enforced": False}))
    if trusted and verdict.action != "answer":
        return Deliver(without_text(verdict))
    if verdict.action == "answer":
        return Deliver(verdict)
    if mode == "raise":
        return Raise(verdict)
    return Escalate(verdict) if verdict.action == "escalate" else Abstain(verdict)
