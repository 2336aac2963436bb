"""Folders that hold an adapter alone: exact on their base model, or refused in words. Skipped where PEFT is absent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.errors import MissingExtraError, ModelNotFoundError, UnsupportedModelError

from .oracle import reference_scores, worst_relative_error

LORA: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "v_proj"]},
    "DoRA": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
    "a trained norm": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained head and embedding": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2]}},
}


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft")


def adapted(peft: Any, base: Path, folder: Path, **settings: Any) -> Path:
    """An adapter with weights of a size that is noticed."""
    model = peft.get_peft_model(
        LlamaForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **settings)
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora" in name or "modules_to_save" in name or "trainable_tokens_delta" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def error_of(model: LanguageModel, expected: Any) -> float:
    """The worst relative error, of a given text and of an answer."""
    prompt = model.render("q")
    ids: Any = model.tokenizer("an answer", add_special_tokens=False)["input_ids"]
    answer = model.generate("q", GenerationOptions(max_tokens=6))
    timed = answer.evidence.gradients()
    assert timed is not None
    pairs = ((model.score("q", "an answer"), ids), (timed.scores, list(answer.response_ids)))
    return max(
        worst_relative_error(found, reference_scores(expected, prompt.ids, response, prompt.semantic_token.offset))
        for found, response in pairs
    )


@pytest.mark.parametrize("kind", LORA)
def test_an_adapter_is_scored_as_the_merged_model(kind: str, peft: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = adapted(peft, checkpoint, tmp_path / "adapter", **LORA[kind])
    merged = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(checkpoint), folder).merge_and_unload()
    model = LanguageModel.from_pretrained(str(folder))
    assert error_of(model, merged.eval()) < 1e-4
    assert error_of(model, LlamaForCausalLM.from_pretrained(checkpoint).eval()) > 1e-3, "the adapter does nothing"
    plain = LanguageModel.from_pretrained(str(checkpoint))
    assert (model.name, model.render("q")) == ("adapter", plain.render("q"))
    assert model.identity.fingerprint != plain.identity.fingerprint


def test_an_adapters_own_tokenizer_goes_before_the_bases(peft: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Its tokens may be more than the base model's: rows are added, as they were for its training."""
    tokenizer = LanguageModel.from_pretrained(str(checkpoint)).tokenizer
    tokenizer.add_tokens(["<new>"])
    wider = LlamaForCausalLM.from_pretrained(checkpoint)
    wider.resize_token_embeddings(len(tokenizer))
    wider.save_pretrained(tmp_path / "wider")
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    folder = adapted(peft, tmp_path / "wider", tmp_path / "adapter", **settings)
    tokenizer.save_pretrained(folder)
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": str(checkpoint)}))
    model = LanguageModel.from_pretrained(str(folder))
    assert len(model.tokenizer) == len(tokenizer)
    assert model.score("q <new>", "an answer").semgrad > 0


def test_an_adapter_on_the_head_is_refused(peft: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = adapted(peft, checkpoint, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    with pytest.raises(UnsupportedModelError, match=r"adapter of its own.*merge_and_unload"):
        LanguageModel.from_pretrained(str(folder))


def test_an_adapter_that_lacks_a_tensor_is_refused(peft: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = adapted(peft, checkpoint, tmp_path / "adapter", target_modules=["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ModelNotFoundError, match=f"lacks 1 tensor.*{lost}"):
        LanguageModel.from_pretrained(str(folder))


def test_an_adapter_of_another_model_is_refused(peft: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = adapted(peft, checkpoint, tmp_path / "adapter", target_modules=["q_proj"])
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**described, "target_modules": ["nothing"]}))
    with pytest.raises(UnsupportedModelError, match="does not fit its base model"):
        LanguageModel.from_pretrained(str(folder))
    (folder / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": None}))
    with pytest.raises(ModelNotFoundError, match="does not name its base"):
        LanguageModel.from_pretrained(str(folder))


def test_without_peft_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"semgrad-guard\[peft\]"):
        LanguageModel.from_pretrained(str(tmp_path))
