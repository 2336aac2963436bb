"""Where a worker gets its model: by name, since weights do not travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.loaded_model import ModelIdentity
from semgrad_guard.engine.prompts.token_choice import TokenChoice
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.named import NAMES


@dataclass(frozen=True)
class ModelSource:
    """A model by name, and how it is loaded; with `identity`, only one that is the same is taken."""

    name: str
    dtype: str | None = None
    device: str | None = None
    quantization: Mapping[str, Any] | None = None
    semantic_token: TokenChoice | None = None
    identity: ModelIdentity | None = None

    @classmethod
    def of(cls, name: str, **settings: Any) -> Self:
        """A folder is named by its whole path: workers start elsewhere."""
        is_path = name not in NAMES and Path(name).exists()
        return cls(str(Path(name).resolve()) if is_path else name, **settings)

    @property
    def on_gpu(self) -> bool:
        """Whether it takes a GPU."""
        return self.device is not None and self.device.startswith("cuda")

    def load(self) -> LanguageModel:
        """The model.

        Raises:
            BindingMismatchError: what is found under this name is another model.
            SemGradGuardError: it cannot be loaded; see `LanguageModel.from_pretrained`.
        """
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = LanguageModel.from_pretrained(
            self.name,
            dtype=self.dtype,
            device_map=self.device,
            quantization_config=self.quantization,
            semantic_token=self.semantic_token,
        )
        if self.identity is not None and model.identity != self.identity:
            raise BindingMismatchError(
                f"A worker's {self.name} is another model than the one here ({model.identity} and not "
                f"{self.identity}). Bring the same files onto every machine."
            )
        return model
