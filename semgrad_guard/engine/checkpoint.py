"""Loading a checkpoint safely: safetensors or GGUF, no remote code, errors that name the missing part."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import logging
from transformers.utils.hub import extract_commit_hash

from semgrad_guard.engine.gguf import complete_config, divide_frequencies, read_header, require_all_read
from semgrad_guard.errors import (
    InputError,
    ModelNotFoundError,
    SemGradGuardError,
    UnsupportedModelError,
    require_installed,
)
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


# GGUF files.

_OTHER_FILES = (
    "Take a file of another quantization (Q8_0, Q4_K_M, F16), a newer transformers, or the folder with safetensors "
    "that the file was made from."
)
_ON_THE_HUB = re.compile(r"([\w.-]+/[\w.-]+):([^:]+\.gguf)")


def find_gguf(name: str, *, revision: str | None = None, local_files_only: bool = False) -> Path | None:
    """The GGUF file that a name means: a file, a folder's only one, or "hub/repository:file.gguf" (fetched).

    None where the name means something else, a folder with safetensors among them.

    Raises:
        ModelNotFoundError: there is no such file, the hub cannot be reached, or a folder holds several.
    """
    path = Path(name)
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
        if not found or any(path.glob("*.safetensors")):
            return None
        if len(found) > 1:
            raise ModelNotFoundError(
                f"{str(path)!r} holds {len(found)} GGUF files ({', '.join(file.name for file in found)}). Name the one "
                f"to load, for example {str(found[0])!r}."
            )
        return found[0]
    if path.suffix.lower() != ".gguf":
        return None
    if path.is_file():
        return path
    if on_the_hub := _ON_THE_HUB.fullmatch(name):
        repository, file = on_the_hub.groups()
        with stage(name, "it cannot be fetched", missing="Check the name, its capital letters, and the access."):
            return Path(hf_hub_download(repository, file, revision=revision, local_files_only=local_files_only))
    raise ModelNotFoundError(
        f"there is no file {name!r}. A GGUF file on the hub is named with its repository: 'org/repository:file.gguf'."
    )


def load_gguf(path: Path, name: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Weights, tokenizer and chat template of a GGUF file; the weights are dequantized.

    Args:
        path: the file.
        name: the caller's name for it, for messages.
        options: passed to transformers (dtype, device_map, attn_implementation).

    Raises:
        InputError: it is to be quantized once more.
        ModelNotFoundError: the file is damaged, cut off, or lacks tensors.
        UnsupportedModelError: transformers cannot read it, or would leave out a part of it.
        MissingExtraError: the packages of the extra `gguf` are absent.
    """
    header = read_header(path)
    if options.get("quantization_config") is not None:
        raise InputError(
            f"{name!r} is a GGUF file, which cannot be quantized once more on loading. Leave quantization_config out, "
            "or load the folder with safetensors that the file was made from."
        )
    kept = ("dtype", "device_map", "attn_implementation")  # the others are for finding the file, which is done
    chosen = {key: options[key] for key in kept if options.get(key) is not None}
    if chosen.get("dtype", "auto") == "auto":  # as transformers decides, which for "M.GGUF" reads the file as a pickle
        chosen["dtype"] = torch.float32
    at: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    wrong = f"transformers cannot read this GGUF file (architecture {header.metadata.get('general.architecture')!r})"
    with stage(name, wrong, advice=_OTHER_FILES), without_weight_bar():
        config: Any = AutoConfig.from_pretrained(**at)
        complete_config(config, header)
        tokenizer = AutoTokenizer.from_pretrained(**at)
        model, report = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            AutoModelForCausalLM.from_pretrained(
                **at,
                config=config,
                output_loading_info=True,
                quantization_config=GgufConfig(dequantize=True),  # no gradient passes through weights in blocks
                **chosen,
            ),
        )
    require_all_weights(name, report)
    require_all_read(model, header, name)
    divide_frequencies(model, header, path)
    if header.end_tokens and model.generation_config is not None:
        model.generation_config.eos_token_id = list(header.end_tokens)
    model.config._commit_hash = extract_commit_hash(str(path), None)
    # transformers adds GPT-2's own token to byte-level vocabularies without it; the model has no such token.
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    count, added = header.number("tokenizer.ggml.tokens", 0), described["added_tokens"]
    known = [token for token in added if token["id"] < count]
    if len(known) < len(added):
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps({**described, "added_tokens": known}))
    return model.eval(), tokenizer


# Common to every way of loading.

_LONGEST = 240


@contextmanager
def stage(name: str, wrong: str, *, advice: str = "", missing: str = "") -> Generator[None]:
    """Turns libraries' errors into the defect of `name`, with advice.

    Raises:
        ModelNotFoundError: something is not there or cannot be read (`missing` is the advice then).
        UnsupportedModelError: anything else.
    """
    try:
        yield
    except SemGradGuardError:
        raise
    except (OSError, SafetensorError, MemoryError) as error:
        raise ModelNotFoundError(f"cannot load {name!r}: {first_line(error)} {missing}".rstrip()) from error
    except ImportError as error:
        raise UnsupportedModelError(
            f"{name!r} needs a package that is not installed: {first_line(error)} Install it, or take the checkpoint "
            "in another form."
        ) from error
    except Exception as error:
        if "custom code" in str(error):
            raise UnsupportedModelError(
                f"{name!r} brings program code of its own (auto_map), which is never run here. Take a checkpoint whose "
                "architecture and tokenizer are part of transformers."
            ) from error
        raise UnsupportedModelError(f"{name!r}: {wrong}. {first_line(error)} {advice}".rstrip()) from error


@contextmanager
def without_weight_bar() -> Generator[None]:
    """No bar over the weights, which a program's log should not hold; bars over downloads stay as they are."""
    shown, hub_hidden = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.disable_progress_bar()  # the hub's bars as well
    if not hub_hidden:
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
        if hub_hidden:
            disable_progress_bars()


def require_all_weights(name: str, report: dict[str, Any], *, saved_as: str | None = None) -> None:
    """Refuse a model of which a part was not in the checkpoint, or in another size.

    Args:
        name: the name of the checkpoint.
        report: transformers' `output_loading_info`.
        saved_as: the class that it was saved as, where the configuration names one.

    Raises:
        ModelNotFoundError: a tensor is missing, or has another shape than in the configuration.
    """
    if mismatched := sorted(report["mismatched_keys"]):
        tensor, found, expected = mismatched[0]
        raise ModelNotFoundError(
            f"the tensors of the checkpoint {name!r} do not have the sizes that its config.json says: {tensor} is "
            f"{tuple(found)} and should be {tuple(expected)}. One belongs to another model; download both again."
        )
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelNotFoundError(
            f"the checkpoint {name!r} lacks {len(missing)} tensor(s), {missing[0]} among them; "
            f"download or save it again{f' (it was saved as {saved_as})' if saved_as else ''}"
        )


def first_line(error: BaseException) -> str:
    """The first line of a library's error, without the lists of classes or files that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    if not isinstance(error, (OSError, ValueError, RuntimeError)):  # a mere key, or half a sentence, by itself
        line = f"{type(error).__name__}: {line}"
    line = line if len(line) <= _LONGEST else line[:_LONGEST].rsplit(" ", 1)[0] + " …"
    return line if line.endswith((".", "!", "?", "…")) else line + "."
