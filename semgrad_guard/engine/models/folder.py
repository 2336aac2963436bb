"""The files that a folder needs to be a checkpoint, checked before anything is loaded from it."""

from __future__ import annotations

from pathlib import Path

from semgrad_guard.errors import ModelNotFoundError

_ADAPTER = "adapter_config.json"
_POINTER = b"version https://git-lfs"
_GGUF = b"GGUF"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter alone (PEFT), to be put on a base model that lies elsewhere."""
    return (folder / _ADAPTER).is_file() and not any(folder.glob("model*.safetensors"))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def require_checkpoint(path: Path, name: str) -> None:
    """Refuse a path that cannot be loaded here, where the reason can be named. A hub id is not a path.

    Raises:
        ModelNotFoundError: no such folder, no weights in it, weights in another form, or no configuration.
    """
    if not exists(path):
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelNotFoundError(f"there is no folder {name!r}. Is the path right?")
        return
    if _is_unnamed_gguf(path):
        raise ModelNotFoundError(
            f"{name!r} is a GGUF file, and its name does not say so. Rename it, or link to it, with .gguf at the end."
        )
    if not path.is_dir():
        raise ModelNotFoundError(
            f"{name!r} is a file; give the folder that holds config.json and *.safetensors, or a *.gguf"
        )
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
        others_named = f" (found {', '.join(others)})" if others else ""
        raise ModelNotFoundError(
            f"{name!r} holds no *.safetensors{others_named}. Only safetensors and GGUF are loaded; save the model with "
            "model.save_pretrained(folder)."
        )
    for weight_file in weights:
        with weight_file.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise ModelNotFoundError(
                    f"{str(weight_file)!r} is a Git LFS pointer, not the weights. Fetch them: git lfs pull."
                )
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"{name!r} holds weights, but no config.json, which says what they are. Copy it from where the weights "
            "come from, or save the model with model.save_pretrained(folder)."
        )


def _is_unnamed_gguf(path: Path) -> bool:
    """A GGUF file by its first bytes: other programs (Ollama) store them without the suffix."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF)) == _GGUF
    except OSError:
        return False


def exists(path: Path) -> bool:
    """As `Path.exists`.

    Raises:
        ModelNotFoundError: nothing could be of that name.
    """
    try:
        return path.exists()
    except OSError as error:
        raise ModelNotFoundError(f"there can be no model at {str(path)[:80]!r}: {error.strerror}") from error
