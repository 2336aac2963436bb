"""Train the pocket model from scratch on CPU cores, one thread each.

    python -m semgrad_guard.pocket.train --output DIR

On the same type of processor, library versions and number of workers the result is the same, bit for bit. A run that
was stopped (Ctrl-C) goes on from its last checkpoint when started again with the same output folder.

Three things make an hour of two cores enough: the lean forward of `network.py`; a passage's questions sharing the
passage (`batches.py`); and copying before reading: first weights that nearly copy (`copying.py`) and a minute of
warm-up on random tokens that repeat. Without it the model learns to read late or never.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM
from transformers.utils import logging

from semgrad_guard.pocket import network
from semgrad_guard.pocket.batches import Item, items, micro_batches, step_items
from semgrad_guard.pocket.corpus import MIX, Corpus
from semgrad_guard.pocket.muon import Optimizers
from semgrad_guard.pocket.probes import exact, probes
from semgrad_guard.pocket.run import TrainingRun
from semgrad_guard.pocket.settings import GROUPS_A_STEP, PERIOD, Settings, build_model, build_tokenizer, rate_at
from semgrad_guard.pocket.team import Team, team
from semgrad_guard.pocket.tokenizer import save_tokenizer
from semgrad_guard.pocket.warm_up import warm_up


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path, settings: Settings) -> None:
    """What plain `AutoModelForCausalLM` and `AutoTokenizer` load, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    half: Any = LlamaForCausalLM(model.config)
    half.to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.generation_config.eos_token_id = 2
    half.generation_config.pad_token_id = 0
    half.generation_config.max_new_tokens = 48
    half.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "training.json").write_text(json.dumps(asdict(settings), indent=1) + "\n", encoding="utf-8")


class Run(TrainingRun):
    """The Llama's training. It can be stopped after any step."""

    FILE = "checkpoint.pt"
    settings: Settings

    def __init__(
        self, settings: Settings, output: Path | None, tokenizer: Tokenizer | None = None, team: Team | None = None
    ) -> None:
        super().__init__(settings, output, team)
        self.tokenizer = tokenizer or build_tokenizer(settings)
        self.model = build_model(settings, self.tokenizer)
        self.optimizers = Optimizers(self.model, settings)
        period = int(PERIOD * GROUPS_A_STEP * settings.tokens / 4096 / self.team.size)
        self.corpus = Corpus(settings.seed + 1 + self.team.rank, period, dict(MIX), self.team)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers.all],
            "corpora": self.team.gather(self.corpus.state()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers.all, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.corpus.restore(state["corpora"][self.team.rank])

    def one_step(self, stream: Iterator[Item]) -> tuple[float, float]:
        """One step; returns the mean loss and the share of answer tokens predicted right."""
        taken = step_items(stream, self.settings.tokens // self.team.size)
        total = right = 0.0
        for batch in micro_batches(taken):
            loss, astray, hits = network.loss(self.model, batch)
            (loss + self.settings.pointing * astray).backward()
            total, right = total + loss.item(), right + hits.item()
        total, right, count = self.team.total(total, right, sum(made.predicted for made, _ in taken))
        self.optimizers.share(self.team, 1 / count)
        self.optimizers.step(rate_at(self.step, self.settings))
        self.step += 1
        return total / count, right / count

    def right(self, probe: list[Item]) -> float:
        """The share of a probe's answers that greedy decoding would give word for word; each member reads a part."""
        right, total = self.team.total(*exact(self.model, probe[self.team.rank :: self.team.size]))
        return right / max(total, 1)

    def train(self, *, every: int = 50, watch: int = 250) -> None:
        """Warm up (unless resumed) and train to the end."""
        settings = self.settings
        if not self.resume() and settings.warm_up:
            warm_up(self.model, self.optimizers, settings, self.team)
        stream = items(self.tokenizer, self.corpus)
        watched = {name: list(items(self.tokenizer, groups)) for name, groups in probes(settings).items()}
        began, first, loss, right = time.time(), self.step, 0.0, 0.0
        while self.step < settings.steps and not self.team.total(self.stopping)[0]:
            now = self.one_step(stream)
            weight = 0.05 if self.step - first > 20 else 0.5
            loss, right = loss + weight * (now[0] - loss), right + weight * (now[1] - right)
            if self.step % every == 0:
                left = (time.time() - began) / (self.step - first) * (settings.steps - self.step)
                line = (
                    f"{self.step}/{settings.steps} loss {loss:.3f} tokens right {right:.3f}, {left / 60:.1f} min left"
                )
                if self.step % watch == 0:
                    line += "".join(f", {name} {self.right(probe):.3f}" for name, probe in watched.items())
                    self.keep()
                self.say(line)


def _work(members: Team, settings: Settings, output: Path, tokenizer: str) -> None:
    """What the other members of the team do: the same, silently."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one tells them when to stop
    logging.disable_progress_bar()
    run = Run(settings, output, Tokenizer.from_str(tokenizer), members)
    run.train()
    if run.step < settings.steps:
        run.keep()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights (and the checkpoint)")
    for name in ("steps", "workers", "warm_up", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings(), name))
    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    settings = Settings(steps=options.steps, workers=options.workers, warm_up=options.warm_up, seed=options.seed)
    tokenizer = build_tokenizer(settings)
    with team(settings.workers, _work, (settings, options.output, tokenizer.to_str())) as members:
        run = Run(settings, options.output, tokenizer, members)
        parameters = sum(p.numel() for p in run.model.parameters())
        run.say(f"{parameters / 1e6:.2f} M parameters, {settings.steps} steps of {settings.tokens} tokens")
        signal.signal(signal.SIGINT, run.stop)
        run.train()
        if run.step < settings.steps:
            run.keep()
    if run.step < settings.steps:
        print(f"stopped at step {run.step}; the same command goes on from here", file=sys.stderr)
        return 130
    save(run.model, run.tokenizer, options.output, settings)
    print(f"saved in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
