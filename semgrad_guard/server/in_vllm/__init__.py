"""The guard inside `vllm serve`: vLLM's server writes, its worker scores on its own weights, our routes answer.

scoring_worker   in vLLM's worker: reads requests, scores answers; and the messages between the two processes
queue            in vLLM's server: has answers written, and scored together; sentences leave while they are written
plugin           our routes in the place of vLLM's

Why: docs/decisions.md#0169
"""
