"""Folders that hold an adapter (PEFT: LoRA and its kin) for a base model that lies elsewhere."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from semgrad_guard.engine.models.loading import stage
from semgrad_guard.errors import MissingExtraError, ModelNotFoundError

_WEIGHTS = "adapter_model.safetensors"


def base_of(folder: Path) -> str:
    """The name of the base model that an adapter was made for.

    Raises:
        MissingExtraError: PEFT is not installed.
        ModelNotFoundError: the adapter names none, or has no weights in safetensors.
    """
    if find_spec("peft") is None:
        raise MissingExtraError("peft", extra="peft")
    if not (folder / _WEIGHTS).is_file():
        raise ModelNotFoundError(
            f"{str(folder)!r} holds an adapter without {_WEIGHTS}. Save it with model.save_pretrained(folder)."
        )
    with stage(str(folder), "its adapter_config.json is broken"):
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ModelNotFoundError(
            f"the adapter {str(folder)!r} does not name its base model. Write it into adapter_config.json "
            "(base_model_name_or_path), or load the base, put the adapter on it (peft.PeftModel.from_pretrained) and "
            "give both to LanguageModel.from_transformers."
        )
    return str(base)


def put_on(base: PreTrainedModel, folder: Path, *, tokens: int) -> Any:
    """The base model with the adapter on it; `tokens` is how many the tokenizer has, if there are more than rows.

    Raises:
        ModelNotFoundError: the adapter's weights are not those that it describes.
        UnsupportedModelError: the adapter does not fit the base model.
    """
    peft: Any = import_module("peft")

    with stage(str(folder), f"the adapter does not fit its base model {base.name_or_path!r}"):
        if (
            tokens > cast(nn.Embedding, base.get_input_embeddings()).num_embeddings
        ):  # tokens were added before it was trained
            base.resize_token_embeddings(tokens)
        model = peft.PeftModel.from_pretrained(base, str(folder))
        described = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            held = set(file.keys())
    if missing := sorted(described - held):  # PEFT would leave them as they begin, with a mere warning
        raise ModelNotFoundError(
            f"the adapter {str(folder)!r} lacks {len(missing)} tensor(s), {missing[0]} among them; save it again"
        )
    return model
