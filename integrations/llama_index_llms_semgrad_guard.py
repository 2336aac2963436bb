"""In a wheel this file is `llama_index.llms.semgrad_guard`: where LlamaIndex's users look for an LLM."""

from __future__ import annotations

from llama_index_semgrad_guard import SemGradLLM

__all__ = ["SemGradLLM"]
