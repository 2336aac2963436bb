"""A gate lets single calls of tools run, by the uncertainty of the tokens in which they were written."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from semgrad_guard.calibration import Binding, Calibration, calibrate_runs
from semgrad_guard.calibration.binding import CALLS
from semgrad_guard.decision_log.entries import DecisionSink
from semgrad_guard.declared import names_in
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.guard.parts import judged
from semgrad_guard.guard.timing import Steps, Work
from semgrad_guard.guard.verdicts import binding_of, doubt_of
from semgrad_guard.records import ToolCall, Verdict

BLOCKED_WORDS = "Not run: it is not sure enough that this call of {tool} is right. Ask the user, or look first."
"""In the place of a blocked call's result. It tells no score."""


class CallGate:
    """A rule for single calls of tools; a front knows which calls are made, and which tools are closed.

    Raises:
        InputError: the rule is not about the tokens of calls, and the calls are not `scored_elsewhere`.
    """

    def __init__(
        self,
        rule: Calibration,
        *,
        trusted: Collection[str] = (),
        words: str = BLOCKED_WORDS,
        log: DecisionSink | None = None,
        scored_elsewhere: bool = False,
    ) -> None:
        if not scored_elsewhere and not CALLS.is_of(rule.binding):
            raise InputError(
                "this rule is not about tokens of tool calls: make one by calibrate_tool_calls, or give the score that "
                "it is about"
            )
        self.rule, self.words, self.log = rule.require_intact(), words, log
        self.trusted = names_in(trusted, "trusted")

    def score_of(self, verdict: Verdict | None, call: ToolCall) -> float | None:
        """The uncertainty of a call; None where it was not written so, or has no score.

        Raises:
            BindingMismatchError: it was scored in another way than the calls of the calibration.
        """
        uncertainty, bound = _score_of(verdict, call)
        if bound is not None and self.rule.binding is not None:
            self.rule.binding.require(bound)
        return uncertainty

    def judged(self, call: ToolCall, uncertainty: float | None) -> Steps[bool]:
        """Whether a call may run; a row of the log, where there is one."""
        text = json.dumps({"name": call.name, "args": dict(call.arguments)}, default=repr)
        judging = partial(judged, self.rule, uncertainty, text=text, log=self.log)
        return judging() if self.log is None else (yield Work(judging))

    def words_for(self, tool: str) -> str:
        """What the model reads in the place of a blocked call's result."""
        return self.words.replace("{tool}", tool)


def _score_of(verdict: Verdict | None, call: ToolCall) -> tuple[float | None, Binding | None]:
    """The uncertainty of a call as it is, and what that is bound to; None for both where it was not written so."""
    written = () if verdict is None else [one for one in verdict.calls if one.digest == call.digest]
    worst = max(written, key=doubt_of, default=None)
    if verdict is None or worst is None or worst.uncertainty is None:
        return None, None
    own = binding_of(verdict)
    return worst.uncertainty, own.model_copy(update={"settings": CALLS.among(own.settings)})


def calibrate_calls(
    runs: Iterable[tuple[Iterable[tuple[Verdict | None, ToolCall]], Mapping[str, bool]]],
    *,
    trusted: Collection[str],
    **how: Any,
) -> Calibration:
    """The rule of a gate from recorded runs: of each its calls, with the verdicts on their messages, and its labels.

    Raises:
        InputError: a call has no label, or no run has a call.
        CalibrationError: the calls were scored in different ways.
    """
    left_out = names_in(trusted, "trusted")
    numbers, scores, right, bindings = list[int](), list[float | None](), list[bool](), list[Binding]()
    for number, (calls, labels) in enumerate(runs):
        for verdict, call in calls:
            if call.name in left_out:
                continue
            if (label := labels.get(call.id or "")) is None:
                raise InputError(f"run {number + 1}: the call {call.id!r} of {call.name} has no label")
            uncertainty, bound = _score_of(verdict, call)
            bindings += [] if bound is None else [bound]
            numbers.append(number)
            scores.append(uncertainty)
            right.append(label)
    if not bindings:
        raise InputError("no call of these runs has a score: record them with a model of semgrad-guard's")
    if other := next((one for one in bindings if one != bindings[0]), None):
        words = "; ".join(bindings[0].in_words(other)) or "settings"
        raise CalibrationError(f"The calls were scored in different ways: {words}.")
    return calibrate_runs(numbers, scores, right, binding=bindings[0], **how)
