"""`GuardedFunctionAgent`: calls of tools are judged like answers, and one that is withheld does not run."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow, FunctionAgent, ToolCallResult
from llama_index.core.workflow import InputRequiredEvent

from llama_index_semgrad_guard import (
    GuardedFunctionAgent,
    LowConfidenceError,
    acalibrate_engine,
    ask_person,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import InputError
from tests.engine.chat_templates import template
from tests.random_llama import CALLS

from .scripted import Scripted
from .test_agents import run

POLICY = Policy(threshold=0.1)
SECRET = "ZANZIBAR"


@pytest.fixture
def tooled(make_language_model: Callable[..., LanguageModel]) -> LanguageModel:
    return make_language_model(chat_template=template("qwen2.5"), words=CALLS, max_position_embeddings=16384)


def call(name: str, text: str = "") -> str:
    arguments = {"name": name, "arguments": {"to": SECRET}}
    return f"{text}<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


class Desk:
    """Two tools that note the calls which ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def pay(self, to: str) -> str:
        """Pay a person."""
        self.ran.append("pay")
        return f"paid {to}"

    def find(self, to: str) -> str:
        """Find a person."""
        self.ran.append("find")
        return "found"


def agent_of(model: LanguageModel, *replies: tuple[str, float], **options: Any) -> tuple[GuardedFunctionAgent, Desk]:
    left, desk = list(replies), Desk()
    llm = Scripted.saying(model, lambda _prompt: left.pop(0))
    given: Any = {"name": "a", "description": "d", "policy": POLICY, "tools": [desk.pay, desk.find], **options}
    return GuardedFunctionAgent(llm=llm, **given), desk


@pytest.mark.parametrize("mode", ["enforce", "annotate"])
async def test_a_wrong_call_does_not_run_and_nothing_of_it_is_seen(tooled: LanguageModel, mode: Any) -> None:
    agent, desk = agent_of(tooled, (call("pay", "Sure. "), 0.9), ("Done.", 0.01), mode=mode)
    output, seen, memory = await run(agent)
    if mode == "annotate":
        assert (desk.ran, str(output)) == (["pay"], "Done.")
        return
    assert (desk.ran, str(output), output.tool_calls) == ([], "I don't know.", [])
    verdict = get_verdict(output)
    assert verdict is not None
    assert (verdict.action, verdict.uncertainty) == ("abstain", 0.9)
    assert SECRET not in repr(seen) + memory + repr(output)


async def test_a_certain_call_runs_and_the_answer_is_judged(tooled: LanguageModel) -> None:
    for uncertainty, text in ((0.02, "Done."), (0.8, "I don't know.")):
        agent, desk = agent_of(tooled, (call("pay"), 0.01), ("Done.", uncertainty))
        output, _, memory = await run(agent)
        assert (desk.ran, str(output)) == (["pay"], text)
        assert text in memory
        assert f"paid {SECRET}" in memory


async def test_a_trusted_call_runs_without_its_doubtful_text(tooled: LanguageModel) -> None:
    replies = (call("find", "I made this up. "), 0.9), ("Done.", 0.01)
    agent, desk = agent_of(tooled, *replies, trusted_tools=["find"])
    output, seen, memory = await run(agent)
    assert (desk.ran, str(output)) == (["find"], "Done.")
    assert "made this up" not in repr(seen) + memory
    assert [event.tool_name for event in seen if isinstance(event, ToolCallResult)] == ["find"]
    mixed, desk = agent_of(tooled, (call("find") + call("pay"), 0.9), trusted_tools=["find"])
    assert (str((await run(mixed))[0]), desk.ran) == ("I don't know.", [])


async def test_a_person_sees_the_call_and_answers(tooled: LanguageModel) -> None:
    agent, desk = agent_of(tooled, (call("pay"), 0.9), escalate_to=ask_person)
    output, seen, memory = await run(agent, answer="Not today.")
    (request,) = [event for event in seen if isinstance(event, InputRequiredEvent)]
    assert request.draft == f'pay({{"to": "{SECRET}"}})'
    assert (desk.ran, str(output), SECRET in memory) == ([], "Not today.", False)


async def test_handing_over_and_raising(tooled: LanguageModel) -> None:
    first, desk = agent_of(tooled, (call("pay"), 0.9), escalate_to="b")
    second, _ = agent_of(tooled, ("From b.", 0.01), name="b")
    output, seen, memory = await run(AgentWorkflow([first, second], root_agent="a"))
    assert (str(output), output.current_agent_name, desk.ran) == ("From b.", "b", [])
    assert SECRET not in memory + repr([event for event in seen if isinstance(event, AgentOutput)])
    agent, desk = agent_of(tooled, (call("pay"), 0.9), mode="raise")
    with pytest.raises(LowConfidenceError) as raised:
        await run(agent)
    assert SECRET not in repr(vars(raised.value))
    assert desk.ran == []


def test_wrong_settings(tooled: LanguageModel) -> None:
    for options in ({"trusted_tools": "find"}, {"early_stopping_method": "generate"}):
        with pytest.raises(InputError):
            agent_of(tooled, **options)


async def test_an_agent_is_calibrated_by_the_least_certain_message_of_a_run(tooled: LanguageModel) -> None:
    def script(prompt: str) -> tuple[str, float]:
        if "paid" in prompt:
            return "Done.", 0.01
        return call("pay"), 0.05 if "bill 99" in prompt else 0.02

    def agent(policy: Policy) -> GuardedFunctionAgent:
        desk = Desk()
        return GuardedFunctionAgent(llm=Scripted.saying(tooled, script), tools=[desk.pay], policy=policy)

    examples = [(f"Pay bill {number}.", ["Done"]) for number in range(2, 42)]
    options: Any = {"alpha": 0.3, "delta": 0.2, "progress": False}
    calibration = await acalibrate_engine(agent(Policy(threshold=-1)), examples, "contains", **options)
    policy = Policy.from_calibration(calibration)
    assert policy.threshold is not None
    assert 0.02 <= policy.threshold < 0.05
    output = await agent(policy).run("Pay bill 7.")
    assert str(output) == "Done."
    assert str(await agent(policy).run("Pay bill 99.")) == "I don't know."
    with pytest.raises(InputError, match="calibrated with its guard"):
        await acalibrate_engine(FunctionAgent(llm=Scripted.saying(tooled, script)), examples, "contains", **options)  # type: ignore[arg-type]
