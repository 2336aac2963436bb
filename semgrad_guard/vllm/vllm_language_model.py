"""`VLLMLanguageModel`: vLLM writes, our engine scores on vLLM's own weights, in one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self, cast

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from semgrad_guard.engine.answers.writing_model import ModelIdentity, name_of
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.objective import Objective, TokenChoice
from semgrad_guard.named import folder_of
from semgrad_guard.vllm.engine import Engine, VLLMBatch
from semgrad_guard.vllm.shared_weights import keep_weights, library, twin_of

_BUDGET = 512 << 20
"""Of `Memory`, for logits and outputs: vLLM writes many answers at once (32 of 32 tokens, 0.5B: 311 MB of each)."""


class TwinLanguageModel(LanguageModel):
    """A `LanguageModel` on vLLM's own weights: it scores the answers that vLLM writes.

    Scores are those of our engine on the same weights. A calibration made with one engine does not fit the other: the
    model's fingerprint names the engine, for answers in half precision differ between them.
    """

    _window: int | None = None

    @classmethod
    def on(cls, served: Any, config: Any, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> Self:
        """Wrap vLLM's model, which was made under `keep_weights`; `config` is vLLM's `ModelConfig`.

        It names the tokenizer, unless there is one at hand, and the model. `options` as in `from_transformers`.

        Raises:
            UnsupportedModelError: the layout of its weights is not known, or they are not whole.
        """
        twin = twin_of(served, config.hf_config, config.dtype)
        cast(Any, twin.generation_config).update(**config.try_get_generation_config())  # it names tokens that end
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(config.tokenizer, revision=config.tokenizer_revision)
        made = cls(twin, tokenizer, **{"name": name_of(str(config.model)), **options})
        made._window = int(config.max_model_len)
        made.scorer.memory = replace(made.scorer.memory, logits=_BUDGET, outputs=_BUDGET)
        return made

    @property
    def identity(self) -> ModelIdentity:
        """That of the model, and in its fingerprint the engine that writes."""
        found = super().identity
        return replace(found, fingerprint=f"vllm-{found.fingerprint}")

    @property
    def context_window(self) -> int | None:
        """Positions that vLLM was given room for."""
        return self._window


class VLLMLanguageModel(TwinLanguageModel):
    """A `LanguageModel` whose answers vLLM writes, in this process. It can be used wherever one can."""

    _llm: Any = None
    _engine: Engine

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]  # vLLM loads, with options of its own
        cls,
        name_or_path: str,
        *,
        semantic_token: int | TokenChoice | None = None,
        template_options: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> Self:
        """Load a checkpoint with vLLM in this process; `engine` are the arguments of `vllm.LLM`.

        Unless they or the environment decide otherwise, weights are read from safetensors alone, in the checkpoint's
        own number format, and vLLM's usage statistics are off.

        Raises:
            InputError: vLLM is not installed, does not load, or runs in another process.
            UnsupportedModelError: the layout of its weights is not known, or they are not whole.
        """
        for variable, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}.items():
            os.environ.setdefault(variable, value)
        vllm, place = library(), str(folder_of(name_or_path) or name_or_path)
        dtype: Any = AutoConfig.from_pretrained(place).dtype  # vLLM would make half precision of float32
        known: dict[str, Any] = {"structured_outputs_config": {"backend": "guidance"}}  # it reads our grammars
        if dtype is not None:
            known["dtype"] = dtype
        with keep_weights():
            llm: Any = vllm.LLM(place, **{"enforce_eager": True, "load_format": "safetensors", **known, **engine})
        options: Any = {"semantic_token": semantic_token, "template_options": template_options}
        written = Engine(llm)
        made = cls.on(
            written.runner.model, llm.model_config, llm.get_tokenizer(), name=name_of(name_or_path), **options
        )
        made._llm, made._engine = llm, written
        written.record(made.scorer)
        return made

    @property
    def joins(self) -> bool:
        """Whether answers may join and leave a running batch: vLLM's own."""
        return True

    def running_batch(self, objective: Objective | None = None) -> VLLMBatch:
        """vLLM's own running batch. For one thread."""
        return VLLMBatch(self, objective or Objective(), listener=self._engine)
