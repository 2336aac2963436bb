"""An agent that pays bills: a doubtful call of a tool does not run, and the agent asks instead.

    python examples/23_function_agent.py

Fifty recorded payments are labelled, and a threshold is found that keeps a promise: of the payments that run, at most a
tenth are wrong. The model is a tiny one that is trained here, in some seconds. It knows who is paid for three bills.
"""

from __future__ import annotations

# Ours first: if a package is absent, its error names it.
from llama_index_semgrad_guard import SemGradLLM, ToolGate, calibrate_tool_calls

# isort: split

import asyncio
import random

from bills import NOT_RUN, trained
from llama_index.core.agent.workflow import FunctionAgent, ToolCall

from semgrad_guard.estimators import GreedyNLL

RIGHT = {"rent": "Ann", "water": "Bob", "power": "Eve", "garage": "Dan"}
paid: list[str] = []


def pay(to: str) -> str:
    """Pay a person."""
    paid.append(to)
    return f"Paid {to}."


async def main() -> None:
    """Record payments and calibrate on them; then pay a bill that the model knows, and one that it cannot know."""
    llm = SemGradLLM.from_model(trained(), estimator=GreedyNLL(), max_tokens=80)
    runs = []  # in a sandbox; a person says which calls were right
    for bill in random.Random(0).choices(list(RIGHT), weights=[3, 3, 3, 1], k=50):
        run = FunctionAgent(llm=llm, tools=[pay]).run(f"Pay the {bill}.")
        events = [event async for event in run.stream_events()]
        calls = [event for event in events if isinstance(event, ToolCall)]
        runs.append((events, {call.tool_id: call.tool_kwargs == {"to": RIGHT[bill]} for call in calls}))
    rule = calibrate_tool_calls(runs, alpha=0.1, delta=0.1)
    print(f"calls run up to an uncertainty of {rule.threshold:.2f}")

    gate = ToolGate(rule, words=NOT_RUN)
    agent = FunctionAgent(llm=llm, tools=gate.tools([pay]))
    for bill in ("rent", "garage"):
        paid.clear()
        with gate.turn():
            answer = await agent.run(f"Pay the {bill}.")
        print(f"{bill}: {answer}   (paid: {', '.join(paid) or 'nobody'})")


asyncio.run(main())
