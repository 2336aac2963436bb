"""What a GGUF file states beyond what transformers reads of it: the model is the file's, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from semgrad_guard import LanguageModel
from semgrad_guard.engine.models.gguf import GgufHeader, complete_config
from semgrad_guard.errors import UnsupportedModelError

from .gguf_files import SPECIAL, TOKENS, tiny, write

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


def same(path: Path, expected: Any) -> bool:
    loaded = LanguageModel.from_pretrained(str(path))
    loaded.score("in a box?", "in Rome")  # by the self-check, also what the replay makes of it
    return torch.allclose(logits(loaded._model), logits(expected), atol=1e-4)


def described(architecture: str, **metadata: Any) -> GgufHeader:
    stated = {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return GgufHeader({"general.architecture": architecture, **stated})


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        ),
        ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scale_linear": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
        ),
        ({}, {"llama.rope.scaling.type": "none"}),
    ],
    ids=["linear", "linear by its old name", "yarn", "none"],
)
def test_stretched_positions(rope: dict[str, Any], metadata: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope})
    assert same(write(tmp_path / "m.gguf", model, metadata=metadata), model)
    assert bool(rope) != same(write(tmp_path / "plain.gguf", model), model), "the stretch changes nothing"


def test_divided_frequencies(tmp_path: Path) -> None:
    """Llama 3.1 and later: the file holds a tensor of divisors."""
    model, plain = tiny(rope_parameters=LLAMA3), tiny()
    divisors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    path = write(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors.numpy()})
    assert same(path, model)
    assert not same(write(tmp_path / "plain.gguf", model), model)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, r"stretches.*longrope"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of a head's 16"),
    ],
)
def test_unknown_forms_are_refused(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    header = described("llama", **{key.removeprefix("llama.").replace(".", "__"): v for key, v in metadata.items()})
    with pytest.raises(UnsupportedModelError, match=words):
        complete_config(tiny().config, header)


def test_a_width_of_heads_that_is_no_quotient(tmp_path: Path) -> None:
    model = tiny("qwen2", head_dim=32)
    metadata = {"qwen2.attention.key_length": 32, "qwen2.attention.value_length": 32, "qwen2.rope.dimension_count": 32}
    assert same(write(tmp_path / "m.gguf", model, metadata=metadata), model)


def test_windows_and_experts_and_parts_of_heads() -> None:
    phi3: Any = AutoConfig.for_model("phi3")
    complete_config(phi3, described("phi3", attention__sliding_window=2047, rope__dimension_count=72))
    assert (phi3.sliding_window, phi3.rope_parameters["partial_rotary_factor"]) == (2047, 0.75)
    experts: Any = AutoConfig.for_model("qwen2_moe")
    complete_config(experts, described("qwen2moe", expert_feed_forward_length=77))
    assert experts.moe_intermediate_size == 77


def test_windows_keep_rotary_positions_of_their_own() -> None:
    config: Any = AutoConfig.for_model("gemma3_text")
    scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 5e5}
    complete_config(config, described("gemma3", **scaling))
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_and_blocks_that_guess_ahead(tied: bool, tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=tied)
    ahead = {"blk.3.nextn.eh_proj.weight": np.ones((64, 128), dtype=np.float32)}
    assert same(write(tmp_path / "m.gguf", model, extra=ahead), model)


def test_a_vocabulary_without_gpt2s_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers adds it with a number that the model has no row for."""
    without = tuple(token for token in TOKENS if token != SPECIAL[0])
    monkeypatch.setattr("tests.engine.gguf_files.TOKENS", without)
    model = LanguageModel.from_pretrained(str(write(tmp_path / "m.gguf", tiny(vocab_size=len(without)))))
    assert len(model.tokenizer) == len(without)
    assert not model.doubts
    assert model.score("<|endoftext|> in a box?", "in Rome").semgrad > 0
