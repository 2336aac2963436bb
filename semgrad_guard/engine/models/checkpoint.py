"""Loading a checkpoint safely: safetensors or GGUF, no remote code, errors that say what is missing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoQuantizationConfig

from semgrad_guard.engine.models.adapter import base_of, put_on
from semgrad_guard.engine.models.folder import exists, has_tokenizer, is_adapter, require_checkpoint
from semgrad_guard.engine.models.gguf import find_gguf, load_gguf
from semgrad_guard.engine.models.hub import why_unreachable
from semgrad_guard.engine.models.loading import first_line, require_all_weights, settled, stage, without_weight_bar
from semgrad_guard.errors import InputError, UnsupportedModelError
from semgrad_guard.named import did_you_mean, folder_of

_WHERE = ("revision", "local_files_only")
_HOW = ("dtype", "device_map", "quantization_config", "attn_implementation")


def load(name_or_path: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal LM in evaluation mode and its tokenizer, by a name of ours, from a folder, a GGUF file, or a hub id.

    Args:
        name_or_path: a name of ours ("pocket", "smollm2"), a folder, a GGUF file, or the id of a hub repository
            (downloaded by transformers if the hub is reachable; where it does not answer, at most what is in the local
            cache is loaded, without its retries), with a colon and a file's name for a GGUF file in it.
        options: passed to transformers (revision, dtype, device_map, quantization_config, attn_implementation).

    Raises:
        ModelNotFoundError: no such folder, file or repository, no safetensors in it, a damaged or incomplete
            checkpoint, a named model that is not fetched.
        UnsupportedModelError: the checkpoint is no causal LM, or wants code of its own; transformers cannot read this
            GGUF file.
        MissingExtraError: a GGUF file, or an adapter, without the packages of its extra.
        InputError: there is no such dtype, or no such quantization; a GGUF file is to be quantized once more.
    """
    _require_dtype(options.get("dtype"))
    options["quantization_config"] = _quantization(options.get("quantization_config"))
    path = str(folder_of(name_or_path) or name_or_path)
    where = {key: options[key] for key in _WHERE if options.get(key) is not None}
    if exists(Path(path)) or path.lower().endswith(".gguf"):
        gguf = find_gguf(path, **where)
        if gguf is not None:
            return load_gguf(gguf, name_or_path, **options)
    if is_adapter(Path(path)):
        return _load_adapted(Path(path), **options)
    return _load(_causal_lm, path, name_or_path, **options)


def load_classifier(name_or_path: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence classifier in evaluation mode and its tokenizer, from a folder or a hub id, as safely as `load`.

    Raises:
        ModelNotFoundError: as `load`; a base model without a trained classification head is an incomplete checkpoint.
        UnsupportedModelError: the checkpoint is no sequence classifier, or wants code of its own.
    """
    return _load(_sequence_classifier, name_or_path, name_or_path, **options)


def _load(
    choose: Callable[[Any, str], Any], path: str, name: str, *, tokenizer_at: str | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Configuration, tokenizer and weights, one after another; `choose` says what class a configuration asks for."""
    require_checkpoint(Path(path), name)
    where = {key: options[key] for key in _WHERE if options.get(key) is not None}
    how = {key: options[key] for key in _HOW if options.get(key) is not None}
    unreachable = None
    if not Path(path).exists() and not where.get("local_files_only"):
        unreachable = why_unreachable(path, where.get("revision"))
        where["local_files_only"] = unreachable is not None
    missing = f"{_advice(unreachable)}{did_you_mean(name)}"
    with without_weight_bar():
        with stage(name, f"its config.json cannot be read by transformers {transformers.__version__}", missing=missing):
            config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False, **where)
        auto = choose(config, name)
        with stage(name, "its tokenizer cannot be loaded", advice=_SAVE_TOKENIZER, missing=missing):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_at or path, trust_remote_code=False, **where)
        with stage(name, _as_asked(config, how), missing=missing):
            model, report = cast(
                "tuple[PreTrainedModel, dict[str, Any]]",
                auto.from_pretrained(
                    path,
                    config=config,
                    use_safetensors=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported with their sizes, and refused
                    **where,
                    **how,
                ),
            )
    require_all_weights(name, report, saved_as=next(iter(config.architectures or ()), None))
    return settled(model), tokenizer


