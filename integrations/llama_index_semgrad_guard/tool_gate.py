"""`ToolGate`: a tool call runs only where its uncertainty keeps the promise; else the agent reads why, and continues.

LlamaIndex hands a tool its arguments and nothing else. So model and tool meet in a turn: a model of semgrad-guard's
notes the calls that it writes in it, and a gated tool runs a call that was written so, and no other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.agent.workflow import AgentOutput, ToolCallResult
from llama_index.core.tools import AsyncBaseTool, BaseTool, FunctionTool, ToolOutput, adapt_to_async_tool

from llama_index_semgrad_guard.records import decided_of
from semgrad_guard import Calibration, ToolCall, Verdict
from semgrad_guard.adapters.calls import TURN, CallGate, Turn, Written, calibrate_calls, score_of
from semgrad_guard.errors import InputError, UnenforcedPolicyError
from semgrad_guard.guard import Steps, Work, adrive, drive

_MARK = "semgrad_guard_gate"
"""The attribute by which a gated tool is known."""


class ToolGate(CallGate):
    """Runs a tool call where its uncertainty keeps the promise of a calibration.

        gate = ToolGate(rule)
        agent = FunctionAgent(llm=llm, tools=gate.tools([pay, search]))  # or a ReActAgent
        with gate.turn():
            answer = await agent.run("Pay the rent.")

    A call's uncertainty is that of the tokens in which a `SemGradLLM` wrote it. Of several calls in a message each is
    judged by itself. The agent reads `words` in the place of a blocked call's result, which tell no score.

    After a block every later call of the same tool stays blocked, until the turn ends: a model that may write a call
    anew until it passes breaks any promise.

    Args:
        rule: a calibration of calls (`calibrate_tool_calls`).
        trusted: tools whose calls always run, by name.
        words: what the model reads in the place of a result; `{tool}` is the tool's name.
        log: a `DecisionLog`, which gets a row for each call that is judged, and watches the rule's promise.

    Raises:
        InputError: the rule is about something else.
    """

    def tools(self, tools: Iterable[BaseTool | Callable[..., Any]]) -> list[AsyncBaseTool]:
        """The tools, behind the gate. Called outside of a turn they do not run.

        Their calls raise:
            UnenforcedPolicyError: there is no turn.
            BindingMismatchError: a call was scored in another way than those of the calibration.
        """
        several: list[Any] = list(tools) if hasattr(tools, "__iter__") else [None]
        if other := [one for one in several if not callable(one) or hasattr(one, _MARK)]:
            raise InputError(f"tools is a list of tools and functions that no gate has yet, not {other[0]!r:.60}")
        return [self._gated(tool) for tool in several]

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
        setattr(gated, _MARK, self)
        return gated

    def _steps(self, call: ToolCall, run: Work) -> Steps[ToolOutput]:
        """The result of a call, or the words in its place. A call that fails, or waits for a person, may run again."""
        if (turn := TURN.get()) is None:
            raise UnenforcedPolicyError("a gated tool runs in a turn alone: run the agent in `with gate.turn():`")
        if call.name in self.trusted:
            return (yield run)
        own = turn.take(call)  # whatever runs next to this finds it no more
        if not (yield from self._lets_through(call, own, turn)):
            turn.close(call.name, own)
            return self._blocked(call)
        has_result = False
        try:
            output: ToolOutput = yield run
            has_result = not output.is_error
            return output
        finally:
            if not has_result:
                turn.put_back(own)

    def _lets_through(self, call: ToolCall, own: Written | None, turn: Turn) -> Steps[bool]:
        if turn.is_closed(call.name, own):
            return False
        if own is None:
            return (yield from self.judged(call, None))
        if own.passes is None:  # a call that runs again is judged once
            own.passes = yield from self.judged(call, *score_of(own.verdict, call.digest))
        return own.passes

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
    how: Any = {"alpha": alpha, "delta": delta, "tries": tries}
    return calibrate_calls(runs, _calls, form="an agent's events", trusted=trusted, **how)


def _calls(events: Iterable[Any]) -> Iterator[tuple[Verdict | None, Sequence[ToolCall]]]:
    for event in events:
        if isinstance(event, AgentOutput):  # the last one tells the results of all calls again
            written = [call for call in event.tool_calls if not isinstance(call, ToolCallResult)]
            calls = [ToolCall(call.tool_name, call.tool_kwargs, call.tool_id) for call in written]
            yield decided_of(event), calls
