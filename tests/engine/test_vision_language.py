"""Vision-language models by name: their text is generated and scored exactly, as in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from semgrad_guard import LanguageModel
from semgrad_guard.engine.answers.options import GenerationOptions
from tests.random_llama import byte_tokenizer

from .oracle import reference_scores, worst_relative_error

TEXT = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
EYES_OF_QWEN = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"text_config": TEXT | SECTIONS, "vision_config": EYES_OF_QWEN | {"deepstack_visual_indexes": [0]}},
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": EYES | {"model_type": "pixtral", "image_size": 8},
    },
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16},
        "vision_config": EYES | {"image_size": 8},
        "mm_tokens_per_image": 4,
        "image_token_index": 0,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_text_of_a_vision_language_model_by_name(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **MODELS[name])).float().eval()
    made.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = LanguageModel.from_pretrained(str(tmp_path))

    answer = model.generate("What is in it?", GenerationOptions(max_tokens=6, stop=()))
    assert (
        answer.text
        == LanguageModel.from_transformers(made, byte_tokenizer())
        .generate("What is in it?", GenerationOptions(max_tokens=6, stop=()))
        .text
    )
    prompt = model.render("What is in it?")
    made.config.num_hidden_layers = model.n_layers  # where the oracle looks for it

    def exact(found: Any, response: list[int]) -> bool:
        expected = reference_scores(made, prompt.ids, response, prompt.semantic_token.offset)
        return worst_relative_error(found, expected) < 1e-4

    timed = answer.evidence.gradients()
    assert timed is not None
    assert exact(timed.scores, list(answer.response_ids))
    ids: Any = model.tokenizer("A cat.", add_special_tokens=False)["input_ids"]
    assert exact(model.score("What is in it?", "A cat."), ids)
