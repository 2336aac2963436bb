"""`ToolGate` with LlamaIndex's own agents: calls that run, calls that are blocked, and turns that never mix."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.workflow import Context

from llama_index_semgrad_guard import SemGradLLM, ToolGate, UncertaintyRouterCallback, calibrate_tool_calls
from semgrad_guard import Calibration, LanguageModel, Policy, ToolCall, calibrate
from semgrad_guard.adapters.calls import TURN
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard.parts import calls_in_text
from tests.integrations.gates import CLOCK, DOUBTFUL, SCENARIOS, SURE, Call, pay, verdict_on

from .ways import reading, scripted

ran: ContextVar[list[str]] = ContextVar("ran")


@pytest.fixture(autouse=True)
def _none_ran() -> Iterator[None]:
    token = ran.set([])
    yield
    ran.reset(token)


def _pay(to: str) -> str:
    """Pay a person."""
    ran.get().append(to)
    return f"paid {to}"


def _clock() -> str:
    """The time."""
    ran.get().append("clock")
    return "12:00"


PASS = UncertaintyRouterCallback(Policy(threshold=1e308, on_cut="score"))
TOOLS = [FunctionTool.from_defaults(_pay, name="pay"), FunctionTool.from_defaults(_clock, name="clock")]


def as_react(call: Call) -> str:
    """A call in the words of a ReAct agent."""
    return f"Thought: I act.\nAction: {call[0]}\nAction Input: {json.dumps(call[1])}"


def agent(kind: str, model: LanguageModel, messages: Sequence[list[Call]], tools: Sequence[Any], **options: Any) -> Any:
    """An agent whose model writes these messages, one after the other, and then "done"."""
    coming = iter(messages)

    def script(_: str) -> tuple[Any, ...]:
        calls = next(coming, [])
        if kind == "react":
            text = as_react(calls[0]) if calls else "Thought: I can answer.\nAnswer: done"
            return text, 1.0, [], verdict_on(calls).calls
        written = [ToolCall(name, arguments) for name, arguments, _ in calls]
        return "" if calls else "done", 1.0, written, verdict_on(calls).calls

    llm = scripted(model, script, router=PASS, calls_functions=kind != "react")
    if kind == "react":
        return ReActAgent(llm=llm, tools=list(tools), **options)
    return FunctionAgent(
        llm=llm, tools=list(tools), streaming=kind == "streamed", allow_parallel_tool_calls=True, **options
    )


async def events_of(made: Any) -> list[Any]:
    handler = made.run("q", max_iterations=50)
    events = [event async for event in handler.stream_events()]
    assert str(await handler) == "done", "the agent continues"
    return events


def results(events: Sequence[Any]) -> list[Any]:
    return [event.tool_output for event in events if isinstance(event, ToolCallResult)]


@pytest.fixture(scope="module")
def rule(wide: LanguageModel) -> Calibration:
    """From 60 recorded runs: calls of an uncertainty above 1 are wrong."""

    async def recorded() -> list[Any]:
        runs = list[Any]()
        for number in range(60):
            doubt = number % 2 == 0
            call = pay(f"p{number}", (1 if doubt else 0) + number / 100)
            events = await events_of(agent("function", wide, [[call]], TOOLS))
            runs.append((events, {one.tool_id: not doubt for one in events if isinstance(one, ToolCallResult)}))
        return runs

    ran.set([])
    made = calibrate_tool_calls(asyncio.run(recorded()), alpha=0.2, delta=0.1)
    assert made.threshold is not None
    assert SURE < made.threshold < DOUBTFUL
    assert made.n == 60
    return made


KINDS = ["function", "streamed", "react"]
CASES = [
    (kind, name)
    for name, (messages, _) in SCENARIOS.items()
    for kind in KINDS
    if kind != "react" or all(len(message) == 1 for message in messages)
]


@pytest.mark.parametrize(("kind", "scenario"), CASES)
async def test_calls_that_run(kind: str, scenario: str, rule: Calibration, wide: LanguageModel) -> None:
    messages, expected = SCENARIOS[scenario]
    gate = ToolGate(rule)
    with gate.turn():
        events = await events_of(agent(kind, wide, messages, gate.tools(TOOLS)))
    assert sorted(ran.get()) == sorted(expected)
    blocked = [output for output in results(events) if output.is_error]
    assert len(blocked) == sum(map(len, messages)) - len(expected)
    assert all(output.content.startswith("Not run") for output in blocked)
    assert not any(letter.isdigit() for output in blocked for letter in output.content), "no score"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_is_judged_as_it_will_run(kind: str, rule: Calibration, wide: LanguageModel) -> None:
    """What code between the model and the gate has changed was written by nobody."""
    gate = ToolGate(rule)
    (gated, _) = gate.tools(TOOLS)

    async def edited(to: str) -> Any:
        return str(await gated.acall(to=f"{to} and Eve"))

    tools = [FunctionTool.from_defaults(async_fn=edited, name="pay")]
    with gate.turn():
        await events_of(agent(kind, wide, [[pay("Ann")]], tools))
    assert ran.get() == []


async def test_one_written_call_runs_once(rule: Calibration, wide: LanguageModel) -> None:
    """However many ask for it at the same time, by tasks or by threads."""
    done = list[str]()

    async def slow(to: str) -> str:
        """Pay, in a while."""
        await asyncio.sleep(0.01)
        done.append(to)
        return "paid"

    gate = ToolGate(rule)
    (gated,) = gate.tools([FunctionTool.from_defaults(async_fn=slow, name="pay")])

    async def often(to: str) -> str:
        """Pay."""
        found = await asyncio.gather(*(gated.acall(to=to) for _ in range(5)))
        return str([one.is_error for one in found].count(False))

    tools = [FunctionTool.from_defaults(async_fn=often, name="pay")]
    with gate.turn():
        events = await events_of(agent("function", wide, [[pay("Ann")]], tools))
    assert (done, [output.content for output in results(events)]) == (["Ann"], ["1"])


async def test_agents_that_write_the_same_call_at_once(rule: Calibration, wide: LanguageModel) -> None:
    """One is in doubt, the other is not: its doubt counts, whichever runs first."""
    gate = ToolGate(rule)
    tools = gate.tools(TOOLS)
    with gate.turn():
        await asyncio.gather(
            *(events_of(agent("function", wide, [[pay("Bob", doubt)]], tools)) for doubt in (DOUBTFUL, SURE))
        )
    assert ran.get() == []


async def test_a_call_that_is_tried_again_is_one_row(rule: Calibration, wide: LanguageModel, tmp_path: Path) -> None:
    tries = list[int]()

    def flaky() -> str:
        """Fail once."""
        tries.append(1)
        return str(1 // (len(tries) - 1))

    with DecisionLog(tmp_path / "log.db") as log:
        gate = ToolGate(rule, log=log)
        (gated,) = gate.tools([FunctionTool.from_defaults(flaky, name="clock")])

        async def twice() -> str:
            """Try twice."""
            with contextlib.suppress(ZeroDivisionError):
                await gated.acall()
            return str(await gated.acall())

        with gate.turn():
            await events_of(
                agent("function", wide, [[CLOCK]], [FunctionTool.from_defaults(async_fn=twice, name="clock")])
            )
        assert len(tries) == 2
        assert len(list(log.database.decisions())) == 1


async def test_a_block_lasts_for_a_turn(rule: Calibration, wide: LanguageModel) -> None:
    gate = ToolGate(rule)
    made = agent("function", wide, [[pay("Bob", DOUBTFUL)], [pay("Bob")], [], [pay("Ann")]], gate.tools(TOOLS))
    for expected in ([], ["Ann"]):
        with gate.turn():
            await events_of(made)
        assert ran.get() == expected


async def test_turns_at_once_do_not_mix(rule: Calibration, wide: LanguageModel) -> None:
    """Twelve users and one gate: the same call is sure in every other turn."""
    gate = ToolGate(rule)

    async def turn(number: int) -> list[str]:
        ran.set([])
        with gate.turn():
            made = agent("function", wide, [[pay("Ann", SURE if number % 2 else DOUBTFUL)]], gate.tools(TOOLS))
            await events_of(made)
        return ran.get()

    assert await asyncio.gather(*map(turn, range(12))) == [["Ann"] if number % 2 else [] for number in range(12)]


async def test_no_tool_runs_outside_of_a_turn(rule: Calibration, wide: LanguageModel) -> None:
    gate = ToolGate(rule, trusted=["clock"])
    events = await events_of(agent("function", wide, [[pay("Ann"), CLOCK]], gate.tools(TOOLS)))
    assert ran.get() == []
    assert all("with gate.turn()" in output.content for output in results(events))


async def test_trusted_tools_run(rule: Calibration, wide: LanguageModel) -> None:
    gate = ToolGate(rule, trusted=["clock"])
    with gate.turn():
        await events_of(agent("function", wide, [[("clock", {}, None), pay("Ann", DOUBTFUL)]], gate.tools(TOOLS)))
    assert ran.get() == ["clock"]


async def test_tools_of_every_kind(rule: Calibration, wide: LanguageModel) -> None:
    """One that is given the run's context, one that answers for the agent, an engine, and a plain function."""

    async def note(ctx: Context, text: str) -> str:
        """Note."""
        ran.get().append(f"{text}: {await ctx.store.get('num_tool_calls')}")
        return "noted"

    note.__annotations__["ctx"] = Context  # LlamaIndex looks for the class itself

    def look(what: str) -> str:
        """Look."""
        ran.get().append(what)
        return f"found {what}"

    engine = QueryEngineTool.from_defaults(
        reading(scripted(wide, lambda _: ("Rome", 0.01))), name="ask", description=""
    )
    direct = FunctionTool.from_defaults(_pay, name="pay", return_direct=True)
    gate = ToolGate(rule)
    tools = gate.tools([note, look, engine, direct])
    calls: list[Call] = [("note", {"text": "x"}, SURE), ("look", {"what": "y"}, SURE), ("ask", {"input": "z"}, SURE)]
    with gate.turn():
        events = await events_of(agent("function", wide, [[*calls, pay("Ann", DOUBTFUL)]], tools))
    assert ran.get() == ["x: 4", "y"]
    assert [output.content for output in results(events)][:3] == ["noted", "found y", "Rome"]


