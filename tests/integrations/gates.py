"""The scenarios of a gate of tool calls, for the tests of both frameworks."""

from __future__ import annotations

from typing import Any

from semgrad_guard import ToolCall, Verdict
from semgrad_guard.records import CallVerdict

SURE, DOUBTFUL = 0.1, 9.0
Call = tuple[str, dict[str, Any], float | None]
"""A tool, its arguments, and the uncertainty of the call."""


def pay(to: str, uncertainty: float | None = SURE) -> Call:
    """A payment."""
    return "pay", {"to": to}, uncertainty


CLOCK: Call = ("clock", {}, SURE)

SCENARIOS: dict[str, tuple[list[list[Call]], list[str]]] = {
    "sure": ([[pay("Ann")]], ["Ann"]),
    "doubtful": ([[pay("Ann", DOUBTFUL)]], []),
    "without a score": ([[pay("Ann", None)]], []),
    "each by itself": ([[pay("Bob", DOUBTFUL), pay("Ann"), CLOCK]], ["Ann", "clock"]),
    "the same twice in a message, once in doubt": ([[pay("Ann"), pay("Ann", DOUBTFUL)]], []),
    "written again, twenty times": ([[pay("Bob", DOUBTFUL)], *([pay(f"Bob{number}")] for number in range(20))], []),
    "a result next to the block": ([[pay("Bob", DOUBTFUL), CLOCK], [pay("Bob")]], ["clock"]),
    "a later result": ([[pay("Bob", DOUBTFUL)], [CLOCK], [pay("Ann")]], ["clock"]),
    "twice the same": ([[pay("Ann")], [pay("Ann", DOUBTFUL)]], ["Ann"]),
}


def verdict_on(calls: list[Call], *, text: str = "", estimator: str = "gnll", model: str = "m") -> Verdict:
    """The verdict on a message with these calls."""
    scored = tuple(CallVerdict(digest=ToolCall(name, args).digest, uncertainty=own) for name, args, own in calls)
    return Verdict.of(
        status="scored", action="answer", text=text, estimator=estimator, uncertainty=1.0, model=model, calls=scored
    )
