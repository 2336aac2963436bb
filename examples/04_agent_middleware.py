"""An agent that searches only when it is unsure: an answer from memory is judged before it is delivered.

    python examples/04_agent_middleware.py [--model smollm2]

A small model reads one form of prompts with documents best and needs no tools to be shown to it, so `reading` puts the
tool's result into that form. The threshold is the median of four scores, for brevity: it promises nothing.
"""

from __future__ import annotations

# Ours first: if a package is absent, its error names it.
from langchain_semgrad_guard import ChatSemGrad, UncertaintyMiddleware, UncertaintyRouterCallback, get_verdict
from langchain_semgrad_guard.demo.library import BM25Retriever, documents

# isort: split

from argparse import ArgumentParser
from collections.abc import Callable
from statistics import median
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.tools import tool
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.runnables import RunnableLambda

from semgrad_guard import Policy

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")

chat = ChatSemGrad(model=parser.parse_args().model, max_tokens=24)
retriever = BM25Retriever.over(documents())


@tool
def search(question: str) -> str:
    """Look a question up in the library."""
    return "\n\n".join(document.page_content for document in retriever.invoke(question))


def look_it_up(messages: list[BaseMessage]) -> AIMessage:
    """Instead of an unsure answer: a call of the tool, or a plain admission where the tool has not helped."""
    question = messages[-1].text
    if question not in questions:  # a prompt with passages
        return AIMessage("I don't know.")
    call = tool_call(name="search", args={"question": question}, id=str(uuid4()))
    return AIMessage("", tool_calls=[call])


@wrap_model_call
def reading(request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]) -> Any:
    """The prompt: the question, and the passages."""
    question, found = request.messages[0].text, request.messages[-1]
    if isinstance(found, ToolMessage):
        read = chat.reading_prompt.format(question=question, context=found.text)
        question = read if found.text else f"Nothing was found. {question}"
    return handler(request.override(messages=[HumanMessage(question)], tools=[]))


questions = [
    "What is the capital of France?",
    "What is the chemical symbol of gold?",
    "What is the capital of Mongolia?",
    "What is the capital of Atlantis?",
]
scores = [get_verdict(message).uncertainty for message in chat.batch(questions)]
router = UncertaintyRouterCallback(Policy(threshold=median(scores)), escalate_to=RunnableLambda(look_it_up))
agent = create_agent(chat, [search], middleware=[reading, UncertaintyMiddleware(router)])

for question in questions:
    messages = agent.invoke({"messages": [("human", question)]})["messages"]
    searched = any(isinstance(message, ToolMessage) for message in messages)
    verdict = get_verdict(messages[-1])
    print(f"{question}\n  {'after searching' if searched else 'from memory'}: {messages[-1].text}   ({verdict.action})")
