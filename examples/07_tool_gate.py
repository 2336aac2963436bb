"""A gate for an agent's tool calls: a doubtful call does not run, and the agent asks instead.

    python examples/07_tool_gate.py

Fifty recorded payments are labelled, and a threshold is found that keeps a promise: of the payments that run, at most a
tenth are wrong. The model is a tiny one that is trained here, in some seconds. It knows who is paid for three bills.
"""

from __future__ import annotations

# Ours first: if a package is absent, its error names it.
from langchain_semgrad_guard import ChatSemGrad, ToolGate, calibrate_tool_calls

# isort: split

import random

from bills import NOT_RUN, trained
from langchain.agents import create_agent
from langchain_core.tools import tool

from semgrad_guard.estimators import GreedyNLL

RIGHT = {"rent": "Ann", "water": "Bob", "power": "Eve", "garage": "Dan"}


@tool
def pay(to: str) -> str:
    """Pay a person."""
    paid.append(to)
    return f"Paid {to}."


paid: list[str] = []
chat = ChatSemGrad.from_model(trained(), estimator=GreedyNLL(), max_tokens=80)

# Recorded without running anything; a person says which calls were right.
bills = random.Random(0).choices(list(RIGHT), weights=[3, 3, 3, 1], k=50)
messages = chat.bind_tools([pay]).batch([f"Pay the {bill}." for bill in bills])
runs = [
    ([message], {call["id"]: call["args"] == {"to": RIGHT[bill]} for call in message.tool_calls})
    for bill, message in zip(bills, messages, strict=True)
]
rule = calibrate_tool_calls(runs, alpha=0.1, delta=0.1)
print(f"calls run up to an uncertainty of {rule.threshold:.2f}")

agent = create_agent(chat, [pay], middleware=[ToolGate(rule, words=NOT_RUN)])
for bill in ("rent", "garage"):
    paid.clear()
    answer = agent.invoke({"messages": [("human", f"Pay the {bill}.")]})["messages"][-1].text
    print(f"{bill}: {answer}   (paid: {', '.join(paid) or 'nobody'})")