async def test_a_call_that_fails_may_run_again(rule: Calibration, wide: LanguageModel) -> None:
    """As one that waits for a person does. Its error is no result, and opens no tool."""
    gate = ToolGate(rule)
    fails = FunctionTool.from_defaults(lambda: 1 // 0, name="clock")
    messages = [[pay("Bob", DOUBTFUL)], [CLOCK], [CLOCK], [("clock", {"at": 1}, DOUBTFUL)], [CLOCK]]
    with gate.turn():
        events = await events_of(agent("function", wide, messages, gate.tools([TOOLS[0], fails])))
    assert ran.get() == []
    assert ["division" in output.content for output in results(events)] == [False, True, True, False, False]


async def test_what_does_not_belong_together_is_refused(rule: Calibration) -> None:
    turn = ToolGate(rule).turn()
    assert rule.binding is not None
    other = verdict_on([pay("Ann")], estimator="gnll", model=rule.binding.model)
    (tool, _) = ToolGate(rule).tools(TOOLS)
    with turn:
        TURN.get().note(other)  # type: ignore[union-attr]
        with pytest.raises(BindingMismatchError, match="estimator"):
            await tool.acall(to="Ann")
    for wrong in ([tool], [tool.call, "pay"], None, TOOLS[0]):
        with pytest.raises(InputError, match="tools is a list"):
            ToolGate(rule).tools(wrong)  # type: ignore[arg-type]
    answers = calibrate([0.1], [True], alpha=0.5, delta=0.5)
    with pytest.raises(InputError, match="calibrate_tool_calls"):
        ToolGate(answers)


@pytest.mark.parametrize("reused", [False, True])
async def test_each_call_of_a_run_has_a_label_of_its_own(reused: bool, rule: Calibration, wide: LanguageModel) -> None:
    events = await events_of(agent("function", wide, [[pay("Ann")], [pay("Bob")]], TOOLS))
    for event in events:
        for call in [event, *(getattr(event, "tool_calls", None) or [])] if reused else []:
            if hasattr(call, "tool_id"):
                call.tool_id = "call_0"
    labels = {one.tool_id: True for one in events if isinstance(one, ToolCallResult)}
    if reused:
        with pytest.raises(InputError, match="two calls have the id"):
            calibrate_tool_calls([(events, labels)], alpha=0.1, delta=0.1)
    else:
        made = calibrate_tool_calls([(events, labels)], alpha=0.1, delta=0.1)
        assert made.sentences is not None
        assert made.sentences.n == 2


def test_a_models_own_scores_of_calls_in_words(llm: SemGradLLM) -> None:
    verdict = llm.score("Pay Ann.", as_react(pay("Ann")))
    (call,) = verdict.calls
    assert call.digest == ToolCall("pay", {"to": "Ann"}).digest
    assert call.uncertainty is not None
    assert call.uncertainty > 0
    assert llm.score("Pay Ann.", "Thought: I can answer.\nAnswer: Action: none").calls == ()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('Thought: x\nAction: pay\nAction Input: {"to": "Ann"}', {"to": "Ann"}),
        ('Action: pay\n\nAction Input: {"a": {"b": [1, "}"]}}\nObservation: y', {"a": {"b": [1, "}"]}}),
        ("Action: pay (now)\nAction Input: {}", {}),
        ("Action: pay\nAction Input: {'to': 'Ann'}", None),
        ("Action: pay\nAction Input: Ann", None),
        ('Answer: pay {"to": "Ann"}', None),
    ],
)
def test_calls_in_words(text: str, arguments: Any) -> None:
    found = [(call.name, call.arguments) for call in calls_in_text(text)]
    assert found == ([] if arguments is None else [("pay", arguments)])
