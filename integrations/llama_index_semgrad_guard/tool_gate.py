"""`ToolGate`: a tool call runs only where its uncertainty keeps the promise; else the agent reads why, and continues.

LlamaIndex hands a tool its arguments and nothing else. So model and tool meet in a turn: a model of semgrad-guard's
notes the calls that it writes in it, and a gated tool runs a call that was written so, and no other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from llama_index.core.agent.workflow import AgentOutput
from llama_index.core.tools import AsyncBaseTool, BaseTool, FunctionTool, ToolOutput, adapt_to_async_tool

from llama_index_semgrad_guard.records import decided_of
from semgrad_guard import Calibration, ToolCall, Verdict
from semgrad_guard.adapters.call_gate import CallGate, calibrate_calls
from semgrad_guard.errors import UnenforcedPolicyError
from semgrad_guard.guard import Steps, Work, adrive, drive


@dataclass(frozen=True)
class Written:
    """A call as a model wrote it: its digest, the number of its message in the turn, and the verdict on that."""

    digest: str
    message: int
    verdict: Verdict


class Turn:
    """The calls that models wrote in one turn of a conversation, and the tools that are closed.

    A blocked call closes its tool, until a call that was written later has a result.
    """

    def __init__(self) -> None:
        self._messages = 0
        self._written = list[Written]()
        self._closed = dict[str, int]()

    def note(self, verdict: Verdict) -> None:
        """A model has written a message."""
        self._messages += 1
        self._written += [Written(call.digest, self._messages, verdict) for call in verdict.calls]

    def written(self, call: ToolCall) -> Written | None:
        """The call in the last message that holds it; None: nobody wrote it, or it was done before."""
        return next((one for one in reversed(self._written) if one.digest == call.digest), None)

    def is_closed(self, tool: str) -> bool:
        """Whether the tool is closed."""
        return tool in self._closed

    def block(self, tool: str, own: Written | None) -> None:
        """A call is not run, and closes its tool."""
        self._done(own)
        self._closed[tool] = self._messages

    def succeed(self, own: Written | None) -> None:
        """A call has a result."""
        self._done(own)
        written = 0 if own is None else own.message
        self._closed = {tool: message for tool, message in self._closed.items() if message >= written}

    def _done(self, own: Written | None) -> None:
        if own is not None:
            self._written.remove(own)


TURN: ContextVar[Turn | None] = ContextVar("semgrad_guard_turn", default=None)
"""The turn in which this happens; None outside of one."""


class ToolGate(CallGate):
    """Runs a tool call where its uncertainty keeps the promise of a calibration.

        gate = ToolGate(rule)
        agent = FunctionAgent(llm=llm, tools=gate.tools([pay, search]))  # or a ReActAgent
        with gate.turn():
            answer = await agent.run("Pay the rent.")

    A call's uncertainty is that of the tokens in which a `SemGradLLM` wrote it. Of several calls in a message each is
    judged by itself. The agent reads `words` in the place of a blocked call's result, which tell no score.

    After a block every call of the same tool stays blocked, until the turn ends or a later call of another tool has a
    result: a model that may write a call anew until it passes breaks any promise.

    Args:
        rule: a calibration of calls (`calibrate_tool_calls`).
        trusted: tools whose calls always run, by name.
        words: what the model reads in the place of a result; `{tool}` is the tool's name.
        log: a `DecisionLog`, which gets a row for each call that is judged, and watches the rule's promise.

    Raises:
        InputError: the rule is about something else.
    """

    @contextmanager
    def turn(self) -> Generator[None]:
        """The time in which an agent works on one message of the user's. A turn within a turn is a part of it."""
        token = TURN.set(TURN.get() or Turn())
        try:
            yield
        finally:
            TURN.reset(token)

    def tools(self, tools: Iterable[BaseTool | Callable[..., Any]]) -> list[AsyncBaseTool]:
        """The tools, behind the gate. Called outside of a turn they do not run.

        Their calls raise:
            UnenforcedPolicyError: there is no turn.
            BindingMismatchError: a call was scored in another way than those of the calibration.
        """
        return [self._gated(tool) for tool in tools]

    def _gated(self, given: BaseTool | Callable[..., Any]) -> AsyncBaseTool:
        tool = adapt_to_async_tool(given if isinstance(given, BaseTool) else FunctionTool.from_defaults(given))
        name, added = tool.metadata.get_name(), getattr(tool, "ctx_param_name", None)

        def steps(arguments: dict[str, Any]) -> Steps[ToolOutput]:
            run = Work(lambda: tool.call(**arguments), lambda: tool.acall(**arguments))
            return self._steps(ToolCall(name, {key: arguments[key] for key in arguments if key != added}), run)

        def call(**arguments: Any) -> ToolOutput:
            return drive(steps(arguments))

        async def acall(**arguments: Any) -> ToolOutput:
            return await adrive(steps(arguments))

        gated: Any = copy.copy(tool)  # of its own class, by which agents know what to hand to it
        gated.call, gated.acall = call, acall
        return gated

    def _steps(self, call: ToolCall, run: Work) -> Steps[ToolOutput]:
        """The result of a call, or the words in its place. A call that fails, or waits for a person, may run again."""
        if (turn := TURN.get()) is None:
            raise UnenforcedPolicyError("a gated tool runs in a turn alone: run the agent in `with gate.turn():`")
        own = turn.written(call)
        if not (yield from self._lets_through(call, own, turn)):
            turn.block(call.name, own)
            return self._blocked(call)
        output: ToolOutput = yield run
        if not output.is_error:
            turn.succeed(own)
        return output

    def _lets_through(self, call: ToolCall, own: Written | None, turn: Turn) -> Steps[bool]:
        if call.name in self.trusted:
            return True
        if turn.is_closed(call.name):
            return False
        return (yield from self.judged(call, self.score_of(None if own is None else own.verdict, call)))

    def _blocked(self, call: ToolCall) -> ToolOutput:
        words, given = self.words_for(call.name), dict(call.arguments)
        return ToolOutput(content=words, tool_name=call.name, raw_input=given, raw_output=words, is_error=True)


