"""A LlamaIndex workflow agent that asks a person where it is not sure.

    python examples/22_workflow.py [--model smollm2]

The agent waits in the middle of its run: an `InputRequiredEvent` is sent with the draft, and the calling program
answers with a `HumanResponseEvent`. The threshold lies between the scores of two questions, for brevity: it promises
nothing.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from statistics import median

from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.workflow import HumanResponseEvent, InputRequiredEvent

from llama_index_semgrad_guard import GuardedReActAgent, SemGradLLM, ask_person, get_verdict
from semgrad_guard import Policy

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model
QUESTIONS = ("What is the capital of France?", "What is the capital of Mongolia?")


async def main() -> None:
    """Put the doubtful question, and answer for the person."""
    llm = SemGradLLM(model=MODEL, max_tokens=24)
    # The agent has no tools: it is spared LlamaIndex's instructions for them.
    formatter = ReActChatFormatter(system_header="Answer the question.")
    scores = {
        question: get_verdict(llm.chat(formatter.format([], [ChatMessage(question)]))).uncertainty
        for question in QUESTIONS
    }
    agent = GuardedReActAgent(
        llm=llm,
        policy=Policy(threshold=median(scores.values())),
        escalate_to=ask_person,
        formatter=formatter,
    )
    handler = agent.run(user_msg=max(QUESTIONS, key=scores.__getitem__))
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            print(f"waiting: {event.question} (draft: {event.draft})")
            handler.ctx.send_event(HumanResponseEvent(response="Ulaanbaatar, says the librarian."))
    output = await handler
    verdict = get_verdict(output)
    print(f"delivered: {output}")
    print(f"verdict: {verdict and verdict.action}, because {verdict and verdict.reason}")


asyncio.run(main())
