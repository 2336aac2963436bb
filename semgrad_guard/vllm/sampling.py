"""How vLLM is to write an answer: its `SamplingParams` for our options."""

from __future__ import annotations

from typing import Any

from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.errors import InputError
from semgrad_guard.vllm.shared_weights import library


def require_grammars(config: Any) -> None:
    """Return if vLLM reads our grammars; `config` is its `VllmConfig`.

    Raises:
        InputError: other programs than llguidance would read them, and otherwise.
    """
    if config.structured_outputs_config.backend != "guidance":
        raise InputError(
            "an answer in this form takes vLLM's backend guidance: load it with structured_outputs_config={'backend': "
            "'guidance'}, or start `vllm serve` with --structured-outputs-config.backend guidance"
        )


def sampling_of(options: GenerationOptions, **more: Any) -> Any:
    """vLLM's parameters for these options, and `more` of its own; a sampled answer is vLLM's for that seed, not ours.

    vLLM's own end tokens are ignored: `more` names the tokens that end an answer, or the caller handles them.
    A grammar is read by llguidance, there as here.
    """
    vllm = library("vllm.sampling_params")
    form: dict[str, Any] = {}
    if options.grammar is not None:
        form["structured_outputs"] = vllm.StructuredOutputsParams(grammar=options.grammar)
    return vllm.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k or -1,
        seed=options.seed,
        ignore_eos=True,
        **form,
        **more,
    )
