"""`VLLMLanguageModel`: vLLM writes, our engine scores on vLLM's own weights, in one process (extra `vllm`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.loaded_model import ModelIdentity
from semgrad_guard.engine.prompts.prompt import render
from semgrad_guard.errors import InputError
from semgrad_guard.named import folder_of
from semgrad_guard.vllm.decoder import VLLMDecoder
from semgrad_guard.vllm.shared_weights import kept_weights, library, twin_of


class VLLMLanguageModel(LanguageModel):
    """A `LanguageModel` whose answers vLLM writes. It goes wherever one goes: into `Guard` and both doors.

    Scores are those of our engine on the same weights. A calibration made with one engine does not fit the other: the
    model's fingerprint names the engine, for answers in half precision differ between them.
    """

    _llm: Any = None

    @classmethod
    def from_vllm(cls, llm: Any, *, name: str | None = None, template_options: Mapping[str, Any] | None = None) -> Self:
        """Wrap a `vllm.LLM` that runs in this process and was made under `kept_weights` (see `from_pretrained`).

        Raises:
            UnsupportedModelError: the layout of its weights is not known, or they are not whole.
            InputError: its engine runs in another process.
        """
        served = _served(llm)
        config = llm.model_config
        twin = twin_of(served, config.hf_text_config, config.dtype)
        made = cls(twin, llm.get_tokenizer(), name=name or str(config.model), template_options=template_options)
        made._llm = llm
        return made

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]  # vLLM loads, with options of its own
        cls, name_or_path: str, *, template_options: Mapping[str, Any] | None = None, **engine: Any
    ) -> Self:
        """Load a checkpoint with vLLM in this process; `engine` are the arguments of `vllm.LLM`.

        Raises:
            InputError: vLLM is not installed, or does not load.
            UnsupportedModelError: see `from_vllm`.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        folder = folder_of(name_or_path)
        with kept_weights():
            llm: Any = library().LLM(str(folder or name_or_path), **{"enforce_eager": True, **engine})
        return cls.from_vllm(llm, name=name_or_path, template_options=template_options)

    @property
    def identity(self) -> ModelIdentity:
        """That of the model, and in its fingerprint the engine that writes."""
        found = super().identity
        return replace(found, fingerprint=f"vllm-{found.fingerprint}")

    @property
    def joins(self) -> bool:
        """No: vLLM keeps a running batch of its own."""
        return False

    def _decoder_ending(self, end_tokens: tuple[int, ...]) -> VLLMDecoder:
        decoder = VLLMDecoder(
            self._scorer,
            self.tokenizer,
            end_tokens=end_tokens,
            render=partial(render, self.tokenizer, template_options=self._template_options),
            window=self.context_window,
        )
        decoder.engine = self._llm.llm_engine
        return decoder

    @property
    def context_window(self) -> int | None:
        """Positions that vLLM was given room for."""
        return None if self._llm is None else int(self._llm.model_config.max_model_len)


def _served(llm: Any) -> Any:
    """vLLM's model, of an engine in this process."""
    try:
        (model,) = llm.apply_model(lambda model: model)
    except Exception as error:
        raise InputError(
            "vLLM's engine runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported"
        ) from error
    return model
