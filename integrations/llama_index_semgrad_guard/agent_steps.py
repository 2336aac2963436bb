"""The guard around the steps of LlamaIndex's agents: a step's answer is decided about before anything else sees it."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self, cast

from llama_index.core.agent.workflow import AgentOutput
from llama_index.core.agent.workflow.agent_context import AgentContext
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.memory import BaseMemory
from llama_index.core.tools import AsyncBaseTool
from llama_index.core.workflow import Context
from pydantic import SkipValidation, model_validator
from workflows.runtime.types.results import WaitingForEvent  # pyright: ignore[reportMissingTypeStubs]

from llama_index_semgrad_guard.authorship import Aggregate, Answering, Delivery
from llama_index_semgrad_guard.calls import is_ours
from llama_index_semgrad_guard.events import report
from llama_index_semgrad_guard.memory import StagedContext
from llama_index_semgrad_guard.routing import Routing, sealed
from llama_index_semgrad_guard.turn import Turn
from semgrad_guard import Policy, Promise, Verdict
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.errors import AnswerFailedError, DeadlineExceededError, InputError
from semgrad_guard.guard import (
    AbstainMessage,
    DecisionSink,
    Draft,
    Escalate,
    HandedOn,
    KeepDraft,
    Mode,
    OnError,
    Reply,
    Terms,
    Timeout,
    Waiting,
    Work,
    adrive,
    ain_time,
    arun,
    cancelling,
    combined_promise,
    conclude,
    one,
    run,
    settle,
    stopping,
    unscored,
)

Reviewer = Callable[[Context, str, Verdict], Awaitable[str | Verdict]]
"""Answers in the agent's place: given the workflow's context, the question and the verdict, which holds the draft."""

_PENDING = "semgrad_guard_pending"
_HANDED_ON = "semgrad_guard_handed_on"
_UNPROMISED = "semgrad_guard_unpromised"
_AFTER_UNPROMISED = "an earlier message of this run was let through outside the promise"
_OF_ANOTHER_GUARD = "another guard has handed the question on, and the calibration was made on other questions"
_PAST_THE_GUARD = (
    "output_cls (the agent's or its AgentWorkflow's) and early_stopping_method='generate' make answers that nobody "
    "scores; use structured_output_fn and early_stopping_method='force', or mode='annotate'"
)
_HANDOFF = "handoff"
"""The tool by which LlamaIndex's agents hand over to each other. It returns directly and ends no run."""


