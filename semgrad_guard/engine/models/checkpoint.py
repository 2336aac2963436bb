"""Loading a checkpoint safely: safetensors or GGUF, no remote code, errors that say what is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging
from transformers.utils.hub import extract_commit_hash

from semgrad_guard.engine.models.gguf import find_gguf, read_header
from semgrad_guard.engine.models.hub import why_unreachable
from semgrad_guard.errors import InputError, ModelNotFoundError, UnsupportedModelError

POCKET = "pocket"
_SAMPLES = 1024
_LONGEST = 240


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
        return _load_gguf(gguf, name_or_path, **options)
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
        with _without_weight_bar():
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **tokenizer_options)
            model, report = cast(
                "tuple[PreTrainedModel, dict[str, Any]]",
                auto.from_pretrained(
                    path, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **chosen
                ),
            )
    except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
        raise ModelNotFoundError(f"cannot load {name!r}: {_first_line(error)} {_advice(unreachable)}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{name!r} is no {kind} that transformers can load: {_first_line(error)} If it should be one, its "
            "config.json or its tokenizer's files are broken: download or save them again."
        ) from error
    _require_all_weights(name, report)
    return model.eval(), tokenizer


def _gguf_file(path: str, options: dict[str, Any]) -> Path | None:
    try:
        return find_gguf(path, revision=options.get("revision"), local_files_only=bool(options.get("local_files_only")))
    except OSError as error:
        raise ModelNotFoundError(f"there can be no model at {path[:80]!r}: {error.strerror}") from error


def _load_gguf(path: Path, name: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Weights, tokenizer and chat template of a GGUF file; the weights are dequantized."""
    header = read_header(path)
    if options.get("quantization_config") is not None:
        raise InputError(
            f"{name!r} is a GGUF file, which cannot be quantized once more on loading. Leave quantization_config out, "
            "or load the folder with safetensors that the file was made from."
        )
    chosen = {
        key: options[key] for key in ("dtype", "device_map", "attn_implementation") if options.get(key) is not None
    }
    at: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        with _without_weight_bar():
            config = AutoConfig.from_pretrained(**at)
            tokenizer = AutoTokenizer.from_pretrained(**at)
            model, report = cast(
                "tuple[PreTrainedModel, dict[str, Any]]",
                AutoModelForCausalLM.from_pretrained(
                    **at, config=config, output_loading_info=True, **_dequantized(), **chosen
                ),
            )
    except (OSError, MemoryError) as error:
        raise ModelNotFoundError(f"cannot load {name!r}: {_first_line(error)}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers cannot read the GGUF file {name!r} (architecture "
            f"{header.metadata.get('general.architecture')!r}): {_first_line(error)} Take a file of another "
            "quantization (Q8_0, Q4_K_M, F16), a newer transformers, or the folder with safetensors that the file was "
            "made from."
        ) from error
    _require_all_weights(name, report)
    if header.end_tokens and model.generation_config is not None:
        model.generation_config.eos_token_id = list(header.end_tokens)
    model.config._commit_hash = extract_commit_hash(str(path), None)
    return model.eval(), tokenizer


def _dequantized() -> dict[str, Any]:
    """The option that keeps transformers from leaving weights in blocks, which no gradient passes through."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older ones dequantize whatever they read
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _require_all_weights(name: str, report: dict[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelNotFoundError(
            f"the checkpoint {name!r} lacks {len(missing)} tensor(s), {missing[0]} among them; "
            "download or save it again"
        )


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


@contextmanager
def _without_weight_bar() -> Generator[None]:
    """No bar over the weights, which a program's log should not hold; bars over downloads stay as they are."""
    shown, hub_hidden = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    gguf_reader: Any = modeling_gguf_pytorch_utils  # which asks nobody whether to draw
    bar = gguf_reader.tqdm
    gguf_reader.tqdm = partial(bar, disable=True)
    logging.disable_progress_bar()
    if not hub_hidden:
        enable_progress_bars()
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        if shown:
            logging.enable_progress_bar()
        if hub_hidden:
            disable_progress_bars()


def _first_line(error: BaseException) -> str:
    """What a library says, without the lists that follow: names of all classes, of all files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    if not isinstance(error, (OSError, ValueError, RuntimeError)):  # a mere key, or half a sentence, by itself
        line = f"{type(error).__name__}: {line}"
    line = line if len(line) <= _LONGEST else line[:_LONGEST].rsplit(" ", 1)[0] + " …"
    return line if line.endswith((".", "!", "?", "…")) else line + "."
