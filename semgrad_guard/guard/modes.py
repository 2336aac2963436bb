"""What a guard does with its decision."""

from __future__ import annotations

from typing import Literal, cast, get_args

from semgrad_guard.errors import InputError

Mode = Literal["enforce", "annotate", "observe", "raise"]
"""What a router does with its decision: carry it out; write it on the answer; only report it; raise an error."""

OnUnscored = Literal["abstain", "answer", "escalate"]
"""What becomes of an answer without a finite score."""

OnUnfamiliar = Literal["threshold", "abstain", "escalate", "raise"]
"""What becomes of an answer to a prompt unlike those that a policy was calibrated on."""

ABSTAIN_MESSAGE = "I don't know."
"""What is said where an answer is withheld, unless somebody says otherwise."""


def withholds(mode: Mode) -> bool:
    """Whether a mode may keep an answer back, so that nothing of it may leave before it is judged."""
    return mode in ("enforce", "raise")


def require_mode(mode: object) -> Mode:
    """The mode itself.

    Raises:
        InputError: there is no such mode.
    """
    if mode not in get_args(Mode):
        raise InputError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}")
    return cast("Mode", mode)
