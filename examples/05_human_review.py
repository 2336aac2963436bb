"""A person reviews an agent's doubtful answers and calls: the target of the router interrupts the graph.

The graph waits in its checkpoint, which holds the draft; then the model node runs again, with the person's decision.
The threshold lies between the surest answer and the others, for brevity: it promises nothing.

python examples/05_human_review.py [--model smollm2]
"""

from __future__ import annotations

# Ours first: if a package is absent, its error names it.
from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict, withheld_draft

# isort: split

from argparse import ArgumentParser
from statistics import median
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from semgrad_guard import Policy


def ask_person(messages: Any) -> AIMessage | str:
    """A person approves the draft, edits its text or its calls, or rejects it in words of their own (or in none)."""
    draft = withheld_draft()
    decision = interrupt({"text": draft.text, "calls": draft.tool_calls, "choices": ["approve", "edit", "reject"]})
    if decision["type"] == "reject":
        return decision.get("message", "")  # an empty answer is the router's own abstention
    text, calls = decision.get("text", draft.text), decision.get("calls", draft.tool_calls)
    return AIMessage(text, tool_calls=calls)


parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model

decisions: dict[str, dict[str, Any]] = {  # in real use: a form, a ticket, a chat with the person on duty
    "What is the capital of France?": {"type": "approve"},
    "What is the capital of Mongolia?": {"type": "edit", "text": "Ulaanbaatar"},
    "What is the capital of Atlantis?": {"type": "reject", "message": "Nobody knows."},
}
chat = ChatSemGrad(model=MODEL, max_tokens=24)
scores = sorted(get_verdict(answer).uncertainty for answer in chat.batch(list(decisions)))
router = UncertaintyRouterCallback(Policy(threshold=median(scores[:2])), escalate_to=RunnableLambda(ask_person))
agent = create_agent(ChatSemGrad(model=MODEL, max_tokens=24, router=router), [], checkpointer=InMemorySaver())

for question, decision in decisions.items():
    config: Any = {"configurable": {"thread_id": question}}
    print(question)
    state = agent.invoke({"messages": [("human", question)]}, config)
    for waiting in state.get("__interrupt__", ()):  # none where the model is sure
        print(f"  waiting: {waiting.value['text']}")
        state = agent.invoke(Command(resume=decision), config)
    answer = state["messages"][-1]
    print(f"  delivered: {answer.text} ({get_verdict(answer).action})")
