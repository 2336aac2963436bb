"""Retrieved passages, as they were at one time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from llama_index.core.schema import BaseNode

_NOT_COMPARED = {"embedding", "obj"}
"""Fields of a passage that its retriever may add, and the index that it refers to."""


@dataclass(frozen=True)
class Passage:
    """A retrieved passage at one time: its id, the hash of all its content, and its text."""

    id: str
    hash: str
    text: str

    @classmethod
    def of(cls, node: Any) -> Passage:
        """A node with a score, or without."""
        inner = getattr(node, "node", node)
        if not isinstance(inner, BaseNode):
            return cls("", "", "")
        content = repr(inner.model_dump(exclude=_NOT_COMPARED, warnings=False))  # relationships and templates as well
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        return cls(inner.node_id, digest, inner.get_content())
