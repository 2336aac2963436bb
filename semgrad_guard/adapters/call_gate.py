"""A gate lets single calls of tools run, by the uncertainty of the tokens in which they were written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, cast

from semgrad_guard.calibration import Binding, Calibration, calibrate_runs
from semgrad_guard.calibration.binding import CALLS, shared_by
from semgrad_guard.decision_log.entries import DecisionSink
from semgrad_guard.declared import names_in, plain
from semgrad_guard.declared import pairs_in as pairs_in
from semgrad_guard.errors import InputError
from semgrad_guard.guard.parts import judged
from semgrad_guard.guard.policy import require_listener
from semgrad_guard.guard.timing import Steps, Work
from semgrad_guard.guard.verdicts import binding_of, doubt_of
from semgrad_guard.records import CallVerdict, ToolCall, Verdict

BLOCKED_WORDS = "Not run: it is not sure enough that this call of {tool} is right. Ask the user."
"""In the place of a blocked call's result. It tells no score."""

RunCalls = Iterable[tuple[Verdict | None, Sequence[ToolCall]]]
"""The calls of a recorded run, by message, with the verdicts on the messages."""


@dataclass(eq=False)
class Written:
    """A call that a model wrote in a turn, in the message of this number; whether it passes, once it is judged.

    `again` is the last message in which it was written so.
    """

    call: CallVerdict
    message: int
    verdict: Verdict
    again: int = 0
    passes: bool | None = None


class Turn:
    """What happens while an agent, and the agents that it calls, work on one message of a person's.

    `closed` holds the tools of which a call was blocked, with the number of that call's message.
    """

    def __init__(self) -> None:
        self.closed = dict[str, int]()
        self._messages = 0
        self._written = list[Written]()
        self._lock = Lock()

    def note(self, verdict: Verdict) -> None:
        """A model has written a message."""
        with self._lock:
            self._messages += 1
            self._written += [Written(call, self._messages, verdict) for call in verdict.calls]

    def take(self, call: ToolCall) -> Written | None:
        """The least certain of the calls that were written so and have not run; None: nobody wrote it."""
        with self._lock:
            found = [one for one in self._written if one.call.digest == call.digest]
            if not found:
                return None
            taken = max(found, key=lambda one: doubt_of(one.call))
            taken.again = max(one.message for one in found)
            self._written.remove(taken)
            return taken

    def put_back(self, own: Written | None) -> None:
        """The call has no result, and may run again."""
        if own is not None:
            with self._lock:
                self._written.append(own)

    def is_closed(self, tool: str, own: Written | None) -> bool:
        """Whether a call of the tool was blocked before this one was written."""
        return tool in self.closed and (own is None or self.closed[tool] < own.again)

    def close(self, tool: str, own: Written | None) -> None:
        """A call of the tool is blocked."""
        message = self._messages if own is None else own.message
        self.closed[tool] = min(message, self.closed.get(tool, message))


TURN: ContextVar[Turn | None] = ContextVar("semgrad_guard_turn", default=None)
"""The turn in which this happens; None outside of one."""


class CallGate:
    """A rule for single calls of tools; a front knows which calls are made, and which tools are closed.

    Raises:
        InputError: the rule is not about the tokens of calls, and the calls are not `scored_elsewhere`; or an option is
            of another kind.
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
        if not isinstance(cast("object", rule), Calibration) or not (scored_elsewhere or CALLS.is_of(rule.binding)):
            raise InputError(
                "this rule is not about tokens of tool calls: make one by calibrate_tool_calls, or give the score that "
                "it is about"
            )
        require_listener("log", log)
        self.rule, self.words, self.log = rule.require_intact(), plain("words", words, str), log
        self.trusted = names_in(trusted, "trusted")

    @contextmanager
    def turn(self) -> Generator[None]:
        """The time in which an agent works on one message of a person's. A turn within a turn is a part of it."""
        token = TURN.set(TURN.get() or Turn())
        try:
            yield
        finally:
            TURN.reset(token)

    def judged(self, call: ToolCall, uncertainty: float | None, bound: Binding | None = None) -> Steps[bool]:
        """Whether a call may run; a row of the log, where there is one.

        Raises:
            BindingMismatchError: it was scored in another way than the calls of the calibration.
        """
        if bound is not None and self.rule.binding is not None:
            self.rule.binding.require(bound)
        text = json.dumps({"name": call.name, "args": dict(call.arguments)}, default=repr)
        judging = partial(judged, self.rule, uncertainty, text=text, log=self.log)
        return judging() if self.log is None else (yield Work(judging))

    def words_for(self, tool: str) -> str:
        """What the model reads in the place of a blocked call's result."""
        return self.words.replace("{tool}", tool)


