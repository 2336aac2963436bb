"""A guarded RAG chain in LangChain: answer from memory, look up the rest, abstain where neither is certain.

    python examples/01_guarded_rag.py [--model smollm2]

The thresholds come from the scores of a few questions: they promise nothing. `semgrad-guard demo` runs such a chain
calibrated; `semgrad-guard calibrate` makes a calibration for your own model and questions.
"""

from __future__ import annotations

from argparse import ArgumentParser
from statistics import quantiles
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from langchain_semgrad_guard.demo.library import BM25Retriever, documents, questions
from semgrad_guard import Policy

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")

chat = ChatSemGrad(model=parser.parse_args().model, max_tokens=24)
retriever = BM25Retriever.over(documents())


def with_documents(messages: list[BaseMessage]) -> str:
    """The question with the library's passage, if there is one, in the form that this model reads."""
    question = messages[-1].text
    found = "\n\n".join(document.page_content for document in retriever.invoke(question))
    return chat.reading_prompt.format(question=question, context=found) if found else question


def guard(chain: Runnable[Any, AIMessage], *, share: int) -> Policy:
    """A threshold that lets about so many of ten questions through: a quantile of their scores."""
    answers = chain.batch([[HumanMessage(row.question)] for row in questions()[:32]])
    scores = [get_verdict(answer).uncertainty for answer in answers]
    return Policy(threshold=quantiles(scores, n=10)[share - 1])


reading = RunnableLambda(with_documents) | chat
second = UncertaintyRouterCallback(guard(reading, share=8))
library = RunnableLambda(with_documents) | ChatSemGrad(model=chat.model, max_tokens=24, router=second)
first = UncertaintyRouterCallback(guard(chat, share=3), escalate_to=library)
guarded = ChatSemGrad(model=chat.model, max_tokens=24, router=first)

for question in (
    "What is the capital of France?",
    "What is the capital of Mongolia?",
    "What is the capital of Atlantis?",
):
    answer = guarded.invoke(question)
    verdict = get_verdict(answer)
    print(f"{question}\n  {verdict.action}: {answer.text}   (uncertainty of the draft: {verdict.uncertainty:.2e})")
