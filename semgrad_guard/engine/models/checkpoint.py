"""Loading a checkpoint safely: safetensors or GGUF, no remote code, errors that say what is missing."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from semgrad_guard.engine.models.gguf import find_gguf, load_gguf
from semgrad_guard.engine.models.hub import why_unreachable
from semgrad_guard.engine.models.loading import first_line, require_all_weights, without_weight_bar
from semgrad_guard.errors import ModelNotFoundError, UnsupportedModelError

POCKET = "pocket"
_SAMPLES = 1024


def load(name_or_path: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal LM in evaluation mode and its tokenizer, from the embedded model, a folder, a GGUF file, or a hub id.

    Args:
        name_or_path: "pocket", a folder, a GGUF file, or the id of a hub repository (downloaded by transformers if the
            hub is reachable; where it does not answer, at most what is in the local cache is loaded, without its
            retries), with a colon and a file's name for a GGUF file in it.
        options: passed to transformers (revision, dtype, device_map, quantization_config, attn_implementation).

    Raises:
        ModelNotFoundError: no such folder, file or repository, no safetensors in it, a damaged or incomplete
            checkpoint.
        UnsupportedModelError: the checkpoint is no causal LM, or wants code of its own; transformers cannot read this
            GGUF file.
        MissingExtraError: a GGUF file, without the packages of the extra `gguf`.
        InputError: a GGUF file is to be quantized once more.
    """
    path = str(files("semgrad_guard.pocket") / "weights") if name_or_path == POCKET else name_or_path
    gguf = _gguf_file(path, options)
    if gguf is not None:
        return load_gguf(gguf, name_or_path, **options)
    return _load(AutoModelForCausalLM, path, name_or_path, kind="causal LM", **options)


def load_classifier(name_or_path: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence classifier in evaluation mode and its tokenizer, from a folder or a hub id, as safely as `load`.

    Raises:
        ModelNotFoundError: as `load`; a base model without a trained classification head is an incomplete checkpoint.
        UnsupportedModelError: the checkpoint is no sequence classifier, or wants code of its own.
    """
    return _load(AutoModelForSequenceClassification, name_or_path, name_or_path, kind="sequence classifier", **options)


def _load(
    auto: Any, path: str, name: str, *, kind: str, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _require_safetensors(Path(path), name)
    chosen = {key: value for key, value in options.items() if value is not None}
    unreachable = None
    if not Path(path).exists() and not chosen.get("local_files_only"):
        unreachable = why_unreachable(path, chosen.get("revision"))
        chosen["local_files_only"] = unreachable is not None
    tokenizer_options = {key: chosen[key] for key in ("revision", "local_files_only") if key in chosen}
    try:
        with without_weight_bar():
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **tokenizer_options)
            model, report = cast(
                "tuple[PreTrainedModel, dict[str, Any]]",
                auto.from_pretrained(
                    path, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **chosen
                ),
            )
    except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
        raise ModelNotFoundError(f"cannot load {name!r}: {first_line(error)} {_advice(unreachable)}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{name!r} is no {kind} that transformers can load: {first_line(error)} If it should be one, its "
            "config.json or its tokenizer's files are broken: download or save them again."
        ) from error
    require_all_weights(name, report)
    return model.eval(), tokenizer


def _gguf_file(path: str, options: dict[str, Any]) -> Path | None:
    try:
        return find_gguf(path, revision=options.get("revision"), local_files_only=bool(options.get("local_files_only")))
    except OSError as error:
        raise ModelNotFoundError(f"there can be no model at {path[:80]!r}: {error.strerror}") from error


def weight_fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits that change when the weights do: names, shapes and up to 1,024 values of every tensor.

    The values are read in float32, so that the same checkpoint loaded in bfloat16 and float32 agrees.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)]
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if sample.dtype.is_floating_point:
            sample = sample.to(torch.float32)
        digest.update(sample.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _require_safetensors(path: Path, name: str) -> None:
    """Refuse a folder without safetensors here, where the reason can be named."""
    try:
        is_there = path.exists()
    except OSError as error:
        raise ModelNotFoundError(f"there can be no model at {name[:80]!r}: {error.strerror}") from error
    if not is_there:
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelNotFoundError(f"there is no folder {name!r}")
        return
    if not path.is_dir():
        raise ModelNotFoundError(
            f"{name!r} is a file; give the folder that holds config.json and *.safetensors, or a *.gguf"
        )
    if not any(path.glob("*.safetensors")):
        others = sorted(p.name for pattern in ("*.bin", "*.pt") for p in path.glob(pattern))
        others_named = f" (found {', '.join(others)})" if others else ""
        raise ModelNotFoundError(
            f"{name!r} holds no *.safetensors{others_named}. Only safetensors and GGUF are loaded; save the model with "
            "model.save_pretrained(folder)."
        )


def _advice(unreachable: str | None) -> str:
    if unreachable is None:
        return "Check the name or path, and that the download from the hub is complete."
    return (
        f"Only the local cache was searched, not the hub: {unreachable}. Check the name and the network, or give a "
        "folder that holds the model."
    )
