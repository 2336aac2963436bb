"""The demo's library: documents and questions on disk, and a retriever over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from semgrad_guard.errors import MissingExtraError, require_installed
from semgrad_guard.pocket import QUESTIONS_PATH

require_installed("bm25s", extra="demo")  # an error at once, not after a model has been loaded

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
        bm25s = _bm25s()
        index = bm25s.BM25()
        texts = [f"{document.metadata['title']}. " * 2 + document.page_content for document in documents]
        index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
        return cls(documents=documents, index=index)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        tokens = _bm25s().tokenize([query], stopwords="en", show_progress=False)
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


def _bm25s() -> Any:
    try:
        import bm25s  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise MissingExtraError("bm25s", extra="demo") from error
    return bm25s
