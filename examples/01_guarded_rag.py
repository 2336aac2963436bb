"""A guarded RAG chain in LangChain: answer what is known, look up the rest, abstain where neither is certain.

    python examples/01_guarded_rag.py

The thresholds below are bare numbers to keep the example short: they promise nothing. `semgrad-guard demo` runs the
same chain with both stages calibrated; `semgrad-guard calibrate` makes a calibration for your own model and questions.
"""

from __future__ import annotations

from pathlib import Path

from langchain_community.retrievers import BM25Retriever
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from semgrad_guard import Policy

FOLDER = Path(__file__).parent / "documents"
documents = [Document(path.read_text(), metadata={"source": path.name}) for path in sorted(FOLDER.glob("*.md"))]
retriever = BM25Retriever.from_documents(documents, k=1, preprocess_func=lambda text: text.lower().strip("?.").split())

chat = ChatSemGrad(model="pocket", max_tokens=24)
prompt = ChatPromptTemplate.from_template("Context: {context}\n\nQuestion: {question}")
library = (
    RunnableLambda(lambda messages: messages[-1].text)
    | {"context": retriever | (lambda found: found[0].page_content), "question": RunnableLambda(str)}
    | prompt
    | chat.with_config(callbacks=[UncertaintyRouterCallback(policy=Policy(threshold=0.004))])
)
guarded = chat.with_config(callbacks=[UncertaintyRouterCallback(policy=Policy(threshold=0.0005), escalate_to=library)])

for question in (
    "What is the capital of France?",
    "What is the capital of Mongolia?",
    "Who won the Ulverton chess cup?",
):
    answer = guarded.invoke(question)
    verdict = get_verdict(answer)
    print(
        f"{question}\n  {verdict.action}: {answer.text}   (uncertainty of the first draft: {verdict.uncertainty:.2e})"
    )
