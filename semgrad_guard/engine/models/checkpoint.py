"""Loading a checkpoint safely: safetensors or GGUF, no remote code, errors that name the missing part."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AutoQuantizationConfig

from semgrad_guard.engine.models.gguf import find_gguf, load_gguf
from semgrad_guard.engine.models.load_faults import (
    first_line,
    require_all_weights,
    stage,
    without_weight_bar,
)
from semgrad_guard.errors import InputError, ModelNotFoundError, UnsupportedModelError, require_installed
from semgrad_guard.named import did_you_mean, folder_of

_WHERE = ("revision", "local_files_only")
_HOW = ("dtype", "device_map", "quantization_config", "attn_implementation")


def load(name_or_path: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal LM in evaluation mode and its tokenizer, by a name of ours, from a folder, a GGUF file, or a hub id.

    Args:
        name_or_path: a name of ours ("pocket", "smollm2"), a folder, a GGUF file, or the id of a hub repository
            (downloaded by transformers), with a colon and a file's name for a GGUF file in it.
        options: passed to transformers (revision, dtype, device_map, quantization_config, attn_implementation).

    Raises:
        ModelNotFoundError: no such folder, file or repository, no safetensors in it, a damaged or incomplete
            checkpoint, a named model that is not fetched.
        UnsupportedModelError: the checkpoint is not a causal LM, or wants code of its own; transformers cannot read
            this GGUF file.
        MissingExtraError: a GGUF file, or an adapter, without the packages of its extra.
        InputError: there is no such dtype, or no such quantization; a GGUF file is to be quantized once more.
    """
    dtype = options.get("dtype")
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise InputError(f"there is no model of dtype {dtype!r}; it is float32, bfloat16, float16 or float64")
    options["quantization_config"] = _quantization(options.get("quantization_config"))
    path = str(folder_of(name_or_path) or name_or_path)
    where = {key: options[key] for key in _WHERE if options.get(key) is not None}
    if (gguf := find_gguf(path, **where)) is not None:
        return load_gguf(gguf, name_or_path, **options)
    folder = Path(path)
    if (folder / _ADAPTER).is_file() and not any(folder.glob("model*.safetensors")):  # to be put on a base model
        return _load_adapted(folder, **options)
    return _load(_WRITES, path, name_or_path, otherwise=_NO_WRITER, **options)


def load_classifier(name_or_path: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence classifier in evaluation mode and its tokenizer, from a folder or a hub id, as safely as `load`.

    Raises:
        ModelNotFoundError: as `load`; a base model without a trained classification head is an incomplete checkpoint.
        UnsupportedModelError: the checkpoint is not a sequence classifier, or wants code of its own.
    """
    autos = (AutoModelForSequenceClassification,)
    return _load(autos, name_or_path, name_or_path, otherwise="which is no sequence classifier.", **options)


def _load(
    autos: Sequence[Any], path: str, name: str, *, otherwise: str, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Configuration, tokenizer and weights, one after another, by the first of these classes that knows the former."""
    require_checkpoint(Path(path), name)
    where = {key: options[key] for key in _WHERE if options.get(key) is not None}
    how = {key: options[key] for key in _HOW if options.get(key) is not None}
    missing = f"Check the name or path, and that the download from the hub is complete.{did_you_mean(name)}"
    with without_weight_bar():
        with stage(name, f"its config.json cannot be read by transformers {transformers.__version__}", missing=missing):
            config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False, **where)
        auto = next((auto for auto in autos if type(config) in auto._model_mapping), None)
        if auto is None:
            raise UnsupportedModelError(f"{name!r} is a model of type {config.model_type!r}, {otherwise}")
        with stage(name, "its tokenizer cannot be loaded", advice=_SAVE_TOKENIZER, missing=missing):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **where)
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
    return model.eval(), tokenizer


