"""The demo's library: documents and questions on disk, a retriever over them, and a chain that reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough

from langchain_semgrad_guard.chat_semgrad import ChatSemGrad
from semgrad_guard import METADATA_KEY
from semgrad_guard.errors import require_installed
from semgrad_guard.guard.decision import unscored
from semgrad_guard.named import reading_prompt
from semgrad_guard.pocket import QUESTIONS_PATH
from semgrad_guard.settings import ABSTAIN_MESSAGE

require_installed("bm25s", extra="demo")  # an error at once, not after a model has been loaded
_bm25s: Any = import_module("bm25s")

_PACKAGED = Path(__file__).parent
_DATA = _PACKAGED if (_PACKAGED / "documents.jsonl").exists() else Path(__file__).parents[3] / "examples"
"""A wheel carries its data next to this file; a checkout has it in `examples/`."""


SHOWN = (
    "Do you know the capital of France?",
    "Tell me the chemical symbol of gold.",
    "Which currency do people use in Japan?",
    "What continent is Kenya on?",
    "Do you know the capital of Mongolia?",
    "Tell me the currency of Cambodia.",
    "What atomic number does uranium have?",
    "Do you know the capital of Argentina?",
)
NOWHERE = (
    "Which city is Atlantis's capital?",
    "Tell me the currency of Narnia.",
    "Tell me the chemical symbol of kryptonite.",
)
"""No document answers these, nor does the model know them."""


@dataclass(frozen=True)
class Question:
    """A question with its right answers; `document` is the source that answers it."""

    question: str
    answers: tuple[str, ...]
    document: str | None = None


class BM25Retriever(BaseRetriever):
    """The document that fits a question best, by BM25 (the `bm25s` package), or none. Titles count twice, as is usual.

    A document must score `least`: one that shares only common words with the question ("capital") is not about it.
    """

    documents: Sequence[Document]
    index: Any
    least: float = 2.9

    @classmethod
    def over(cls, documents: Sequence[Document]) -> BM25Retriever:
        """Index documents by title and text."""
        index = _bm25s.BM25()
        texts = [f"{document.metadata['title']}. " * 2 + document.page_content for document in documents]
        index.index(_bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
        return cls(documents=documents, index=index)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        tokens = _bm25s.tokenize([query], stopwords="en", show_progress=False)
        found, scores = self.index.retrieve(tokens, k=1, show_progress=False)
        return [self.documents[i] for i, score in zip(found[0], scores[0], strict=True) if score >= self.least]


def documents() -> list[Document]:
    """Every document, with its source and its title as metadata."""
    rows = [json.loads(line) for line in (_DATA / "documents.jsonl").read_text(encoding="utf-8").splitlines()]
    return [Document(page_content=row.pop("text"), metadata=row) for row in rows]


def questions() -> list[Question]:
    """Questions that the documents answer, in a fixed random order."""
    rows = [json.loads(line) for line in QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()]
    return [Question(row["question"], tuple(row["answers"]), row["document"]) for row in rows]


def reading_chain(retriever: BaseRetriever, reader: ChatSemGrad, *, model: str) -> Runnable[Any, AIMessage]:
    """messages -> the document that fits the question -> the reader's answer, which names its source.

    The prompt is the one that this model reads well. Where no document fits there is nothing to read and nothing to
    score: an abstention, without a call of the model.
    """

    def retrieve(given: Any) -> dict[str, Any]:
        question = given if isinstance(given, str) else str(cast("Sequence[BaseMessage]", given)[-1].text)
        found: Sequence[Document] = retriever.invoke(question)
        context = "\n\n".join(document.page_content for document in found)
        return {"question": question, "context": context, "sources": [d.metadata["source"] for d in found]}

    def cite(step: dict[str, Any]) -> AIMessage:
        message: AIMessage = step["message"]
        return message.model_copy(update={"additional_kwargs": {"sources": step["sources"]}})

    prompt = ChatPromptTemplate.from_template(reading_prompt(model))
    read = RunnablePassthrough.assign(message=prompt | reader) | RunnableLambda(cite)
    return RunnableLambda(retrieve) | RunnableBranch((lambda step: not step["sources"], RunnableLambda(_nothing)), read)


def _nothing(_: object) -> AIMessage:
    verdict = unscored(ABSTAIN_MESSAGE, reason="no document fits the question").revised(action="abstain")
    return AIMessage(content=verdict.text, response_metadata={METADATA_KEY: verdict.metadata()})
