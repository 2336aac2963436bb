"""`Policy`: the action for an answer, by its uncertainty: answer, escalate or abstain."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_record import Calibration, is_score
from semgrad_guard.calibration.call_options import unlike_calls
from semgrad_guard.declared import Option, require_valid
from semgrad_guard.errors import InputError
from semgrad_guard.records import Action, PromptForm
from semgrad_guard.settings import Mode, OnUnfamiliar, OnUnscored, PolicyOptions


@dataclass(frozen=True, kw_only=True)
class Policy(PolicyOptions):
    """Let through uncertainties at or below `threshold`; escalate or abstain above it.

    `Policy(threshold=x)` is bare: no promise, no confidence. `Policy.from_calibration(calibration)` carries the
    calibration's threshold (None lets nothing through), its id, its P(correct) and the binding to check answers
    against. `on_unscored` is the action for an answer without a finite score: "answer" lets it through *outside* any
    promise.

    `on_unfamiliar` is for an answer to a prompt that is unknown, or unlike those that the policy was calibrated on:
    "threshold" decides by the score as usual, outside any promise; "abstain" and "escalate" let nothing through;
    "raise" raises `UnfamiliarPromptError`.

    Raises:
        InputError: an argument is not as described, or `on_unfamiliar` needs a shape that the calibration lacks.
        CalibrationError: the calibration was changed after it was made.
    """

    on_unfamiliar: Annotated[OnUnfamiliar, Option("What to do with an answer to an unfamiliar prompt.")] = "threshold"
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        require_valid(self)
        if self.on_unfamiliar != "threshold" and (self.calibration is None or self.calibration.shape is None):
            raise InputError(
                f"on_unfamiliar={self.on_unfamiliar!r} needs a calibration that knows the shape of its prompts, or "
                "nothing would ever be let through. Make one with `semgrad-guard calibrate`."
            )
        if self.calibration is not None:
            self.calibration.require_intact()
        object.__setattr__(self, "threshold", _threshold(self.threshold, self.calibration))

    @classmethod
    def from_calibration(
        cls,
        calibration: Calibration,
        *,
        on_unscored: OnUnscored = PolicyOptions.on_unscored,
        on_unfamiliar: OnUnfamiliar = "threshold",
    ) -> Policy:
        """A policy that keeps the calibration's promise.

        Raises:
            InputError: it is not a calibration.
        """
        given: Any = calibration
        if not isinstance(given, Calibration):
            raise InputError(f"a policy is made from a Calibration (Calibration.load(path)), not {given!r:.60}")
        return cls(
            threshold=calibration.threshold,
            on_unscored=on_unscored,
            on_unfamiliar=on_unfamiliar,
            calibration=calibration,
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
    def compares(self) -> bool:
        """Whether scores are compared with a threshold; `lets_every_score_through` compares none."""
        return self.threshold != sys.float_info.max

    @property
    def recorded_threshold(self) -> float | None:
        """The threshold in records: None where a calibration found none, and where none is compared with."""
        return self.threshold if self.compares else None

    def decide(self, uncertainty: float | None, *, can_escalate: bool) -> Action:
        """The action for one answer; `can_escalate` tells whether there is a target."""
        elsewhere: Action = "escalate" if can_escalate else "abstain"
        if not is_score(uncertainty):
            return elsewhere if self.on_unscored == "escalate" else self.on_unscored
        return "answer" if self.lets_through(uncertainty) else elsewhere

    def unfamiliar(
        self,
        prompt: PromptForm | None,
        *,
        cut: int | str | None = None,
        tokens: int = 0,
        text: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        """The differences from the calibration, in words: of the prompt, of the place where the answer ends (see
        `Binding.cut_elsewhere`), and of a call to another server (see `unlike_calls`). Empty without a calibration."""
        if self.calibration is None:
            return ()
        elsewhere = None if self.binding is None else self.binding.cut_elsewhere(cut, tokens=tokens, text=text)
        return (
            *self.calibration.unfamiliar(prompt),
            *(() if elsewhere is None else (elsewhere,)),
            *unlike_calls(options, self.binding, tokens=tokens, text=text),
        )

    def lets_through(self, uncertainty: float | None) -> bool:
        """Whether a finite uncertainty is at or below the threshold."""
        return is_score(uncertainty) and self.threshold is not None and uncertainty <= self.threshold

    def confidence(self, uncertainty: float | None) -> float | None:
        """P(correct) in [0, 1] from the calibration; None for a bare policy or without a finite score."""
        return None if self.calibration is None else self.calibration.confidence(uncertainty)

    def check(self, binding: Binding) -> None:
        """Raise `BindingMismatchError` unless the calibration was made for `binding`, an answer's record.

        A name for the prompts ("chat" in "chat@8924c11b89e2") binds only where the shape of the prompts is not known.
        """
        if self.calibration is None or self.calibration.binding is None:
            return
        mine = self.calibration.binding
        if self.calibration.shape is not None:
            mine, binding = mine.without_prompt_name(), binding.without_prompt_name()
        mine.require(binding)


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


def _threshold(value: Any, calibration: Calibration | None) -> float | None:
    """The threshold as a float, checked; a calibration's own threshold cannot be overridden."""
    if value is None:
        if calibration is None:
            raise InputError(
                "A policy needs a threshold: Policy(threshold=...) or Policy.from_calibration(calibration)."
            )
        return calibration.threshold
    if calibration is not None and float(value) != calibration.threshold:
        raise InputError(
            f"The threshold {value!r} is not the calibration's ({calibration.threshold!r}): the promise would "
            "not hold. Use Policy.from_calibration(calibration), or Policy(threshold=...) without a calibration."
        )
    return float(value)
