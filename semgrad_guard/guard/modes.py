"""The modes of a guard: how its decision is carried out."""

from __future__ import annotations

from typing import Literal, cast, get_args

from semgrad_guard.errors import InputError

Mode = Literal["enforce", "annotate", "observe", "raise"]
"""How a decision is carried out: enforced; written on the answer; only reported; or raised as an error."""

OnUnscored = Literal["abstain", "answer", "escalate"]
"""The action for an answer without a finite score."""

OnUnfamiliar = Literal["threshold", "abstain", "escalate", "raise"]
"""The action for an answer to a prompt unlike those that a policy was calibrated on."""

ABSTAIN_MESSAGE = "I don't know."
"""The default text in the place of a withheld answer."""


def withholds(mode: Mode) -> bool:
    """Whether a mode may keep an answer back, so that nothing of it may leave before it is judged."""
    return mode in ("enforce", "raise")


def require_mode(mode: object) -> Mode:
    """The mode itself.

    Raises:
        InputError: an unknown mode.
    """
    if mode not in get_args(Mode):
        raise InputError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}")
    return cast("Mode", mode)
