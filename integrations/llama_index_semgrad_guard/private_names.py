"""The names of LlamaIndex that are not public and on which withholding depends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import CondenseQuestionChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.response_synthesizers import BaseSynthesizer, Refine
from llama_index.core.workflow import Context

from semgrad_guard.adapters.frameworks import absent_names

NAMES = {
    "llama_index_instrumentation.span": ("active_span_id",),
    "llama_index_instrumentation.span_handlers:BaseSpanHandler": ("span_enter", "span_exit"),
}
USES: dict[Callable[..., Any], tuple[str, ...]] = {
    BaseRetriever.retrieve: ("_retrieve",),
    BaseRetriever.aretrieve: ("_aretrieve",),
    BaseNodePostprocessor.postprocess_nodes: ("_postprocess_nodes",),
    BaseNodePostprocessor.apostprocess_nodes: ("_apostprocess_nodes",),
    Context.__init__: ("_face",),
    BaseSynthesizer.__init__: ("_streaming",),
    Refine.__init__: ("_output_cls",),  # pyright: ignore[reportUnknownMemberType]
    CondenseQuestionChatEngine.__init__: ("_memory",),
    ContextChatEngine.__init__: ("_memory",),
    SimpleChatEngine.__init__: ("_memory",),
}
"""Methods that record which passages a model took part in, and fields that a guard reads or replaces."""

ABSENT = tuple(absent_names(NAMES, USES))
"""Those that the installed LlamaIndex lacks."""
