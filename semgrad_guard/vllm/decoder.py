"""`VLLMDecoder`: vLLM writes the answers, and our engine scores them on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from semgrad_guard.engine.generation.decoding import Decoder
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.generation.running_batch import Asked
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scoring.scorer import Scorer
from semgrad_guard.records import Conversation
from semgrad_guard.vllm.engine import Engine
from semgrad_guard.vllm.running_batch import VLLMBatch


class VLLMDecoder(Decoder):
    """Writes with vLLM's engine in this process. What draws samples for an estimator uses the twin's own `generate`."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_tokens: tuple[int, ...],
        render: Callable[[Conversation], Prompt],
        window: int | None,
    ) -> None:
        super().__init__(scorer, tokenizer, end_tokens=end_tokens, render=render, window=window)
        self._engine = engine

    def run(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        objective: Objective,
        *,
        streamer: BaseStreamer | None = None,
    ) -> list[Generation]:
        """Answer a batch of prompts; `streamer` hears each new token, only in a batch of one."""
        with self._scorer.lock:
            batch, seed = VLLMBatch(self._engine, self._scorer, lambda: self, objective), options.seed
            seeds = [None if seed is None else seed + row for row in range(len(prompts))]
            rows = batch.join([Asked(p, replace(options, seed=s)) for p, s in zip(prompts, seeds, strict=True)])
            told = 0
            if streamer is not None:
                streamer.put(torch.tensor([prompts[0].ids]))  # as `generate` does
            while batch.rows:
                try:
                    batch.step()
                    if streamer is not None:
                        for token in rows[0].ids[told:]:
                            streamer.put(torch.tensor([token]))
                except BaseException:
                    batch.drop(rows)
                    raise
                told = len(rows[0].ids)
            if streamer is not None:
                streamer.end()
            for row in rows:
                if row.error is not None:
                    raise row.error
            return batch.generations(rows)
