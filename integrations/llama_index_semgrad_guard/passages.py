"""What may go out beside a text that stands in a draft's place: retrieved passages, and nothing that a model wrote.

Composite engines put sub-answers among their source nodes, and queries, selections and structures into the metadata. A
node may go out if a retriever found it as it is, without asking a model, and metadata if it is such a node's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.schema import NodeWithScore

from llama_index_semgrad_guard.calls import Passage, Turn


def passages(nodes: Sequence[NodeWithScore], turn: Turn) -> list[NodeWithScore]:
    """Those of an answer's source nodes that were retrieved, and are as they were."""
    found, now = turn.passages(), [Passage.of(node) for node in nodes]
    kept = [node for node, passage in zip(nodes, now, strict=True) if (passage.id, passage.hash) in found]
    return [
        node
        if type(node) is NodeWithScore
        else NodeWithScore(node=node.node, score=node.score)  # no field of a subclass
        for node in kept
    ]


def about_passages(metadata: Mapping[str, Any] | None, kept: Sequence[NodeWithScore]) -> dict[str, Any]:
    """What an answer's metadata says of these nodes: the nodes' own metadata, by their ids."""
    known = {node.node.node_id: node.node.metadata for node in kept}
    return {name: known[name] for name in metadata or {} if name in known}
