"""Train the pocket model from scratch on one CPU thread.

    python -m semgrad_guard.pocket.train --output DIR

On the same type of processor, library versions and number of threads the result is the same, bit for bit. A run that
was stopped (Ctrl-C) goes on from its last checkpoint when started again with the same output folder.

Three things make an hour of one core enough: the lean forward of `network.py`; a passage's questions sharing the
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
from semgrad_guard.pocket.settings import GROUPS_A_STEP, Settings, build_model, build_tokenizer, rate_at
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


class Run:
    """A training run with its checkpoint."""

    def __init__(self, settings: Settings, output: Path | None, tokenizer: Tokenizer | None = None) -> None:
        torch.set_num_threads(settings.threads)
        self.settings, self.output, self.step, self.stopping = settings, output, 0, False
        self.tokenizer = tokenizer or build_tokenizer(settings)
        self.model = build_model(settings)
        self.optimizers = Optimizers(self.model, settings)
        total = int(settings.rare_steps * GROUPS_A_STEP * settings.tokens / 4096)
        self.corpus = Corpus(settings.seed + 1, total, dict(MIX))

    @property
    def checkpoint(self) -> Path | None:
        return self.output / "checkpoint.pt" if self.output else None

    def stop(self, *_: object) -> None:
        """Stop after the present step: a checkpoint in the middle of one could not be continued bit for bit.

        Before the first step there is nothing to keep, and the interrupt is an ordinary one.
        """
        if not self.step:
            raise KeyboardInterrupt
        self.stopping = True

    def keep(self) -> None:
        """Write the checkpoint beside the old one and swap them, so that a stop in between loses nothing."""
        if self.checkpoint and self.output:
            self.output.mkdir(parents=True, exist_ok=True)
            state = {
                "settings": asdict(self.settings),
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers.all],
                "corpus": self.corpus.state(),
            }
            torch.save(state, self.checkpoint.with_suffix(".new"))
            self.checkpoint.with_suffix(".new").replace(self.checkpoint)

    def resume(self) -> bool:
        if not (self.checkpoint and self.checkpoint.exists()):
            return False
        state = torch.load(self.checkpoint, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"{self.checkpoint} belongs to a run with other settings; choose another --output")
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers.all, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.corpus.restore(state["corpus"])
        self.step = state["step"]
        return True

    def one_step(self, stream: Iterator[Item]) -> tuple[float, float]:
        """One step; returns the mean loss and the share of answer tokens predicted right."""
        taken = step_items(stream, self.settings.tokens)
        count = sum(made.predicted for made, _ in taken)
        total = right = 0.0
        for batch in micro_batches(taken):
            loss, hits = network.loss(self.model, batch)
            (loss / count).backward()
            total, right = total + loss.item(), right + hits.item()
        self.optimizers.step(rate_at(self.step, self.settings))
        self.step += 1
        return total / count, right / count

    def train(self, *, every: int = 50, watch: int = 250) -> None:
        """Warm up (unless resumed) and train to the end."""
        settings = self.settings
        if not self.resume() and settings.warm_up:
            warm_up(self.model, self.optimizers, settings)
        stream = items(self.tokenizer, self.corpus)
        watched = {name: list(items(self.tokenizer, groups)) for name, groups in probes(settings).items()}
        began, first, loss, right = time.time(), self.step, 0.0, 0.0
        while self.step < settings.steps and not self.stopping:
            now = self.one_step(stream)
            weight = 0.05 if self.step - first > 20 else 0.5
            loss, right = loss + weight * (now[0] - loss), right + weight * (now[1] - right)
            if self.step % every == 0:
                left = (time.time() - began) / (self.step - first) * (settings.steps - self.step)
                line = (
                    f"{self.step}/{settings.steps} loss {loss:.3f} tokens right {right:.3f}, {left / 60:.1f} min left"
                )
                if self.step % watch == 0:
                    line += "".join(f", {name} {exact(self.model, probe):.3f}" for name, probe in watched.items())
                    self.keep()
                    if self.output:
                        save(self.model, self.tokenizer, self.output, settings)
                print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights (and the checkpoint)")
    for name in ("steps", "threads", "warm_up", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings(), name))
    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    settings = Settings(steps=options.steps, threads=options.threads, warm_up=options.warm_up, seed=options.seed)
    run = Run(settings, options.output)
    parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {settings.steps} steps of {settings.tokens} tokens", flush=True)
    signal.signal(signal.SIGINT, run.stop)
    run.train()
    if run.stopping:
        run.keep()
        print(f"stopped at step {run.step}; the same command goes on from here", file=sys.stderr)
        return 130
    save(run.model, run.tokenizer, options.output, settings)
    print(f"saved in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
