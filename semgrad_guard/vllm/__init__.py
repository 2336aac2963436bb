"""vLLM writes, and our engine scores on vLLM's own weights."""

from __future__ import annotations

from semgrad_guard.vllm.language_model import VLLMLanguageModel

__all__ = ["VLLMLanguageModel"]
