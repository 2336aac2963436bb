"""A LlamaIndex workflow that asks a person where its agent's model is not sure.

    python examples/22_workflow.py [--model smollm2]

The agent runs within `asking`: the first answer that is not let through ends it. The workflow then waits for a person:
an `InputRequiredEvent` is sent, and the calling program answers with a `HumanResponseEvent`. The threshold lies between
the scores of two questions, for brevity: it promises nothing.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from statistics import median

from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.workflow import (
    Context,
    Event,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback, ask_person, asking, get_verdict
from semgrad_guard import Policy, Verdict

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model
QUESTIONS = ("What is the capital of France?", "What is the capital of Mongolia?")
# The agent has no tools: it is spared LlamaIndex's instructions for them.
FORMATTER = ReActChatFormatter(system_header="Answer the question.")


class Doubt(Event):
    """A question that is for a person."""

    question: str
    verdict: Verdict


class Answering(Workflow):
    """An agent, and a person behind it."""

    def __init__(self, llm: SemGradLLM) -> None:
        super().__init__(timeout=None)
        self.agent = ReActAgent(llm=llm, tools=[], formatter=FORMATTER)

    @step
    async def ask_agent(self, event: StartEvent) -> Doubt | StopEvent:
        """Let the agent answer, unless its model is in doubt."""
        output = None
        with asking(self.agent.llm.router) as question:
            output = await self.agent.run(user_msg=event.question)
        if question.refused is not None:
            return Doubt(question=event.question, verdict=question.refused)
        return StopEvent(result=str(output))

    @step
    async def ask_person(self, ctx: Context, event: Doubt) -> StopEvent:
        """Wait for the person's answer; this step runs again when it is there."""
        return StopEvent(result=await ask_person(ctx, event.question, event.verdict))


async def main() -> None:
    """Put both questions, and answer for the person."""
    scored = SemGradLLM(model=MODEL, max_tokens=24)
    scores = [
        get_verdict(scored.chat(FORMATTER.format([], [ChatMessage(question)]))).uncertainty for question in QUESTIONS
    ]
    router = UncertaintyRouterCallback(Policy(threshold=median(scores)))
    workflow = Answering(SemGradLLM(model=MODEL, max_tokens=24, router=router))
    for question in QUESTIONS:
        handler = workflow.run(question=question)
        async for event in handler.stream_events():
            if isinstance(event, InputRequiredEvent):
                print(f"waiting for a person: {event.question} ({event.record['reason']})")
                handler.ctx.send_event(HumanResponseEvent(response="Ulaanbaatar, says the librarian."))
        print(f"{question} {await handler}")


asyncio.run(main())
