"""A person decides about what an agent is unsure of: the graph waits, and the model is asked once.

python examples/05_human_review.py
"""

from __future__ import annotations

# Ours first: where something is not installed, it says what to install.
from langchain_semgrad_guard import ChatSemGrad, HumanReview, UncertaintyMiddleware, get_verdict

# isort: split

from typing import Any

from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from semgrad_guard import Policy

review = UncertaintyMiddleware(Policy(threshold=0), escalate_to=HumanReview())  # 0: everything waits for a person
agent = create_agent(ChatSemGrad(model="pocket", max_tokens=24), [], middleware=[review], checkpointer=InMemorySaver())

decisions: dict[str, dict[str, Any]] = {  # in earnest: a form, a ticket, a chat with the person on duty
    "What is the capital of France?": {"type": "approve"},
    "What is the capital of Mongolia?": {
        "type": "edit",
        "edited_action": {"name": "answer", "args": {"text": "Ulaanbaatar"}},
    },
    "What is the capital of Atlantis?": {"type": "reject", "message": "Nobody knows."},
}
for question, decision in decisions.items():
    config: Any = {"configurable": {"thread_id": question}}
    waiting = agent.invoke({"messages": [("human", question)]}, config)["__interrupt__"][0].value
    (request,) = waiting["action_requests"]
    print(f"{question}\n  waiting: {request['args']['text']} ({request['description']})")
    answer = agent.invoke(Command(resume={"decisions": [decision]}), config)["messages"][-1]
    verdict = get_verdict(answer)
    print(f"  delivered: {answer.text} ({verdict.reason})")
