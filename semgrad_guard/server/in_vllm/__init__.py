"""The guard inside `vllm serve`: vLLM's server writes, its worker scores on its own weights, our routes answer.

messages   what travels between the two processes
worker     in vLLM's worker: reads requests, scores answers
queue      in vLLM's server: has answers written, and scored together; sentences leave while their answer is written
plugin     our routes in the place of vLLM's

Why: docs/decisions.md#0169
"""
