"""The demo's library: documents and questions on disk, and a retriever over them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from semgrad_guard.errors import MissingExtraError

_PACKAGED = Path(__file__).parent
_DATA = _PACKAGED if (_PACKAGED / "documents").is_dir() else Path(__file__).parents[3] / "examples"
"""A wheel carries its data beside this file; a checkout has it in `examples/`."""


@dataclass(frozen=True)
class Question:
    """A question with its right answers; `document` is the file that answers it."""

    question: str
    answers: tuple[str, ...]
    document: str | None = None


def documents() -> list[Document]:
    """Every document, without its title line."""
    return [
        Document(page_content=path.read_text().split("\n", 2)[2].strip(), metadata={"source": path.name})
        for path in sorted((_DATA / "documents").glob("*.md"))
    ]


def questions() -> list[Question]:
    """Questions that the documents answer, in a fixed random order."""
    rows = [json.loads(line) for line in (_DATA / "questions.jsonl").read_text().splitlines()]
    return [Question(row["question"], tuple(row["answers"]), row["document"]) for row in rows]


def retriever() -> BaseRetriever:
    """BM25 over the documents, one document a question."""
    try:
        from langchain_community.retrievers import BM25Retriever
    except ImportError as error:
        raise MissingExtraError("langchain-community", extra="demo") from error
    return BM25Retriever.from_documents(documents(), k=1, preprocess_func=_words)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
