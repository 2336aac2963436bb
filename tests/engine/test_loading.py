"""Loading checkpoints: what is found, what is refused, and how models are distinguished."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.utils import logging

from semgrad_guard import LanguageModel
from semgrad_guard.errors import (
    InputError,
    ModelNotFoundError,
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


def test_unknown_paths_and_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        LanguageModel.from_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match="hub"):
        LanguageModel.from_pretrained("nobody/no-such-model")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        LanguageModel.from_pretrained(str(tmp_path / "file"))


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
