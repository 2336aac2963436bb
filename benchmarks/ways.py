"""One model, one setting, and the ways through it that take turns."""

from __future__ import annotations

from typing import Any

import torch
from naive import naive_scores
from shapes import SEMANTIC_TOKEN, Setting
from transformers import GenerationConfig

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import FRUGAL, Memory
from semgrad_guard.engine.replay.tape import Recorder, Row, Tape, growing_cache, keys_of
from semgrad_guard.engine.scores.scorer import clean_slate, scorer_of

OBJECTIVE = Objective("official")
Scores = list[tuple[float, float]]


class Bench:
    """`plain` to `naive` are the ways; each leaves the tapes for the next ones."""

    def __init__(self, model: Any, setting: Setting) -> None:
        self.model, self.setting = model, setting
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size - 2000, (setting.rows, setting.prompt), generator=generator)
        self.prompts = ids.to(model.device)
        self.scorer = scorer_of(model)
        self.scorer.exactness()
        self.ids = self.prompts
        self.tapes: list[Tape | None] = [None] * setting.rows
        self.bare = self._recorded(FRUGAL)
        self.capturing()
        self.written()  # once unmeasured: buffers, kernels

    def first_token(self) -> None:
        """Generation of a single token: the prompt's share of the time."""
        self._generate(1)

    def plain(self) -> None:
        """Greedy generation with the model as it is."""
        self._generate(self.setting.answer)

    def capturing(self) -> None:
        """The same by the engine's steps, which keep h^(k) from t* on."""
        self.tapes = self._recorded(self.scorer.memory)

    def written(self) -> Scores:
        """Scoring the latest generation."""
        return self._score(self.tapes)

    def frugal(self) -> Scores:
        """Scoring in the mode that holds least, after a generation that kept no logits."""
        usual = self.scorer.memory
        self.scorer.memory = FRUGAL
        try:
            return self._score(self.bare)
        finally:
            self.scorer.memory = usual

    def read(self) -> Scores:
        """Scoring the same text as if it came from anywhere else."""
        return self._score([None] * self.setting.rows)

    def naive(self) -> Scores:
        """The official algorithm, row after row as published."""
        return [naive_scores(self.model, row, self.setting.prompt, SEMANTIC_TOKEN) for row in self.ids.split(1)]

    def kept_mb(self) -> float:
        """MB that the generation left for scoring next to its cache: states, and kept logits and outputs."""
        recorders = {recorder for tape in self.tapes if tape for recorder, _ in tape.passes}
        return sum(recorder.hidden().nbytes + sum(recorder.held) for recorder in recorders) / 2**20

    def _recorded(self, memory: Memory) -> list[Tape | None]:
        """Write the answers greedily, step by step: the tapes that this leaves."""
        twin, prompt = self.scorer.twin, self.setting.prompt
        layer = OBJECTIVE.span(self.scorer.architecture.n_layers)[0]
        recorder, cache = Recorder(layer, prompt + SEMANTIC_TOKEN, memory=memory), growing_cache()
        ids, mask = self.prompts, torch.ones_like(self.prompts)
        with clean_slate(), torch.no_grad(), recorder.listening(twin):
            twin.reset()
            for _ in range(self.setting.answer):
                token = twin.step(ids[:, cache.get_seq_length() :], mask, cache).argmax(1, keepdim=True)
                ids, mask = torch.cat([ids, token], dim=1), torch.cat([mask, torch.ones_like(token)], dim=1)
        self.ids = ids
        rows = range(self.setting.rows)
        return [Tape(((recorder, row),), recorder.start, prompt - 1, keys_of(cache, row, 0)) for row in rows]

    def _generate(self, count: int) -> None:
        mask = torch.ones_like(self.prompts)
        options = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        self.model.generate(self.prompts, attention_mask=mask, generation_config=options)

    def _score(self, tapes: list[Tape | None]) -> Scores:
        texts = zip(self.prompts.tolist(), self.ids[:, self.setting.prompt :].tolist(), tapes, strict=True)
        rows = [Row.of(prompt, answer, SEMANTIC_TOKEN, OBJECTIVE, tape=tape) for prompt, answer, tape in texts]
        found = self.scorer.score(rows, OBJECTIVE)
        assert all(scores.tier == "replay" for scores in found), "not the way to be measured"
        return [(scores.semgrad or 0.0, scores.paragrad or 0.0) for scores in found]