class GuardedAgent(BaseWorkflowAgent):
    """The common part of guarded agents; subclasses know an agent's notes, and which of its steps are judged."""

    policy: Annotated[Policy, SkipValidation]
    """Which scores to let through."""
    escalate_to: Annotated[str | Reviewer | None, SkipValidation] = None
    """The name of another agent of the `AgentWorkflow`, or a `Reviewer` such as `ask_person`."""
    abstain_message: Annotated[AbstainMessage, SkipValidation] = Terms.abstain_message
    mode: Annotated[Mode, SkipValidation] = Terms.mode
    """As in `GuardedQueryEngine`; "raise" makes the run fail with a `LowConfidenceError`."""
    keep_draft: KeepDraft = Terms.keep_draft
    answering: Annotated[Answering | None, SkipValidation] = None
    """As in `GuardedQueryEngine`; default: all of a step's calls, which is one."""
    on_error: Annotated[OnError, SkipValidation] = Terms.on_error
    """Where a reviewer or a step fails or is late: "raise" or "abstain"."""
    step_timeout: Annotated[Timeout, SkipValidation] = None
    """Seconds for generating and scoring in one step. `timeout` is LlamaIndex's own, for the whole run."""
    monitor: Annotated[DriftMonitor | None, SkipValidation] = None
    log: Annotated[DecisionSink | None, SkipValidation] = None
    """A `DecisionLog`, which every decision is written to."""

    @model_validator(mode="after")
    def _close_side_doors(self) -> Self:
        """Refuse what would generate an answer past the guard."""
        if isinstance(self.escalate_to, type) or not (
            self.escalate_to is None or isinstance(self.escalate_to, str) or callable(self.escalate_to)
        ):
            raise InputError(
                "escalate_to is an agent's name, or a function of the context, the question and the verdict"
            )
        if self.routing.terms.withholds:
            self.streaming = False
            if self.output_cls is not None or self.early_stopping_method == "generate":
                raise InputError(_PAST_THE_GUARD)
            _require_results_to_be_read(cast("Any", self).tools or ())
        return self

    @property
    def promise(self) -> Promise | None:
        """The promise for all answers that this agent delivers, or for the promised ones (`covers`).

        None where another agent or a person may answer, without a calibration, or where that found no threshold.
        """
        if self.escalate_to is not None:
            return None
        return combined_promise([self.policy], enforced=self.routing.terms.withholds)

    @property
    def routing(self) -> Routing:
        """The settings of this guard."""
        return Routing.of(
            self.policy,
            source="agent",
            mode=self.mode,
            can_escalate=self.escalate_to is not None,
            abstain_message=self.abstain_message,
            keep_draft=self.keep_draft,
            on_error=self.on_error,
            timeout=self.step_timeout,
            monitor=self.monitor,
            log=self.log,
            answering=self.answering,
            aggregate=self._aggregate,
            whole=True,
        )

    async def take_step(
        self, ctx: AgentContext, llm_input: list[ChatMessage], tools: Sequence[AsyncBaseTool], memory: BaseMemory
    ) -> AgentOutput:
        """One step of the agent; a final answer is decided about before anything else sees it.

        Raises:
            InputError: the run would generate an answer past the guard.
            AnswerFailedError: the step failed after the model ran, and `on_error` is to raise.
        """
        routing, turn = self.routing, Turn()
        await self._require_guarded(ctx, tools)
        await ctx.store.set(_PENDING, None)
        staged, stop, waiting = StagedContext(ctx, self._notes_key), routing.terms.stop(), list[Verdict]()
        with stopping(stop), cancelling(stop), turn.open():
            try:
                stepping = ain_time(super().take_step(cast("AgentContext", staged), llm_input, tools, memory))
                work = Work.awaited(lambda: stepping)
                output = await adrive(sealed(work.alone(), turn, routing.terms))
                if self._goes_on(output):
                    return await self._unfinished(staged, output, turn)
            except (AnswerFailedError, DeadlineExceededError) as error:
                output = error

        async def drafts() -> list[Draft[AgentOutput]]:
            if isinstance(output, Exception):
                raise output
            drafted = await self._drafted(output, turn, staged.noted)
            return [replace(drafted, strange=await self._strange(ctx))]

        async def target(escalated: Sequence[Waiting[AgentOutput]]) -> list[HandedOn]:
            waiting.extend(draft.verdict for draft in escalated)
            return [HandedOn() for _ in escalated]

        outcome = one(await arun(routing.terms, drafts, target, stop=stop))
        if outcome.answer is not None:
            await ctx.store.set(_UNPROMISED, bool(outcome.answer.tool_calls) and not outcome.verdict.promised)
            await staged.keep()
            return self._output(outcome.answer, outcome.verdict, outcome.answer.response)
        turn.withhold()
        if isinstance(output, Exception):
            output = AgentOutput(response=_message(""), current_agent_name=self.name)
        if not waiting:
            await self._note(ctx, outcome.verdict)
            return self._output(output, outcome.verdict, _message(outcome.verdict.text))
        if isinstance(self.escalate_to, str):
            return await self._handoff(ctx, output, outcome.verdict, self.escalate_to)
        await ctx.store.set(_PENDING, waiting[0].model_dump(mode="json"))
        return output.model_copy(update={"response": _message(""), "raw": self._facts(output), "tool_calls": []})

    async def _unfinished(self, staged: StagedContext, output: AgentOutput, turn: Turn) -> AgentOutput:
        """A step that is not judged: its calls go out, and the model's text next to them only by its score."""
        is_certain = not self.routing.terms.withholds
        if not is_certain:
            draft, strange = await self._drafted(output, turn), await self._strange(cast("AgentContext", staged))
            facts: dict[str, Any] = {"prompt": draft.prompt, "trusted": True, "strange": strange}
            settled = settle(draft.verdict, self.policy, self.mode, can_escalate=False, **facts)
            is_certain = settled.verdict.action == "answer"
        if is_certain:
            await staged.keep()
            return output
        await staged.keep(self._textless)
        kept = self._textless(output.response)
        response = kept if isinstance(kept, ChatMessage) and kept is not output.response else _message("")
        changes = {"response": response, "raw": self._facts(output), "retry_messages": self._retry(output)}
        return output.model_copy(update=changes)

    # For subclasses.

    @property
    def _aggregate(self) -> Aggregate | None:
        """How the scores of a run's messages make one, where several are judged."""
        return None

    @property
    def _notes_key(self) -> str:
        """The place in the context where the agent keeps its notes."""
        raise NotImplementedError

    def _goes_on(self, output: AgentOutput) -> bool:
        """Whether a step is followed by others whatever its score."""
        raise NotImplementedError

    def _textless(self, note: Any) -> Any:
        """A note, or a message, that calls tools without the model's text next to the calls."""
        raise NotImplementedError

    def _answered(self, verdict: Verdict) -> Any:
        """The note of a text that is delivered in a draft's place."""
        raise NotImplementedError

    def _handed_over(self, call: ToolSelection) -> list[Any]:
        """The notes of a call that hands over to another agent."""
        return []

    def _retry(self, output: AgentOutput) -> list[ChatMessage]:
        """The messages by which the model tries again, without its text."""
        return []

    def _changed(self, noted: Any, text: str) -> str:
        """Why the noted answer is not the model's text; "" where it is."""
        return ""

    async def _drafted(self, output: AgentOutput, turn: Turn, noted: Any = None) -> Draft[AgentOutput]:
        text = output.response.content or ""
        if reason := self._changed(noted, text):
            return _unscored(output, reason)
        routing, delivery = self.routing, Delivery(text, output)
        work = Work(lambda: routing.draft(turn, delivery))
        return await adrive(sealed(work.alone(), turn, routing.terms))

    async def finalize(self, ctx: Context, output: AgentOutput, memory: BaseMemory) -> AgentOutput:
        """The answer of a reviewer, where one is due; this step runs again once a person has answered."""
        await self._require_guarded(ctx)
        terms = self.routing.terms
        if output.tool_calls and output.tool_calls[-1].tool_name != _HANDOFF:  # the result of a tool ends the run
            if terms.withholds:
                raise InputError(_UNREAD)
            drafted = _unscored(output, "a tool has returned this answer directly")
            output = self._output(output, one(run(terms, lambda: [drafted])).verdict, output.response)
        pending = await ctx.store.get(_PENDING, default=None)
        if pending is not None:
            decided, reviewer = Verdict.model_validate(pending), cast("Reviewer", self.escalate_to)
            question: str = await ctx.store.get("user_msg_str", default="")
            reply: Reply[AgentOutput] | Exception
            try:
                reply = Reply(await reviewer(ctx, question, decided))
            except WaitingForEvent:
                raise
            except Exception as error:  # noqa: BLE001 - the reviewer's; `on_error` decides
                reply = error
            await ctx.store.set(_PENDING, None)
            outcome = conclude(Escalate(decided), output, terms, reply=reply)
            await self._note(ctx, outcome.verdict)
            output = self._output(output, outcome.verdict, _message(outcome.verdict.text))
        return await super().finalize(ctx, output, memory)

    async def _require_guarded(self, ctx: AgentContext | Context, tools: Sequence[AsyncBaseTool] = ()) -> None:
        """Refuse a run, of the agent or of its workflow, that would make the model answer past the guard."""
        if not self.routing.terms.withholds:
            return
        self.streaming = False  # it may have been set after the agent was made
        method = await ctx.store.get("early_stopping_method", default=None)
        structures = (self.output_cls, getattr(_workflow_of(ctx), "output_cls", None))
        if method == "generate" or any(structure is not None for structure in structures):
            raise InputError(_PAST_THE_GUARD)
        _require_results_to_be_read(tools)

    async def _strange(self, ctx: AgentContext) -> tuple[str, ...]:
        """Why the question is unlike those of the calibration: another guard escalates harder ones."""
        before = await ctx.store.get(_HANDED_ON, default=None)
        after = None if self.policy.binding is None else self.policy.binding.upstream
        handed_on = () if before is None or before == after else (_OF_ANOTHER_GUARD,)
        unpromised = await ctx.store.get(_UNPROMISED, default=False)
        return (*handed_on, _AFTER_UNPROMISED) if unpromised else handed_on

    async def _handoff(self, ctx: AgentContext, output: AgentOutput, verdict: Verdict, to_agent: str) -> AgentOutput:
        """Call LlamaIndex's own handoff tool, which makes `to_agent` the current agent."""
        agents: list[str] = await ctx.store.get("agents", default=[])
        if to_agent not in agents or to_agent == self.name or to_agent not in (self.can_handoff_to or [to_agent]):
            raise InputError(
                f"{self.name} cannot hand off to {to_agent!r}; run it in an AgentWorkflow whose agents have distinct "
                f"names, {to_agent!r} among them, and name it in can_handoff_to if that is set"
            )
        arguments = {"to_agent": to_agent, "reason": verdict.reason or "low confidence"}
        call = ToolSelection(tool_id=str(uuid.uuid4()), tool_name=_HANDOFF, tool_kwargs=arguments)
        await ctx.store.set(_HANDED_ON, verdict.calibration_id or "")
        await self._keep(ctx, self._handed_over(call))
        report(verdict, "agent", keep_draft=self.keep_draft)
        return self._output(output, verdict, _message("")).model_copy(update={"tool_calls": [call]})

    async def _note(self, ctx: AgentContext | Context, verdict: Verdict) -> None:
        """Note the text that is delivered in a draft's place, as the agent would note an answer."""
        await self._keep(ctx, [self._answered(verdict)])

    async def _keep(self, ctx: AgentContext | Context, notes: list[Any]) -> None:
        known: list[Any] = await ctx.store.get(self._notes_key, default=[])
        await ctx.store.set(self._notes_key, [*known, *notes])

    def _facts(self, output: AgentOutput) -> dict[str, Any]:
        """The `raw` record next to a withheld text. That of other LLMs may hold the text itself."""
        raw: Any = output.raw
        return cast("dict[str, Any]", raw) if isinstance(raw, dict) and is_ours(self.llm) else {}

    def _output(self, output: AgentOutput, verdict: Verdict, response: ChatMessage) -> AgentOutput:
        raw: Any = output.raw
        own = isinstance(raw, dict) and response is output.response
        known = cast("dict[str, Any]", raw) if own else self._facts(output)
        changes = {"response": response, "raw": self.routing.attached(known, verdict, Turn())}
        return output.model_copy(update=changes if response is output.response else {**changes, "tool_calls": []})


def _unscored(output: AgentOutput, reason: str) -> Draft[AgentOutput]:
    return Draft(unscored(output.response.content or "", reason=reason, model="none"), output)


_UNREAD = (
    "the result of a tool with return_direct ends a run past the guard, although the model may have written it; leave "
    "return_direct out, or use mode='annotate'"
)


def _require_results_to_be_read(tools: Sequence[Any]) -> None:
    """Refuse tools whose results are answers without a decision."""
    for tool in tools:
        if tool.metadata.return_direct and tool.metadata.name != _HANDOFF:
            raise InputError(f"{tool.metadata.name}: {_UNREAD}")


def _workflow_of(ctx: Any) -> Any:
    """The workflow that runs a step, None outside of one. LlamaIndex has no public name for it.

    Raises:
        InputError: this version of LlamaIndex's workflows keeps it elsewhere.
    """
    if not isinstance(ctx, Context):
        return None
    workflow = getattr(getattr(cast("Any", ctx), "_face", None), "_workflow", None)
    if workflow is None:
        raise InputError(
            "it is unknown which workflow runs this agent, and whether that makes answers past the guard; install "
            "llama-index-workflows 2.26"
        )
    return workflow


def _message(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)
