"""Models in GGUF files (llama.cpp's format): which file a name means, and loading it by transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import extract_commit_hash

from semgrad_guard.engine.models.gguf_config import complete_config, divide_frequencies, require_all_read
from semgrad_guard.engine.models.gguf_header import GgufHeader, is_part, read_header
from semgrad_guard.engine.models.loading import first_line, require_all_weights, why_unreachable, without_weight_bar
from semgrad_guard.errors import InputError, ModelNotFoundError, UnsupportedModelError

_ON_THE_HUB = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<file>[^:]+\.gguf)")


def find_gguf(name: str, *, revision: str | None = None, local_files_only: bool = False) -> Path | None:
    """The GGUF file that a name means: a file, a folder's only one, or "hub/repository:file.gguf" (fetched).

    None where the name means something else, a folder with safetensors among them.

    Raises:
        ModelNotFoundError: there is no such file, the hub cannot be reached, or a folder holds several.
    """
    path = Path(name)
    if path.is_dir():
        return None if any(path.glob("*.safetensors")) else _only_one_in(path)
    if path.suffix.lower() != ".gguf":
        return None
    if path.is_file():
        return path
    if on_the_hub := _ON_THE_HUB.fullmatch(name):
        return _fetched(**on_the_hub.groupdict(), revision=revision, local_files_only=local_files_only)
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
    with _reading(name, header), without_weight_bar():
        config: Any = AutoConfig.from_pretrained(**at)
        complete_config(config, header)
        tokenizer = AutoTokenizer.from_pretrained(**at)
        model, report = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            AutoModelForCausalLM.from_pretrained(
                **at, config=config, output_loading_info=True, **_dequantized(), **chosen
            ),
        )
    require_all_weights(name, report)
    require_all_read(model, header, name)
    divide_frequencies(model, header, path)
    if header.end_tokens and model.generation_config is not None:
        model.generation_config.eos_token_id = list(header.end_tokens)
    model.config._commit_hash = extract_commit_hash(str(path), None)
    _forget_invented_tokens(tokenizer, header)
    return model.eval(), tokenizer


@contextmanager
def _reading(name: str, header: GgufHeader) -> Generator[None]:
    """Turns transformers' errors about a file that it cannot read into ours."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except (OSError, MemoryError) as error:
        raise ModelNotFoundError(f"cannot load {name!r}: {first_line(error)}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers cannot read the GGUF file {name!r} (architecture "
            f"{header.metadata.get('general.architecture')!r}): {first_line(error)} Take a file of another "
            "quantization (Q8_0, Q4_K_M, F16), a newer transformers, or the folder with safetensors that the file was "
            "made from."
        ) from error


def _dequantized() -> dict[str, Any]:
    """The option that keeps transformers from leaving weights in blocks, which no gradient passes through."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older ones dequantize whatever they read
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _forget_invented_tokens(tokenizer: Any, header: GgufHeader) -> None:
    """transformers adds GPT-2's own token to byte-level vocabularies without it; the model has no such token."""
    count = header.number("tokenizer.ggml.tokens", 0)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    known = [token for token in described["added_tokens"] if token["id"] < count]
    if len(known) < len(described["added_tokens"]):
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps({**described, "added_tokens": known}))


def _only_one_in(folder: Path) -> Path | None:
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if len(found) > 1 and not all(map(is_part, found)):
        raise ModelNotFoundError(
            f"{str(folder)!r} holds {len(found)} GGUF files ({', '.join(path.name for path in found)}). Name the one "
            f"to load, for example {str(found[0])!r}."
        )
    return found[0] if found else None


def _fetched(repository: str, file: str, *, revision: str | None, local_files_only: bool) -> Path:
    """The file in the local cache, downloaded if the hub answers."""
    unreachable = None if local_files_only else why_unreachable(repository, revision)
    try:
        local = local_files_only or unreachable is not None
        return Path(hf_hub_download(repository, file, revision=revision, local_files_only=local))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"cannot load '{repository}:{file}': it is not in the local cache, and the hub was not asked"
            f"{'' if unreachable is None else f': {unreachable}'}. Check the name and the network, or give the path of "
            "a GGUF file."
        ) from error
    except EntryNotFoundError as error:
        raise ModelNotFoundError(
            f"the repository {repository!r} holds no {file!r}. See the list of its files on the hub: "
            "capital letters count, and a file in a folder is named with it."
        ) from error
    except (OSError, HFValidationError) as error:  # no such repository, no access to it, no room for it
        message = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelNotFoundError(
            f"cannot load '{repository}:{file}': {message}. Check the name and the access."
        ) from error
