"""The header of a GGUF file (llama.cpp's format), and whether the whole file is there.

The package `gguf` reads it, as it does for transformers. Files that transformers would refuse late or read for ever (a
part of a split model, a download that was cut off, counts beyond the end) are refused here before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from semgrad_guard.errors import MissingExtraError, ModelNotFoundError, UnsupportedModelError

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (arrays of strings, such as the vocabulary, by their length) and tensors (gguf's `ReaderTensor`s)."""

    metadata: Mapping[str, Any]
    tensors: tuple[Any, ...] = ()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Every token that may end an answer: of the text, of a turn, of a message."""
        tokens = (self.number(f"tokenizer.ggml.{kind}_token_id", -1) for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(token for token in tokens if token >= 0))

    def number(self, key: str, default: int) -> int:
        """A whole number among the metadata."""
        value = self.metadata.get(key, default)
        return value if isinstance(value, int) else default


def require_reader() -> None:
    """Raise a `MissingExtraError` where the packages with which transformers reads GGUF files are absent."""
    if absent := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise MissingExtraError(*absent, extra="gguf")


def read_header(path: Path) -> GgufHeader:
    """The header of a file that is there as a whole.

    Raises:
        MissingExtraError: the packages of the extra `gguf` are absent.
        ModelNotFoundError: the file is damaged, or ends before its last tensor.
        UnsupportedModelError: a part of a split model, another version of the format, or no tokenizer inside.
    """
    require_reader()
    if is_part(path):
        raise _is_a_part(path)
    header = _read(path)
    if header.number("split.count", 1) > 1:
        raise _is_a_part(path)
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise UnsupportedModelError(
            f"{str(path)!r} holds no tokenizer. Convert the model again together with its tokenizer, or load the "
            "folder with safetensors that it was made from."
        )
    return header


def is_part(path: Path) -> bool:
    """Whether the name is that of one part of a split model."""
    return _PART.search(path.name) is not None


def _is_a_part(path: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{str(path)!r} is one part of a model that is split over several files, which transformers does not read. "
        f"Join them first: llama-gguf-split --merge {path.name} model.gguf, with the first part's name."
    )


def _read(path: Path) -> GgufHeader:
    from gguf import GGUFReader, GGUFValueType
    from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

    class Reader(GGUFReader):
        """gguf's, which reads nothing beyond the end of the file: a wrong count would keep it busy for ever."""

        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            end = offset + np.dtype(dtype).itemsize * int(count)
            if end > self.data.size:
                raise EOFError(f"it has {self.data.size:,} of at least {end:,} bytes")
            self.data = self.data.view(np.ndarray)  # slices of a memmap take four times as long
            return super()._get(offset, dtype, count, override_order)

    with path.open("rb") as file:
        start = file.read(8)
    if not start.startswith(b"GGUF"):
        raise _damaged(path, "it does not begin with the letters GGUF")
    if len(start) == 8 and (version := int.from_bytes(start[4:], "little")) not in READER_SUPPORTED_VERSIONS:
        raise UnsupportedModelError(
            f"{str(path)!r} has version {version} of the format; gguf reads versions "
            f"{' and '.join(map(str, READER_SUPPORTED_VERSIONS))} (little-endian). Convert the model again with a "
            "current llama.cpp."
        )
    try:
        with np.errstate(over="raise"):
            reader = Reader(path)
        strings = [GGUFValueType.ARRAY, GGUFValueType.STRING]
        metadata = {
            name: len(field.data) if field.types[:2] == strings else field.contents()
            for name, field in reader.fields.items()
        }
    except EOFError as error:
        raise ModelNotFoundError(f"{str(path)!r} is cut off: {error}. Download it again, to its end.") from error
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    return GgufHeader(metadata, tuple(reader.tensors))


def _damaged(path: Path, reason: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"{str(path)!r} is damaged: its header cannot be read ({reason}). Download it again.")
