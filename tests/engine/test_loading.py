"""Loading checkpoints: what is found, what is refused, and how models are distinguished."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from semgrad_guard import LanguageModel
from semgrad_guard.errors import (
    InputError,
    ModelNotFoundError,
    UnsupportedModelError,
)

Make = Callable[..., LanguageModel]


def test_loading_a_folder(checkpoint: Path, language_model: LanguageModel) -> None:
    loaded = LanguageModel.from_pretrained(str(checkpoint))
    assert loaded.identity.dtype == "float32"
    assert loaded.identity.name == checkpoint.name
    assert loaded.score("q", "an answer").semgrad == pytest.approx(
        language_model.score("q", "an answer").semgrad, rel=1e-3
    )
    assert loaded.identity.fingerprint == LanguageModel.from_pretrained(str(checkpoint)).identity.fingerprint


def test_the_fingerprint_follows_the_weights(make_language_model: Make) -> None:
    assert make_language_model(seed=1).identity.fingerprint == make_language_model(seed=1).identity.fingerprint
    assert make_language_model(seed=1).identity.fingerprint != make_language_model(seed=2).identity.fingerprint


def test_unknown_paths_and_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        LanguageModel.from_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match="hub"):
        LanguageModel.from_pretrained("nobody/no-such-model")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        LanguageModel.from_pretrained(str(tmp_path / "file"))


def test_a_folder_without_safetensors(tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"pytorch_model\.bin"):
        LanguageModel.from_pretrained(str(tmp_path / "m"))


def test_corrupted_weights(tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match="cannot load"):
        LanguageModel.from_pretrained(str(tmp_path / "m"))


def test_missing_weights_are_not_filled_with_noise(tmp_path: Path, checkpoint: Path) -> None:
    """transformers initialises absent tensors at random, with a mere warning."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match="up_proj"):
        LanguageModel.from_pretrained(str(tmp_path / "m"))


def test_encoder_decoders_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=258, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        LanguageModel.from_transformers(t5, tokenizer)


def test_a_foreign_tokenizer_is_noticed(make_language_model: Make) -> None:
    with pytest.raises(InputError, match="tokenizer"):
        make_language_model(vocab_size=50, eos_token_id=1, pad_token_id=1).generate("hello")


def test_no_bar_is_drawn_over_the_weights(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        LanguageModel.from_pretrained(str(checkpoint))
        assert logging.is_progress_bar_enabled()  # a user's own choice stays
    finally:
        if not shown:
            logging.disable_progress_bar()
    assert capfd.readouterr().err == ""


def test_weights_that_are_nowhere_are_refused(checkpoint: Path) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(UnsupportedModelError, match="lies on the meta device"):
        LanguageModel.from_pretrained(str(checkpoint), device_map="meta")
