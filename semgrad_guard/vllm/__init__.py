"""vLLM writes, and our engine scores on vLLM's own weights."""

from semgrad_guard.vllm.vllm_language_model import VLLMLanguageModel as VLLMLanguageModel
