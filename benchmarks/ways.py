"""One model, one setting, and the ways through it that take turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from naive import naive_scores
from shapes import SEMANTIC_TOKEN, Setting
from transformers import GenerationConfig

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import FRUGAL, TokenBatch, cache_of
from semgrad_guard.engine.replay.captured_states import Capture, CapturedStates
from semgrad_guard.engine.scores.scorer import scorer_of

OBJECTIVE = Objective("official")
Scores = list[tuple[float, float]]


class Bench:
    """`plain` to `naive` are the ways; each leaves the states for the next ones."""

    def __init__(self, model: Any, setting: Setting) -> None:
        self.model, self.setting = model, setting
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size - 2000, (setting.rows, setting.prompt), generator=generator)
        self.prompts = ids.to(model.device)
        self.scorer = scorer_of(model)
        self.scorer.tiers()
        self.ids = self.prompts
        self.states: CapturedStates | None = None
        self.capturing()
        self.captured()  # once unmeasured: buffers, kernels

    def first_token(self) -> None:
        """Generation of a single token: the prompt's share of the time."""
        self._generate(1)

    def plain(self) -> None:
        """Greedy generation with the model as it is."""
        self._generate(self.setting.answer)

    def capturing(self) -> None:
        """The same through the engine, which keeps h^(k) from t* on."""
        layer = OBJECTIVE.span(self.scorer.architecture.n_layers)[0]
        memory = self.scorer.memory
        start = self.setting.prompt + SEMANTIC_TOKEN
        capture = Capture(layer, start, memory=memory)
        options = self._options(self.setting.answer)
        options.return_dict_in_generate = True
        mask = torch.ones_like(self.prompts)
        output = self.scorer.current_replayer().generate(self.prompts, mask, capture, generation_config=options)
        self.ids, self.states = (
            output.sequences,
            CapturedStates.of(cache_of(output), capture),
        )

    def captured(self) -> Scores:
        """Scoring the latest generation."""
        return self._score(self.states)

    def frugal(self) -> Scores:
        """Scoring in the mode that holds least, after a generation that kept no logits."""
        usual = self.scorer.memory
        self.scorer.memory = FRUGAL
        try:
            return self._score(None if self.states is None else replace(self.states, logits=(), outputs={}))
        finally:
            self.scorer.memory = usual

    def prefix(self) -> Scores:
        """Scoring the same text as if it came from anywhere else."""
        return self._score(None)

    def naive(self) -> Scores:
        """The official algorithm, row after row as published."""
        return [naive_scores(self.model, row, self.setting.prompt, SEMANTIC_TOKEN) for row in self.ids.split(1)]

    def kept_mb(self) -> float:
        """MB that the generation left for scoring next to its cache: states, and kept logits and outputs."""
        captured = self.states
        if captured is None:
            return 0.0
        return sum(t.nbytes for t in (captured.states, *captured.logits, *captured.outputs.values())) / 2**20

    def _generate(self, count: int) -> None:
        mask = torch.ones_like(self.prompts)
        self.model.generate(self.prompts, attention_mask=mask, generation_config=self._options(count))

    def _score(self, captured: CapturedStates | None) -> Scores:
        responses = self.ids[:, self.setting.prompt :].tolist()
        offsets = [SEMANTIC_TOKEN] * self.setting.rows
        batch = TokenBatch.of(self.prompts.tolist(), responses, offsets, self.model.device)
        found = self.scorer.score(batch, OBJECTIVE, captured)
        wanted = "prefix" if captured is None else "captured"
        assert all(scores.tier == wanted for scores in found), "not the tier to be measured"
        return [(scores.semgrad or 0.0, scores.paragrad or 0.0) for scores in found]

    def _options(self, count: int) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