def scores_of(verdict: Verdict | None, calls: Sequence[ToolCall]) -> list[tuple[float | None, Binding | None]]:
    """The uncertainty of each call of a message as it is now, and what that is bound to.

    None for both where it was not written so, or not so often.
    """
    if verdict is None:
        return [(None, None)] * len(calls)
    written, now = Counter(one.digest for one in verdict.calls), Counter(call.digest for call in calls)
    return [
        score_of(verdict, digest) if now[digest] <= written[digest] else (None, None)
        for digest in (call.digest for call in calls)
    ]


def score_of(verdict: Verdict, digest: str) -> tuple[float | None, Binding | None]:
    """The uncertainty of a call that was written, the greatest where it was written more than once, and its binding."""
    worst = max((one for one in verdict.calls if one.digest == digest), key=doubt_of)
    if worst.uncertainty is None:
        return None, None
    own = binding_of(verdict)
    return worst.uncertainty, own.model_copy(update={"settings": CALLS.among(own.settings)})


def calibrate_calls(
    runs: object, calls_of: Callable[[Iterable[Any]], RunCalls], *, form: str, trusted: Collection[str], **how: Any
) -> Calibration:
    """The rule of a gate from recorded runs, given as pairs of what was recorded (its `form` in words) and the labels.

    Raises:
        InputError: there is something else than such pairs; a call has no label, or shares its id with another one of
            its run; or no run has a call.
        CalibrationError: the calls were scored in different ways.
    """
    left_out = names_in(trusted, "trusted")
    numbers, scores, right, bindings = list[int](), list[float | None](), list[bool](), list[Binding]()
    for number, (recorded, labels) in enumerate(pairs_in(runs, "runs", f"({form}, labels by call id)")):
        if not isinstance(labels, Mapping) or not isinstance(recorded, Iterable) or isinstance(recorded, str | Mapping):
            raise InputError(
                f"run {number + 1}: give a list of {form}, and a dict from the ids of its calls to True or False; "
                f"not {recorded!r:.40} and {labels!r:.40}"
            )
        known, labelled = set[str | None](), cast("Mapping[str | None, bool]", labels)
        for call, uncertainty, bound in _with_scores(calls_of(cast("Iterable[Any]", recorded))):
            if call.name in left_out:
                continue
            if call.id in known:
                raise InputError(f"run {number + 1}: two calls have the id {call.id!r}; give each call its own")
            known.add(call.id)
            if (label := labelled.get(call.id)) is None:
                raise InputError(f"run {number + 1}: the call {call.id!r} of {call.name} has no label")
            bindings += [] if bound is None else [bound]
            numbers.append(number)
            scores.append(uncertainty)
            right.append(label)
    if not bindings:
        raise InputError("no call of these runs has a score: record them with a model of semgrad-guard's")
    return calibrate_runs(numbers, scores, right, binding=shared_by(bindings, of="calls"), **how)


def _with_scores(messages: RunCalls) -> Iterator[tuple[ToolCall, float | None, Binding | None]]:
    for verdict, calls in messages:
        for call, (uncertainty, bound) in zip(calls, scores_of(verdict, calls), strict=True):
            yield call, uncertainty, bound