def _load_adapted(folder: Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An adapter on its base model, with its own tokenizer where it has one, else the base's."""
    require_installed("peft", extra="peft")
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        raise ModelNotFoundError(
            f"{str(folder)!r} holds an adapter without {_ADAPTER_WEIGHTS}. Save it with model.save_pretrained(folder)."
        )
    with stage(str(folder), "its adapter_config.json is broken"):
        named = json.loads((folder / _ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not named:
        raise ModelNotFoundError(
            f"the adapter {str(folder)!r} does not name its base model. Write it into adapter_config.json "
            "(base_model_name_or_path), or load the base, put the adapter on it (peft.PeftModel.from_pretrained) and "
            "give both to LanguageModel.from_transformers."
        )
    base, tokenizer = load(str(named), **{**options, "revision": None})
    if any((folder / name).is_file() for name in _TOKENIZERS):
        with stage(str(folder), "its tokenizer cannot be loaded", advice=_SAVE_TOKENIZER):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    peft: Any = import_module("peft")
    with stage(str(folder), f"the adapter does not fit its base model {base.name_or_path!r}"):
        rows = cast(nn.Embedding, base.get_input_embeddings()).num_embeddings
        if len(tokenizer) > rows:  # tokens were added before it was trained
            base.resize_token_embeddings(len(tokenizer))
        model = peft.PeftModel.from_pretrained(base, str(folder))
        described = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
        with safe_open(folder / _ADAPTER_WEIGHTS, framework="pt") as file:
            held = set(file.keys())
    if missing := sorted(described - held):  # PEFT would leave them as they begin, with a mere warning
        raise ModelNotFoundError(
            f"the adapter {str(folder)!r} lacks {len(missing)} tensor(s), {missing[0]} among them; save it again"
        )
    return model.eval(), tokenizer


_SAVE_TOKENIZER = (
    "Its files (tokenizer.json, tokenizer_config.json) are missing or broken; save them next to the weights: "
    "tokenizer.save_pretrained(folder)."
)


_WRITES = (AutoModelForCausalLM, AutoModelForImageTextToText)  # of a vision-language model only the text is used
_NO_WRITER = "which is no causal LM: it does not write text from left to right. Use a decoder-only language model."


def _quantization(given: Any) -> Any:
    """transformers' own configuration for one that is written as in JSON; any other, and None, as it is."""
    if not isinstance(given, Mapping):
        return given
    method: Any = given.get("quant_method")
    try:
        made: Any = AutoQuantizationConfig.from_dict(dict(given))
    except ImportError as error:
        raise UnsupportedModelError(
            f"quantizing by {method} needs a package that is not installed: {first_line(error)}"
        ) from error
    except Exception as error:  # whatever a library's own class makes of its arguments
        raise InputError(f"the quantization config for {method!r} is not right: {first_line(error)}") from error
    known = {*made.to_dict(), *inspect.signature(type(made)).parameters, "quant_method"}
    if unknown := sorted(set(given) - known):  # some classes leave out unknown settings in silence
        raise InputError(f"the quantization config for {method} says {', '.join(unknown)}, which it does not know")
    return made


def _as_asked(config: Any, how: dict[str, Any]) -> str:
    """The cause of a failure, as far as it is known: that it was to be loaded in these ways."""
    ways = [f"{key}={value!r}" for key, value in how.items() if isinstance(value, str) and value != "auto"]
    described: Any = how.get("quantization_config") or getattr(config, "quantization_config", None)
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    quantized = "" if method is None else f" as quantized by {getattr(method, 'value', method)}"
    return f"its weights cannot be loaded{quantized}{' with ' if ways else ''}{', '.join(ways)}"


_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_POINTER = b"version https://git-lfs"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")


def require_checkpoint(path: Path, name: str) -> None:
    """Refuse a path that cannot be loaded here, where the reason can be named. A hub id is not a path.

    Raises:
        ModelNotFoundError: no such folder, no weights in it, weights in another form, or no configuration.
    """
    if not path.exists():
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelNotFoundError(f"there is no folder {name!r}. Is the path right?")
        return
    if not path.is_dir():
        raise ModelNotFoundError(
            f"{name!r} is a file; give the folder that holds config.json and *.safetensors, or a file whose name ends "
            "in .gguf (rename it where another program, such as Ollama, has left that out)"
        )
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
        others_named = f" (found {', '.join(others)})" if others else ""
        raise ModelNotFoundError(
            f"{name!r} holds no *.safetensors{others_named}. Only safetensors and GGUF are loaded; save the model with "
            "model.save_pretrained(folder)."
        )
    for file in filter(Path.is_file, weights):
        with stage(name, "its weights cannot be read"), file.open("rb") as content:
            if content.read(len(_POINTER)) == _POINTER:
                raise ModelNotFoundError(
                    f"{str(file)!r} is a Git LFS pointer, not the weights. Fetch them: git lfs pull."
                )
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"{name!r} holds weights, but no config.json, which says what they are. Copy it from where the weights "
            "come from, or save the model with model.save_pretrained(folder)."
        )