def calibrate_tool_calls(
    runs: Iterable[tuple[Sequence[Any], Mapping[str, bool]]],
    *,
    alpha: float,
    delta: float,
    trusted: Collection[str] = (),
    tries: int = 0,
) -> Calibration:
    """The rule of a `ToolGate` from recorded runs of an agent, their calls labelled by people.

    "Take a run of which some call is let through, and one of these at random: it is wrong with probability at most
    alpha." Runs are the independent units: calls of one run depend on each other.

        events = [event async for event in agent.run(task).stream_events()]
        rule = calibrate_tool_calls([(events, {tool_id: True, ...}), ...], alpha=0.1, delta=0.1)

    Record the runs without a gate, in a sandbox: a blocked call has no label.

    Args:
        runs: the events of each run, and whether each of its calls was right, by the call's `tool_id`.
        alpha: the largest error rate among the calls that are let through, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        trusted: tools whose calls the gate will not judge, by name; they need no label.
        tries: numbers the calibrations on these labels, this one included; 0: this is the only one.

    Raises:
        InputError: a call has no label, or no run has a call.
        CalibrationError: the calls were scored in different ways.
    """
    labelled = ((_calls(events), labels) for events, labels in runs)
    return calibrate_calls(labelled, trusted=trusted, alpha=alpha, delta=delta, tries=tries)


def _calls(events: Sequence[Any]) -> Iterator[tuple[Verdict | None, ToolCall]]:
    known = set[str]()  # the last event of a run tells all of its calls again
    for event in (one for one in events if isinstance(one, AgentOutput)):
        for call in event.tool_calls:
            if call.tool_id not in known:
                known.add(call.tool_id)
                yield decided_of(event), ToolCall(call.tool_name, call.tool_kwargs, call.tool_id)
