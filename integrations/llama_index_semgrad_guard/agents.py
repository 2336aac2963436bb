"""Workflow agents whose answers a policy lets through, hands to another agent, or to a person."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Self, cast

from llama_index.core.agent.react.types import BaseReasoningStep, ResponseReasoningStep
from llama_index.core.agent.workflow import AgentOutput, ReActAgent
from llama_index.core.agent.workflow.agent_context import AgentContext
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.memory import BaseMemory
from llama_index.core.tools import AsyncBaseTool
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent
from pydantic import SkipValidation, model_validator

from llama_index_semgrad_guard.routing import Router
from semgrad_guard import Policy, Verdict
from semgrad_guard.errors import InputError, LowConfidenceError
from semgrad_guard.guard import ABSTAIN_MESSAGE, abstained, escalated
from semgrad_guard.guard.modes import Mode

Reviewer = Callable[[Context, str, Verdict], Awaitable[str | Verdict]]
"""Answers in the agent's place: given the workflow's context, the question and the verdict, which holds the draft."""

_PENDING = "semgrad_guard_pending"


async def ask_person(ctx: Context, question: str, verdict: Verdict) -> str:
    """Ask whoever runs the workflow: an `InputRequiredEvent` goes out, and a `HumanResponseEvent` is waited for.

    The event holds `prefix` (a line to show), `question`, `draft` (the withheld answer) and `record`. The step that
    calls this runs again when the response is there, so what it does before must be safe to repeat.
    """
    fields: dict[str, Any] = {
        "prefix": f"{question}\nDraft ({verdict.reason}): {verdict.text}\nYour answer: ",
        "question": question,
        "draft": verdict.text,
        "record": verdict.metadata(),
    }
    asking = InputRequiredEvent(**fields)
    answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=asking, timeout=None)
    return str(answer.get("response"))


class GuardedReActAgent(ReActAgent):
    """A ReAct agent whose final answers are scored, and delivered only if the policy lets them through.

        agent = GuardedReActAgent(llm=SemGradLLM(), policy=Policy(threshold=0.004), escalate_to=ask_person)
        str(await agent.run("What is the capital of France?"))

    Steps that call a tool are not judged. The record stands in `raw["semgrad_guard"]` of the `AgentOutput`. A withheld
    draft reaches neither the memory nor the event stream: where answers may be withheld, nothing is streamed.
    """

    policy: Annotated[Policy, SkipValidation]
    """What to let through."""
    escalate_to: Annotated[str | Reviewer | None, SkipValidation] = None
    """The name of another agent of the `AgentWorkflow`, or a `Reviewer` such as `ask_person`."""
    abstain_message: str = ABSTAIN_MESSAGE
    mode: Mode = "enforce"
    """As in `GuardedQueryEngine`; "raise" makes the run fail with a `LowConfidenceError`."""
    keep_draft: bool = False

    @model_validator(mode="after")
    def _close_side_doors(self) -> Self:
        """Refuse what would generate an answer past the guard."""
        if self._router.withholds:
            self.streaming = False
            if self.output_cls is not None or self.early_stopping_method == "generate":
                raise InputError(
                    "output_cls and early_stopping_method='generate' make answers that nobody scores; use "
                    "structured_output_fn and early_stopping_method='force', or mode='annotate'"
                )
        return self

    @property
    def _router(self) -> Router:
        return Router(
            policy=self.policy,
            source="agent",
            mode=self.mode,
            abstain_message=self.abstain_message,
            keep_draft=self.keep_draft,
            can_escalate=self.escalate_to is not None,
        )

    async def take_step(
        self, ctx: AgentContext, llm_input: list[ChatMessage], tools: Sequence[AsyncBaseTool], memory: BaseMemory
    ) -> AgentOutput:
        """One step of the agent; a final answer is decided about before anything else sees it."""
        await ctx.store.set(_PENDING, None)
        with self._router.collecting() as collector:
            output = await super().take_step(ctx, llm_input, tools, memory)
        if output.tool_calls or output.retry_messages:
            return output
        try:
            text = output.response.content or ""
            verdict = await asyncio.to_thread(self._router.decided, text, collector.calls)
        except LowConfidenceError:
            await self._conclude(ctx, None)
            raise
        if verdict.action == "answer" or not verdict.enforced:
            return self._output(output, verdict, output.response)
        if isinstance(self.escalate_to, str) and verdict.action == "escalate":
            await self._conclude(ctx, None)
            return await self._handoff(ctx, output, verdict, self.escalate_to)
        if verdict.action == "escalate":
            await ctx.store.set(_PENDING, verdict.model_dump(mode="json"))
            return output.model_copy(update={"response": _says("")})
        verdict = abstained(verdict, self.abstain_message)
        await self._conclude(ctx, verdict)
        return self._output(output, verdict, _says(verdict.text))

    async def finalize(self, ctx: Context, output: AgentOutput, memory: BaseMemory) -> AgentOutput:
        """The answer of a reviewer, where one is due; this step runs again once a person has answered."""
        pending = await ctx.store.get(_PENDING, default=None)
        if pending is not None and callable(self.escalate_to):
            draft = Verdict.model_validate(pending)
            question: str = await ctx.store.get("user_msg_str", default="")
            verdict = escalated(draft, await self.escalate_to(ctx, question, draft))
            await self._conclude(ctx, verdict)
            output = self._output(output, verdict, _says(verdict.text))
        return await super().finalize(ctx, output, memory)

    async def _handoff(self, ctx: AgentContext, output: AgentOutput, verdict: Verdict, to_agent: str) -> AgentOutput:
        """Ask LlamaIndex's own handoff tool to make `to_agent` the current agent."""
        agents: list[str] = await ctx.store.get("agents", default=[])
        if to_agent not in agents or to_agent == self.name or to_agent not in (self.can_handoff_to or [to_agent]):
            raise InputError(
                f"{self.name} cannot hand off to {to_agent!r}; run it in an AgentWorkflow whose agents have distinct "
                f"names, {to_agent!r} among them, and name it in can_handoff_to if that is set"
            )
        arguments = {"to_agent": to_agent, "reason": verdict.reason or "low confidence"}
        call = ToolSelection(tool_id=str(uuid.uuid4()), tool_name="handoff", tool_kwargs=arguments)
        withheld = verdict.model_copy(update={"text": "", "draft": verdict.text})
        return self._output(output, withheld, _says("")).model_copy(update={"tool_calls": [call]})

    async def _conclude(self, ctx: AgentContext | Context, verdict: Verdict | None) -> None:
        """Put what is delivered in the place of the draft, which the agent has noted as its last reasoning step."""
        steps: list[BaseReasoningStep] = await ctx.store.get(self.reasoning_key, default=[])
        kept = steps[:-1] if steps and isinstance(steps[-1], ResponseReasoningStep) else steps
        if verdict is not None:
            thought = verdict.reason or "The answer is not certain enough."
            kept = [*kept, ResponseReasoningStep(thought=thought, response=verdict.text)]
        await ctx.store.set(self.reasoning_key, kept)

    def _output(self, output: AgentOutput, verdict: Verdict, response: ChatMessage) -> AgentOutput:
        raw: Any = output.raw
        known = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        return output.model_copy(update={"response": response, "raw": self._router.attached(known, verdict)})


def _says(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)
