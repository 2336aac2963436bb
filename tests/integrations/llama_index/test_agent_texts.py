"""What an agent's model writes as well as its answers: thoughts, made-up observations, text that cannot be parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.memory import ChatMemoryBuffer
from workflows.errors import WorkflowRuntimeError

from llama_index_semgrad_guard import GuardedReActAgent, LowConfidenceError, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import DeadlineExceededError
from tests.pairwise import in_turn

from .scripted import Scripted
from .test_agents import QUESTION
from .test_agents import Scripted as Other

SECRET, CERTAIN, UNCERTAIN = "SECRETZZ", 1e-9, 0.9
POLICY = Policy(threshold=0.1)
CALL = 'Action: search\nAction Input: {"what": "q"}'
GOOD = ("Thought: I can answer.\nAnswer: fine", CERTAIN)
UNFINISHED = {
    "thought": f"Thought: {SECRET}.\n{CALL}",
    "before the thought": f"{SECRET}\nThought: x.\n{CALL}",
    "observation": f"Thought: x\n{CALL}\nObservation: {SECRET}\nThought: I can answer\nAnswer: {SECRET}",
    "answer after the call": f"Thought: x\n{CALL}\nAnswer: {SECRET}",
    "no thought": f"Answer: {SECRET}",
    "only a thought": f"Thought: {SECRET}",
    "cut call": f"Thought: {SECRET}\nAction: search\nAction Input: {{what",
    "call without input": f"{SECRET}\nAction: search",
}


def search(what: str) -> str:
    """Search."""
    return f"found {what}"


async def everywhere(agent: Any, *, turns: int = 2) -> tuple[list[Any], str, list[str]]:
    """Outputs (or errors), everything that can be seen of the run, and the tools that ran."""
    memory, ctx = ChatMemoryBuffer.from_defaults(token_limit=4000), None
    outputs, seen, tools = list[Any](), list[str](), list[str]()
    for _ in range(turns):
        handler = agent.run(user_msg=QUESTION, memory=memory, ctx=ctx, max_iterations=4)
        async for event in handler.stream_events():
            seen.append(repr(event) + repr(vars(event)))
            tools += [event.tool_name] if type(event).__name__ == "ToolCallResult" else []
            seen.append(json.dumps(handler.ctx.to_dict(), default=repr))
        try:
            outputs.append(await handler)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            outputs.append(error)
        ctx = handler.ctx
        seen += [repr(outputs[-1]), json.dumps(ctx.to_dict(), default=repr), repr(memory.get_all())]
    return outputs, " ".join(seen), tools


def scripted(model: LanguageModel, *lines: tuple[str, float]) -> Any:
    left, prompts = list(lines), list[str]()

    def script(prompt: str) -> tuple[str, float]:
        prompts.append(prompt)
        return left.pop(0) if left else GOOD

    llm = Scripted.saying(model, script)
    return llm, prompts


@in_turn(kind=UNFINISHED, workflow=[False, True])
async def test_what_is_not_certain_is_seen_nowhere(wide: LanguageModel, kind: str, workflow: bool) -> None:
    llm, prompts = scripted(wide, (UNFINISHED[kind], UNCERTAIN))
    agent: Any = GuardedReActAgent(name="a", description="d", llm=llm, policy=POLICY, tools=[search])
    outputs, seen, tools = await everywhere(AgentWorkflow(agents=[agent], root_agent="a") if workflow else agent)
    assert SECRET not in seen
    assert SECRET not in " ".join(prompts)
    assert [str(output) for output in outputs] == ["fine", "fine"]
    assert tools == (["search"] if 'Action Input: {"' in UNFINISHED[kind] else [])
    assert get_verdict(outputs[0]).action == "answer"  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", UNFINISHED)
async def test_what_is_certain_stays(wide: LanguageModel, kind: str) -> None:
    llm, prompts = scripted(wide, (UNFINISHED[kind], CERTAIN))
    outputs, seen, _ = await everywhere(GuardedReActAgent(llm=llm, policy=POLICY, tools=[search]), turns=1)
    assert SECRET in seen
    if kind in ("thought", "no thought"):
        assert SECRET in prompts[1]
    assert str(outputs[0]) == "fine"


async def test_where_nothing_is_withheld_all_of_it_stays(wide: LanguageModel) -> None:
    llm, prompts = scripted(wide, (UNFINISHED["thought"], UNCERTAIN))
    agent = GuardedReActAgent(llm=llm, policy=POLICY, tools=[search], mode="annotate", streaming=False)
    _, seen, _ = await everywhere(agent, turns=1)
    assert SECRET in seen
    assert SECRET in prompts[1]


async def test_an_agent_that_never_ends_shows_nothing(wide: LanguageModel) -> None:
    llm, _ = scripted(wide, *[(UNFINISHED["only a thought"], UNCERTAIN)] * 9)
    outputs, seen, _ = await everywhere(GuardedReActAgent(llm=llm, policy=POLICY, tools=[search]), turns=1)
    assert isinstance(outputs[0], WorkflowRuntimeError)
    assert SECRET not in seen


async def test_raising_is_for_answers(wide: LanguageModel) -> None:
    """A call of a tool goes out whatever its score, in this mode too."""
    llm, _ = scripted(wide, (UNFINISHED["thought"], UNCERTAIN), (f"Thought: {SECRET}\nAnswer: {SECRET}", UNCERTAIN))
    outputs, seen, tools = await everywhere(
        GuardedReActAgent(llm=llm, policy=POLICY, tools=[search], mode="raise"), turns=1
    )
    assert isinstance(outputs[0], LowConfidenceError)
    assert tools == ["search"]
    assert SECRET not in seen


async def test_what_another_llm_says_is_unscored_and_stays_inside() -> None:
    """Its raw response holds the text as well."""

    class Server(Other):
        @llm_completion_callback()
        def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
            text = self.lines.pop(0)
            return CompletionResponse(text=text, raw={"choices": [text]})

    for last in (GOOD[0], f"Thought: {SECRET}\nAnswer: {SECRET}"):
        server = Server(lines=[UNFINISHED["observation"], UNFINISHED["no thought"], last])
        outputs, seen, tools = await everywhere(GuardedReActAgent(llm=server, policy=POLICY, tools=[search]), turns=1)
        assert str(outputs[0]) == "I don't know."
        assert tools == ["search"]
        assert SECRET not in seen, seen[max(0, seen.find(SECRET) - 300) : seen.find(SECRET) + 100]


async def test_a_late_step_shows_nothing(wide: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline passes while the step is scored."""

    def late(*_: Any) -> Any:
        raise DeadlineExceededError("late")

    monkeypatch.setattr(Scripted, "_assess", late)
    for on_error in ("raise", "abstain"):
        llm, _ = scripted(wide, (UNFINISHED["thought"], UNCERTAIN))
        agent = GuardedReActAgent(llm=llm, policy=POLICY, tools=[search], on_error=on_error)
        outputs, seen, _ = await everywhere(agent, turns=1)
        assert isinstance(outputs[0], DeadlineExceededError) if on_error == "raise" else str(outputs[0])
        assert SECRET not in seen
