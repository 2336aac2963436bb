"""`VLLMDecoder`: vLLM writes the answers, and our engine scores them on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from semgrad_guard.engine.generation.decoding import Decoder, Written
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.errors import InputError
from semgrad_guard.vllm.shared_weights import library

_NUMBERS = count()


class VLLMDecoder(Decoder):
    """Writes with vLLM's engine in this process. What draws samples for an estimator uses the twin's own `generate`."""

    engine: Any
    """`vllm.LLM.llm_engine`."""

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
            rows = [self._begin(prompt, options, row) for row, prompt in enumerate(prompts)]
            try:
                self._write({row.name: row for row in rows}, streamer)
            finally:
                self.engine.abort_request([row.name for row in rows if not row.done])
        if streamer is not None:
            streamer.end()
        written = [row.written(self.end_tokens) for row in rows]
        return self.generations(written, None)

    def _begin(self, prompt: Prompt, options: GenerationOptions, number: int) -> _Row:
        row = _Row(f"semgrad-guard-{next(_NUMBERS)}", prompt, options)
        self.engine.add_request(row.name, {"prompt_token_ids": list(prompt.ids)}, self._sampling(options, number))
        return row

    def _write(self, rows: dict[str, _Row], streamer: BaseStreamer | None) -> None:
        """Step until all rows are done; a stop takes effect between two steps."""
        if streamer is not None:
            streamer.put(torch.tensor([next(iter(rows.values())).prompt.ids]))  # as `generate` does
        while not all(row.done for row in rows.values()):
            current_stop().check()
            for output in self.engine.step():
                row = rows[output.request_id]
                tokens = list(output.outputs[0].token_ids)
                if streamer is not None:
                    for token in tokens[len(row.tokens) :]:
                        streamer.put(torch.tensor([token]))
                row.tokens, row.done = tokens, bool(output.finished)

    def _sampling(self, options: GenerationOptions, row: int) -> Any:
        """vLLM's parameters for these options; a sampled answer is vLLM's for that seed, not our engine's."""
        if options.grammar is not None:
            raise InputError("an answer that follows a grammar is not written by vLLM here; leave the grammar out")
        return library().SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k or -1,
            seed=None if options.seed is None else options.seed + row,
            stop=list(options.stop) or None,
            include_stop_str_in_output=True,  # the text is cut where our engine cuts it
            stop_token_ids=list(self.end_tokens),
            ignore_eos=True,  # the end tokens above are all there are
            skip_special_tokens=True,
        )


@dataclass(eq=False)
class _Row:
    """A request that vLLM works on."""

    name: str
    prompt: Prompt
    options: GenerationOptions
    tokens: list[int] = field(default_factory=list[int])
    done: bool = False

    def written(self, end_tokens: Sequence[int]) -> Written:
        ended = bool(self.tokens) and self.tokens[-1] in end_tokens
        return Written(self.prompt, self.options, tuple(self.tokens[:-1] if ended else self.tokens), ended)
