"""`GuardedReActAgent`: final answers are judged, handed to another agent or a person, and drafts stay inside."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.react.output_parser import ReActOutputParser
from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow, ReActAgent, ToolCall, ToolCallResult
from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent
from pydantic import BaseModel

from llama_index_semgrad_guard import GuardedReActAgent, LowConfidenceError, SemGradLLM, ask_person, get_verdict
from semgrad_guard import Policy
from semgrad_guard.errors import InputError
from semgrad_guard.guard import ABSTAIN_MESSAGE

from .conftest import Heard
from .scripted import Scripted as Pieces

PASS, STOP = Policy(threshold=1e308), Policy(threshold=-1e308)
QUESTION = "Where is Paris?"


class Scripted(CustomLLM):
    """Another LLM, which gives the answers that it was given."""

    lines: list[str]

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self.lines.pop(0))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        text = self.lines.pop(0)
        return (CompletionResponse(text=part, delta=part) for part in [text])


async def run(workflow: Any, *, answer: str | None = None, ctx: Context | None = None) -> tuple[Any, list[Any], str]:
    """The output, every event on the way, and everything that the memory holds."""
    memory, seen = ChatMemoryBuffer.from_defaults(token_limit=3000), []
    handler = workflow.run(user_msg=QUESTION, memory=memory, ctx=ctx)
    async for event in handler.stream_events():
        seen.append(event)
        if isinstance(event, InputRequiredEvent):
            handler.ctx.send_event(HumanResponseEvent(response=answer))
    output = await handler
    return output, seen, "\n".join(message.content or "" for message in memory.get_all())


async def draft_of(llm: SemGradLLM) -> str:
    """What the unguarded agent answers; it must be told apart from everything else."""
    output, _, _ = await run(ReActAgent(llm=llm, streaming=False))
    assert len(str(output)) > 3
    return str(output)


def shows(event: Any, text: str) -> bool:
    """Whether an event holds a text anywhere, or the beginning of it."""
    return repr(text[:4])[1:-1] in repr(event)


@pytest.fixture
def talker(wide: Any) -> SemGradLLM:
    return SemGradLLM.from_model(wide, max_tokens=8)


async def test_what_is_let_through_comes_with_its_record(talker: SemGradLLM, recorder: Heard) -> None:
    draft = await draft_of(talker)
    output, _, memory = await run(GuardedReActAgent(llm=talker, policy=PASS))
    assert str(output) == draft
    assert draft in memory
    verdict = get_verdict(output)
    assert verdict is not None
    assert (verdict.action, verdict.status) == ("answer", "scored")
    assert [event.source for event in recorder.verdicts] == ["llm", "agent"]


async def test_a_withheld_draft_reaches_neither_memory_nor_events(talker: SemGradLLM) -> None:
    draft = await draft_of(talker)
    output, seen, memory = await run(GuardedReActAgent(llm=talker, policy=STOP))
    assert str(output) == "I don't know."
    assert output.raw["semgrad_guard"]["action"] == "abstain"
    assert "I don't know." in memory
    assert draft not in memory
    assert not any(shows(event, draft) for event in seen)


async def test_annotating_streams_and_delivers(talker: SemGradLLM) -> None:
    draft = await draft_of(talker)
    output, seen, _ = await run(GuardedReActAgent(llm=talker, policy=STOP, mode="annotate"))
    record = output.raw["semgrad_guard"]
    assert (str(output), record["action"], record["enforced"]) == (draft, "abstain", False)
    assert sum(type(event).__name__ == "AgentStream" for event in seen) > 0


async def test_raising_fails_the_run(talker: SemGradLLM) -> None:
    with pytest.raises(LowConfidenceError) as raised:
        await run(GuardedReActAgent(llm=talker, policy=STOP, mode="raise"))
    assert await draft_of(talker) not in repr(vars(raised.value))


async def test_a_person_answers_and_the_model_is_asked_once(talker: SemGradLLM, recorder: Heard) -> None:
    draft = await draft_of(talker)
    recorder.events.clear()
    agent = GuardedReActAgent(llm=talker, policy=STOP, escalate_to=ask_person)
    output, seen, memory = await run(agent, answer="In France, says Ann.")
    (request,) = [event for event in seen if isinstance(event, InputRequiredEvent)]
    assert (request.question, request.draft) == (QUESTION, draft)
    assert request.record["action"] == "escalate"
    assert str(output) == "In France, says Ann."
    verdict = get_verdict(output)
    assert verdict is not None
    assert (verdict.action, verdict.escalated_from is not None, verdict.text) == (
        "escalate",
        True,
        "In France, says Ann.",
    )
    assert "In France, says Ann." in memory
    assert draft not in memory
    assert not any(shows(event, draft) for event in seen if event is not request)
    assert sum(type(event).__name__ == "LLMChatStartEvent" for event in recorder.events) == 1
    assert [event.record["action"] for event in recorder.verdicts] == ["escalate"]


async def test_a_second_review_in_the_same_context_waits_again(talker: SemGradLLM) -> None:
    agent = GuardedReActAgent(llm=talker, policy=STOP, escalate_to=ask_person)
    ctx = Context(agent)
    first, _, _ = await run(agent, answer="one", ctx=ctx)
    second, _, _ = await run(agent, answer="two", ctx=ctx)
    assert (str(first), str(second)) == ("one", "two")
    agent.policy = PASS
    third, seen, _ = await run(agent, ctx=ctx)
    assert third.raw["semgrad_guard"]["action"] == "answer"
    assert not any(isinstance(event, InputRequiredEvent) for event in seen)


async def test_handing_off_to_another_agent(talker: SemGradLLM) -> None:
    draft = await draft_of(talker)
    first = GuardedReActAgent(name="first", description="tries", llm=talker, policy=STOP, escalate_to="second")
    second = ReActAgent(
        name="second",
        description="knows",
        llm=Scripted(lines=["Thought: I know.\nAnswer: In France."]),
        streaming=False,
    )
    workflow = AgentWorkflow(agents=[first, second], root_agent="first")
    output, seen, memory = await run(workflow)
    assert (str(output), output.current_agent_name) == ("In France.", "second")
    assert draft not in memory
    assert not any(shows(event, draft) for event in seen)
    handed = next(event for event in seen if isinstance(event, AgentOutput) and event.current_agent_name == "first")
    assert handed.raw["semgrad_guard"]["action"] == "escalate"
    assert [call.tool_kwargs["to_agent"] for call in handed.tool_calls] == ["second"]


async def test_a_missing_agent_is_named_instead_of_asked_in_circles(talker: SemGradLLM) -> None:
    with pytest.raises(InputError, match="cannot hand off to 'second'"):
        await run(GuardedReActAgent(llm=talker, policy=STOP, escalate_to="second"))


async def test_tool_calls_are_not_judged_and_other_llms_are_unscored() -> None:
    def find(place: str) -> str:
        """Find a place."""
        return f"{place} is in France."

    lines = ['Thought: look.\nAction: find\nAction Input: {"place": "Paris"}', "Thought: good.\nAnswer: In France."]
    for on_unscored, expected in (("abstain", "I don't know."), ("answer", "In France.")):
        policy = Policy(threshold=1e308, on_unscored=on_unscored)  # type: ignore[arg-type]
        agent = GuardedReActAgent(llm=Scripted(lines=list(lines)), tools=[find], policy=policy)
        output, seen, memory = await run(agent)
        assert str(output) == expected
        assert output.raw["semgrad_guard"]["status"] == "unscored"
        assert "Paris is in France." in memory
        assert [event.tool_name for event in seen if type(event).__name__ == "ToolCallResult"] == ["find"]


class Place(BaseModel):
    name: str


def submit(answer: str) -> str:
    """Submit the answer."""
    return answer


def direct(name: str = "submit") -> FunctionTool:
    return FunctionTool.from_defaults(submit, name=name, return_direct=True)


def test_side_doors_are_closed(talker: SemGradLLM) -> None:
    for door, why in (
        ({"output_cls": Place}, "nobody scores"),
        ({"early_stopping_method": "generate"}, "nobody scores"),
        ({"tools": [direct()]}, "return_direct"),
    ):
        with pytest.raises(InputError, match=why):
            GuardedReActAgent(llm=talker, policy=STOP, **door)
        GuardedReActAgent(llm=talker, policy=STOP, mode="annotate", **door)
    assert GuardedReActAgent(llm=talker, policy=STOP).streaming is False
    with pytest.raises(InputError, match="needs a policy"):
        GuardedReActAgent(llm=talker, policy=0.5)  # type: ignore[arg-type]


class Tools:
    """Finds other tools for a question than for the name of one."""

    def __init__(self, *found: FunctionTool) -> None:
        self.found = list(found)

    async def aretrieve(self, _query: str) -> list[FunctionTool]:
        return self.found


@pytest.mark.parametrize("workflow", [False, True])
@pytest.mark.parametrize("door", ["output_cls", "streaming", "tools", "retriever", "late retriever", "workflow"])
async def test_side_doors_that_open_later_are_closed(door: str, workflow: bool, wide: Any) -> None:
    secret = "ZANZIBAR"
    call = f'Thought: t\nAction: submit\nAction Input: {{"answer": "{secret}"}}'
    replies = [call] if "tools" in door or "retriever" in door else [f"Thought: t\nAnswer: {secret}"]
    late = Tools()

    def script(_prompt: str) -> tuple[str, float]:
        late.found.append(direct())
        return replies.pop() if replies else f'{{"name": "{secret}"}}', 0.9

    llm = Pieces.saying(wide, script)
    agent: Any = GuardedReActAgent(name="a", description="d", llm=llm, policy=Policy(threshold=0.1))
    whole: Any = AgentWorkflow([agent], output_cls=Place if door == "workflow" else None) if workflow else agent
    if door == "workflow" and not workflow:
        whole = agent
        agent.output_cls = Place
    elif door == "output_cls":
        agent.output_cls = Place
    elif door == "streaming":
        agent.streaming = True
    elif door == "tools":
        agent.tools = [direct()]
    elif "retriever" in door:
        agent.tool_retriever = Tools(direct()) if door == "retriever" else late
    handler = whole.run(user_msg=QUESTION)
    events = [event async for event in handler.stream_events()]
    if door == "streaming":
        assert str(await handler) == ABSTAIN_MESSAGE
    else:
        with pytest.raises(InputError, match=r"nobody scores|return_direct"):
            await handler
    seen = [event for event in events if not isinstance(event, (ToolCall, ToolCallResult, AgentOutput))]
    answers = [event.response.content for event in events if isinstance(event, AgentOutput)]
    assert secret not in repr(seen) + repr(answers)


async def test_handing_over_returns_directly_and_is_allowed(wide: Any) -> None:
    replies = ['Thought: t\nAction: handoff\nAction Input: {"to_agent": "b", "reason": "r"}']
    llm = Pieces.saying(wide, lambda _: (replies.pop() if replies else "Thought: t\nAnswer: fine", 0.01))
    agents: Any = [GuardedReActAgent(name=n, description="d", llm=llm, policy=Policy(threshold=0.1)) for n in "ab"]
    output = await AgentWorkflow(agents, root_agent="a").run(user_msg=QUESTION)
    assert (str(output), output.current_agent_name) == ("fine", "b")


@pytest.mark.parametrize("mode", ["annotate", "observe"])
async def test_what_a_tool_returns_directly_is_unscored(mode: Any, wide: Any) -> None:
    llm = Pieces.saying(wide, lambda _: ('Thought: t\nAction: submit\nAction Input: {"answer": "x"}', 0.01))
    output = await GuardedReActAgent(llm=llm, policy=PASS, mode=mode, tools=[direct()]).run(user_msg=QUESTION)
    verdict = get_verdict(output)
    assert str(output) == "x"
    assert (None if verdict is None else verdict.status) == ("unscored" if mode == "annotate" else None)


async def test_what_an_agents_parser_changes_is_unscored(wide: Any) -> None:
    class Loud(ReActOutputParser):
        def parse(self, output: str, is_streaming: bool = False) -> Any:
            step: Any = super().parse(output, is_streaming)
            return step.model_copy(update={"response": step.response.upper()})

    llm = Pieces.saying(wide, lambda _: ("Thought: t\nAnswer: quiet", 0.01))
    for parser, shown in ((Loud(), ABSTAIN_MESSAGE), (ReActOutputParser(), "quiet")):
        output, _, memory = await run(GuardedReActAgent(llm=llm, policy=PASS, output_parser=parser))
        assert (str(output), "QUIET" in memory) == (shown, False)
