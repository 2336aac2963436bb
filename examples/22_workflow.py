"""A LlamaIndex workflow agent that asks a person where it is not sure.

    python examples/22_workflow.py

The agent waits in the middle of its run: an `InputRequiredEvent` goes out with the draft, and whoever runs the workflow
answers with a `HumanResponseEvent`. The threshold of 0 makes it ask about everything.
"""

from __future__ import annotations

import asyncio

from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.workflow import HumanResponseEvent, InputRequiredEvent

from llama_index_semgrad_guard import GuardedReActAgent, SemGradLLM, ask_person, get_verdict
from semgrad_guard import Policy


async def main() -> None:
    """Run the agent once, and answer for the person."""
    agent = GuardedReActAgent(
        llm=SemGradLLM(model="pocket", max_tokens=24),
        policy=Policy(threshold=0.0),
        escalate_to=ask_person,
        # The embedded model calls no tools: it is spared LlamaIndex's instructions for them.
        formatter=ReActChatFormatter(system_header="Answer the question."),
    )
    handler = agent.run(user_msg="What is the capital of Mongolia?")
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            print(f"waiting: {event.question} (draft: {event.draft})")
            handler.ctx.send_event(HumanResponseEvent(response="Ulaanbaatar, says the librarian."))
    output = await handler
    verdict = get_verdict(output)
    print(f"delivered: {output}")
    print(f"verdict: {verdict and verdict.action}, because {verdict and verdict.reason}")


asyncio.run(main())
