"""A person reviews an agent's doubtful answers: the graph waits, and the model is called once.

The threshold lies between the surest answer and the others, for brevity: it promises nothing.

python examples/05_human_review.py [--model smollm2]
"""

from __future__ import annotations

# Ours first: if a package is absent, its error names it.
from langchain_semgrad_guard import ChatSemGrad, HumanReview, UncertaintyMiddleware, get_verdict

# isort: split

from argparse import ArgumentParser
from statistics import median
from typing import Any

from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from semgrad_guard import Policy

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model

decisions: dict[str, dict[str, Any]] = {  # in real use: a form, a ticket, a chat with the person on duty
    "What is the capital of France?": {"type": "approve"},
    "What is the capital of Mongolia?": {
        "type": "edit",
        "edited_action": {"name": "answer", "args": {"text": "Ulaanbaatar"}},
    },
    "What is the capital of Atlantis?": {"type": "reject", "message": "Nobody knows."},
}
chat = ChatSemGrad(model=MODEL, max_tokens=24)
scores = sorted(get_verdict(answer).uncertainty for answer in chat.batch(list(decisions)))
review = UncertaintyMiddleware(Policy(threshold=median(scores[:2])), escalate_to=HumanReview())
agent = create_agent(chat, [], middleware=[review], checkpointer=InMemorySaver())

for question, decision in decisions.items():
    config: Any = {"configurable": {"thread_id": question}}
    print(question)
    state = agent.invoke({"messages": [("human", question)]}, config)
    for interrupt in state.get("__interrupt__", ()):  # none where the model is sure
        (request,) = interrupt.value["action_requests"]
        print(f"  waiting: {request['args']['text']} ({request['description']})")
        state = agent.invoke(Command(resume={"decisions": [decision]}), config)
    answer = state["messages"][-1]
    verdict = get_verdict(answer)
    print(f"  delivered: {answer.text} ({verdict.reason})")
