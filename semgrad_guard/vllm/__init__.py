"""vLLM writes, and our engine scores on vLLM's own weights (extra `vllm`)."""

from __future__ import annotations

from semgrad_guard.vllm.language_model import VLLMLanguageModel

__all__ = ["VLLMLanguageModel"]
