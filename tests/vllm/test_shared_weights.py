"""The scoring model on weights as vLLM holds them: fused, padded, tied; here without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from semgrad_guard.errors import UnsupportedModelError
from semgrad_guard.vllm.shared_weights import SUPPORTED, twin_of

from .conftest import SIZES
from .passes import shared

PADDING = 5


def config_of(kind: str, **given: Any) -> Any:
    """A small configuration of that type."""
    return AutoConfig.for_model(kind, **{**SIZES, "vocab_size": 300, **given})


def as_vllm_holds_it(model: nn.Module) -> nn.Module:
    """A module with the parameters of a transformers model under vLLM's names: fused, and the vocabulary padded."""
    held, parameters = nn.Module(), dict(model.named_parameters())
    for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        for name in [name for name in parameters if f".{parts[0]}." in name]:
            pieces = [parameters.pop(name.replace(parts[0], part)) for part in parts]
            parameters[name.replace(parts[0], whole)] = nn.Parameter(torch.cat(list(pieces)))
    for name, parameter in parameters.items():
        at, *path = (held, *name.split("."))
        for part in path[:-1]:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        rows = nn.functional.pad(parameter, (0, 0, 0, PADDING)) if len(parameter) == 300 else parameter
        at.register_parameter(path[-1], nn.Parameter(rows.detach().clone()))
    return held


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_layout_computes_the_same_on_shared_weights(kind: str, tied: bool) -> None:
    torch.manual_seed(0)
    config = config_of(kind, tie_word_embeddings=tied)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    held = as_vllm_holds_it(model)
    twin: Any = twin_of(held, config, torch.float32)
    assert shared(twin, held) == len(list(twin.parameters()))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=0, atol=0)
        held.get_parameter("model.norm.weight").add_(1)  # one memory, and no copy of it
        assert not torch.equal(twin(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["opt", "gpt2", "gemma3", "mixtral"])
def test_an_unknown_layout_is_refused_with_what_to_do(kind: str) -> None:
    """Gemma 3 with pictures is one: its text part has a name of its own."""
    with pytest.raises(UnsupportedModelError, match=rf"type '{kind}' .*serve --upstream"):
        twin_of(nn.Module(), AutoConfig.for_model(kind), torch.float32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: p.to(torch.bfloat16), "in float32"),
        (lambda p: p[: len(p) // 2], "shape"),
        (lambda p: p.new_zeros(0), "shape"),
    ],
    ids=["another number format", "a part", "emptied after packing"],
)
def test_weights_that_are_not_whole_are_refused(change: Any, named: str) -> None:
    config = config_of("llama")
    held = as_vllm_holds_it(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    layer: Any = held.get_submodule("model.layers.2.mlp.down_proj")
    layer.weight = nn.Parameter(change(layer.weight.detach()))
    with pytest.raises(UnsupportedModelError, match=rf"layers.2.mlp.down_proj.weight.*{named}"):
        twin_of(held, config, torch.float32)