def _load_adapted(folder: Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An adapter on its base model, with its own tokenizer where it has one, else the base's."""
    own = str(folder) if has_tokenizer(folder) else None
    base, tokenizer = load(base_of(folder), **{**options, "revision": None})
    if own is not None:
        with stage(own, "its tokenizer cannot be loaded", advice=_SAVE_TOKENIZER):
            tokenizer = AutoTokenizer.from_pretrained(own, trust_remote_code=False)
    return put_on(base, folder, tokens=len(tokenizer)).eval(), tokenizer


_SAVE_TOKENIZER = (
    "Its files (tokenizer.json, tokenizer_config.json) are missing or broken; save them beside the weights: "
    "tokenizer.save_pretrained(folder)."
)


def _causal_lm(config: Any, name: str) -> Any:
    """The class that writes text: a causal LM's, or that of a vision-language model, whose text alone is asked for."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModelError(
        f"{name!r} is a model of type {config.model_type!r}, which is no causal LM: it does not write text from left "
        "to right. Use a decoder-only language model."
    )


def _sequence_classifier(config: Any, name: str) -> Any:
    if type(config) in AutoModelForSequenceClassification._model_mapping:
        return AutoModelForSequenceClassification
    raise UnsupportedModelError(f"{name!r} is a model of type {config.model_type!r}, which is no sequence classifier.")


def _require_dtype(dtype: Any) -> None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if dtype in (None, "auto") or (isinstance(found, torch.dtype) and found.is_floating_point):
        return
    raise InputError(f"there is no model of dtype {dtype!r}; it is float32, bfloat16, float16 or float64")


def _quantization(given: Any) -> Any:
    """transformers' own configuration for one that is written as in JSON; any other, and None, as it is."""
    if not isinstance(given, Mapping):
        return given
    method: Any = given.get("quant_method")
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method != "bitsandbytes":
        known = sorted({"bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING})
        raise InputError(f"there is no quantization with quant_method {method!r}; it is one of {', '.join(known)}")
    try:
        made: Any = AutoQuantizationConfig.from_dict(dict(given))
    except ImportError as error:
        raise UnsupportedModelError(
            f"quantizing by {method} needs a package that is not installed: {first_line(error)}"
        ) from error
    except Exception as error:  # whatever a library's own class makes of its arguments
        raise InputError(f"the quantization config for {method} is not right: {first_line(error)}") from error
    known = {*made.to_dict(), *inspect.signature(type(made)).parameters, "quant_method"}
    if unknown := sorted(set(given) - known):  # some classes leave out in silence what they do not know
        raise InputError(f"the quantization config for {method} says {', '.join(unknown)}, which it does not know")
    return made


def _as_asked(config: Any, how: dict[str, Any]) -> str:
    """What went wrong, as far as that is known: that it was to be loaded in these ways."""
    ways = [f"{key}={value!r}" for key, value in how.items() if isinstance(value, str) and value != "auto"]
    described: Any = how.get("quantization_config") or getattr(config, "quantization_config", None)
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    quantized = "" if method is None else f" as quantized by {getattr(method, 'value', method)}"
    return f"its weights cannot be loaded{quantized}{' with ' if ways else ''}{', '.join(ways)}"


def _advice(unreachable: str | None) -> str:
    if unreachable is None:
        return "Check the name or path, and that the download from the hub is complete."
    return (
        f"Only the local cache was searched, not the hub: {unreachable}. Check the name and the network, or give a "
        "folder that holds the model."
    )
