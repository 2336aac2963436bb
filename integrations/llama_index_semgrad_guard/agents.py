"""Workflow agents whose answers a policy delivers, or escalates to another agent or to a person."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any

from llama_index.core.agent.react.types import ActionReasoningStep, ResponseReasoningStep
from llama_index.core.agent.workflow import AgentOutput, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent
from pydantic import BeforeValidator

from llama_index_semgrad_guard.agent_steps import GuardedAgent
from llama_index_semgrad_guard.authorship import Aggregate
from semgrad_guard import Verdict
from semgrad_guard.errors import InputError

_WITHHELD = "(withheld)"
_FORM = (
    "The output could not be used. It should be in one of the following formats:\n"
    "1. To call a tool:\nThought: <thought>\nAction: <action>\nAction Input: <action_input>\n"
    "2. To answer the question:\nThought: <thought>\nAnswer: <answer>"
)


async def ask_person(ctx: Context, question: str, verdict: Verdict) -> str:
    """Ask the person who runs the workflow: send an `InputRequiredEvent`, and wait for a `HumanResponseEvent`.

    The event holds `prefix` (a line to show), `question`, `draft` (the withheld answer) and `record`. The step that
    calls this runs again when the response is there, so its work before must be safe to repeat.
    """
    calls = [f"{call.name}({json.dumps(dict(call.arguments))})" for call in verdict.tool_calls]
    draft = "\n".join(filter(None, [verdict.text, *calls]))
    prefix = f"{question}\nDraft ({verdict.reason}): {draft}\nYour answer: "
    fields: Any = {"prefix": prefix, "question": question, "draft": draft, "record": verdict.metadata()}
    asking = InputRequiredEvent(**fields)
    answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=asking, timeout=None)
    return str(answer.get("response"))


class GuardedReActAgent(GuardedAgent, ReActAgent):
    """A ReAct agent whose final answers are scored, and delivered only if the policy lets them through.

        agent = GuardedReActAgent(llm=SemGradLLM(), policy=Policy(threshold=0.004), escalate_to=ask_person)
        str(await agent.run("What is the capital of France?"))

    Calls of tools go out whatever the score. The model's text next to them (thoughts, observations that it makes up,
    text that cannot be parsed) is let through by its score only, as an answer is. The record is in
    `raw["semgrad_guard"]` of the `AgentOutput`. A withheld text reaches neither the memory nor the event stream nor the
    next prompt: where answers may be withheld, nothing is streamed. The workflow's context holds the draft only while
    the run waits for a reviewer.
    """

    @property
    def _notes_key(self) -> str:
        return self.reasoning_key

    def _goes_on(self, output: AgentOutput) -> bool:
        return bool(output.tool_calls or output.retry_messages)

    def _textless(self, note: Any) -> Any:
        return note.model_copy(update={"thought": ""}) if isinstance(note, ActionReasoningStep) else note

    def _answered(self, verdict: Verdict) -> ResponseReasoningStep:
        thought = verdict.reason or "The answer is not certain enough."
        return ResponseReasoningStep(thought=thought, response=verdict.text)

    def _retry(self, output: AgentOutput) -> list[ChatMessage]:
        if not output.retry_messages:
            return []
        withheld = ChatMessage(role=MessageRole.ASSISTANT, content=_WITHHELD)
        return [withheld, ChatMessage(role=MessageRole.USER, content=_FORM)]

    def _changed(self, noted: Any, text: str) -> str:
        changed = isinstance(noted, ResponseReasoningStep) and noted.response.strip() not in text  # it is remembered
        return "the agent's output parser has changed the answer" if changed else ""


def _names(given: Collection[str]) -> frozenset[str]:
    if isinstance(given, str):
        raise InputError(f"trusted_tools is a list of names: [{given!r}]")
    return frozenset(given)


class GuardedFunctionAgent(GuardedAgent, FunctionAgent):
    """A function agent whose every message is judged, texts and calls of tools alike, before the agent acts on it.

        agent = GuardedFunctionAgent(llm=SemGradLLM(...), tools=[pay], policy=Policy(threshold=0.004))
        str(await agent.run("Pay the invoice."))

    A call that is not let through does not run: the message is handed on or withheld as an answer is, and the run ends
    there. Otherwise as `GuardedReActAgent`.
    """

    trusted_tools: Annotated[frozenset[str], BeforeValidator(_names)] = frozenset()
    """Tools that may run whatever the score (searching, reading): a message that calls no others continues, and
    the text next to its calls is delivered by its score only."""

    @property
    def _notes_key(self) -> str:
        return self.scratchpad_key

    @property
    def _aggregate(self) -> Aggregate:
        return "max"  # a run ends at the first message that is not let through

    def _goes_on(self, output: AgentOutput) -> bool:
        called = {call.tool_name for call in output.tool_calls}
        return bool(called) and called <= self.trusted_tools

    def _textless(self, note: Any) -> ChatMessage:
        calls = [block for block in note.blocks if isinstance(block, ToolCallBlock)]
        return ChatMessage(role=MessageRole.ASSISTANT, blocks=calls)

    def _answered(self, verdict: Verdict) -> ChatMessage:
        return ChatMessage(role=MessageRole.ASSISTANT, content=verdict.text)

    def _handed_over(self, call: ToolSelection) -> list[Any]:
        block = ToolCallBlock(tool_call_id=call.tool_id, tool_name=call.tool_name, tool_kwargs=call.tool_kwargs)
        return [ChatMessage(role=MessageRole.ASSISTANT, blocks=[block])]
