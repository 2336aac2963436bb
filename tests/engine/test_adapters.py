"""PEFT's adapters and tuned prompts: exact as they are switched, and the user's own model keeps all that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedTokenizerFast
from transformers.integrations.peft import MIN_PEFT_VERSION

from semgrad_guard import GenerationOptions, LanguageModel, gradient_scores
from semgrad_guard.engine.scores.architecture import weight_fingerprint
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.errors import UnsupportedModelError

from .cases import CASES, Case
from .snapshots import unchanged
from .switches import plain_scores
from .tiny_models import build

peft = pytest.importorskip("peft")

CASE = CASES[0]
BRIEF = GenerationOptions(max_tokens=5)
LORA = {"r": 4, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.3}


def varied(model: Any) -> Any:
    """Adapters of a size that matters: those of a fresh one are zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            if "lora" in name or "prompt" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def adapted(**changes: Any) -> Any:
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA)
    return varied(peft.get_peft_model(build("llama", **changes), config, autocast_adapter_dtype=False))


def fingerprint(model: Any) -> str:
    with unchanged(model):
        return scorer_of(model).fingerprint


def check(model: Any) -> float:
    with unchanged(model):
        found = gradient_scores(model, CASE.prompt, CASE.response, semantic_token=CASE.semantic_token)
    assert (found.semgrad, found.paragrad) == pytest.approx(plain_scores(model, CASE), rel=1e-7)
    assert found.semgrad is not None
    return found.semgrad


def test_every_switch_of_an_adapter_is_seen_and_makes_another_model() -> None:
    model = adapted()
    seen, marks = {"on": check(model)}, {"on": fingerprint(model)}
    assert marks["on"] != weight_fingerprint(model)
    with model.disable_adapter():
        seen["off"], marks["off"] = check(model), fingerprint(model)
    assert (check(model), fingerprint(model)) == (seen["on"], marks["on"])
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"]))
    varied(model)
    marks["two"] = fingerprint(model)
    model.set_adapter("other")
    seen["other"], marks["other"] = check(model), fingerprint(model)
    model.set_adapter("default")
    assert fingerprint(model) == marks["two"]
    model.delete_adapter("other")
    seen["deleted"] = check(model)
    for layer in model.base_model.model.model.layers:
        layer.self_attn.q_proj.scaling["default"] *= 2
    seen["scaled"], marks["scaled"] = check(model), fingerprint(model)
    model.merge_adapter()
    assert check(model) == pytest.approx(seen["scaled"], rel=1e-9)
    marks["merged"] = fingerprint(model)
    model.unmerge_adapter()
    model.train()
    assert check(model) == pytest.approx(seen["scaled"], rel=1e-9)
    unloaded = model.merge_and_unload()
    assert check(unloaded) == pytest.approx(seen["scaled"], rel=1e-9)
    marks["unloaded"] = fingerprint(unloaded)
    assert len({round(value, 12) for value in seen.values()}) == 4 + (seen["deleted"] != seen["on"])
    assert len(set(marks.values())) == len(marks)


needs_later_peft = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"transformers {transformers.__version__} asks for PEFT {MIN_PEFT_VERSION}; here is {peft.__version__}",
)


@needs_later_peft
def test_adapters_of_transformers_own_making() -> None:
    model = build("llama")
    base = check(model)
    model.add_adapter(peft.LoraConfig(**LORA))
    varied(model)
    on = check(model)
    model.disable_adapters()
    assert check(model) == pytest.approx(base, rel=1e-9) != on
    model.enable_adapters()
    assert check(model) == on


def test_tuned_prompts_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    with pytest.raises(UnsupportedModelError, match="tuned prompt of PEFT"):
        check(peft.get_peft_model(build("llama"), config, autocast_adapter_dtype=False))


def test_answers_and_their_scores_follow_the_switch(tokenizer: PreTrainedTokenizerFast) -> None:
    model = adapted(vocab_size=258, eos_token_id=None)
    language_model = LanguageModel.from_transformers(model, tokenizer, name="adapted")

    def answer() -> tuple[int, ...]:
        with unchanged(model):
            generations = language_model.generate_batch(["What is tea?", "Why?"], BRIEF)
            timed = [generation.evidence.gradients() for generation in generations]
        for generation, single in zip(generations, timed, strict=True):
            row, response = list(generation.prompt.ids), list(generation.response_ids)
            ids = torch.tensor([row])
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
            own = model.generate(input_ids=ids, pad_token_id=257, **options)[0, len(row) :].tolist()
            assert [token for token in own if token != 257] == response
            assert single is not None
            expected = plain_scores(model, Case(row, response, generation.prompt.semantic_token.offset))
            assert (single.scores.semgrad, single.scores.paragrad) == pytest.approx(expected, rel=1e-7)
        return generations[0].response_ids

    first = answer()
    with model.disable_adapter():
        assert answer() != first
    assert answer() == first


SMALL = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "LoHaConfig": {"r": 4},
    "ShiraConfig": {"r": 4},
    "VeraConfig": {"r": 4, "projection_prng_key": 1},
    "OFTConfig": {"oft_block_size": 4},
    "IA3Config": {"feedforward_modules": ["up_proj"]},
    "AdaLoraConfig": {"init_r": 4, "target_r": 2, "total_step": 10},
    "FourierFTConfig": {"n_frequency": 20},
    "RoadConfig": {"group_size": 8},
    "DeloraConfig": {"r": 4},
}
"""Kinds of adapters by the names of their configurations."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_exact_or_refused(kind: str) -> None:
    if not hasattr(peft, kind):
        pytest.skip(f"this PEFT has no {kind}")
    config = getattr(peft, kind)(**{**SMALL, **KINDS[kind]})
    model = peft.get_peft_model(build("llama").float(), config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    found = gradient_scores(model, CASE.prompt, CASE.response, semantic_token=CASE.semantic_token)
    assert (found.semgrad, found.paragrad) == pytest.approx(plain_scores(model, CASE), rel=1e-3)
