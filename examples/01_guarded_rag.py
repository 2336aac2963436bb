"""A guarded RAG chain in LangChain: answer what is known, look up the rest, abstain where neither is certain.

    python examples/01_guarded_rag.py

The thresholds below are bare numbers to keep the example short: they promise nothing. `semgrad-guard demo` runs the
same chain with both stages calibrated; `semgrad-guard calibrate` makes a calibration for your own model and questions.
"""

from __future__ import annotations

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from langchain_semgrad_guard.demo.library import BM25Retriever, documents
from semgrad_guard import Policy

chat = ChatSemGrad(model="pocket", max_tokens=24)
retriever = BM25Retriever.over(documents())


def with_documents(messages: list[BaseMessage]) -> str:
    """The question, before what the library says about it, if anything."""
    question = messages[-1].text
    found = "\n\n".join(document.page_content for document in retriever.invoke(question))
    return f"Question: {question}\nContext: {found}\nAnswer:" if found else question


library = RunnableLambda(with_documents) | chat.with_config(
    callbacks=[UncertaintyRouterCallback(policy=Policy(threshold=0.002))]
)
guarded = chat.with_config(callbacks=[UncertaintyRouterCallback(policy=Policy(threshold=0.0001), escalate_to=library)])

for question in (
    "What is the capital of France?",
    "What is the capital of Mongolia?",
    "What is the capital of Atlantis?",
):
    answer = guarded.invoke(question)
    verdict = get_verdict(answer)
    print(f"{question}\n  {verdict.action}: {answer.text}   (uncertainty of the draft: {verdict.uncertainty:.2e})")
