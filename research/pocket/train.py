"""Train the pocket model's facts, in layers of their own, around a reader that does not change.

    python -m research.pocket.train --output DIR

A small network that has learned to read (`reader/`) is written into a Llama, which then learns facts, on CPU cores of
one thread each. `--start` continues from what this command wrote before. On the same type of processor, library
versions and number of workers the result is the same, bit for bit. A run that was stopped (Ctrl-C) resumes from its
last checkpoint when started again with the same output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM
from transformers.utils import logging

from research.pocket.batches import Item, exact, items, loss, micro_batches, step_items
from research.pocket.corpus import MIX, Corpus
from research.pocket.optimizers import Optimizers
from research.pocket.reader.memory import free
from research.pocket.reader.network import READER, load_reader
from research.pocket.reader.places import sample
from research.pocket.reader.to_llama import rounded, to_llama
from research.pocket.team import Team, team
from research.pocket.tokenizer import load_tokenizer, save_tokenizer
from research.pocket.world import KNOWN, of_split, question
from semgrad_guard.files import atomic_write

EXAMPLES_A_STEP = 217.0  # of 6,144 tokens, measured: spreads the rare facts over the training
OPTIONS = ("steps", "workers", "seed", "rate")  # the settings that are options of the command


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the Llama's training (apart from tokenizer, data files, versions and processor)."""

    steps: int = 1300
    tokens: int = 6144  # a step
    seed: int = 0
    workers: int = 2  # processes of one thread
    rate: float = 1.2e-2
    reader: str = ""  # the first digits of its file's sha256
    start: str = ""  # the same of its initial weights


DEFAULTS = Settings()


def rate_at(step: int, steps: int) -> float:
    """Of the full rate: a short rise, level to the middle, then down to almost nothing."""
    progress = step / steps
    return min(1.0, (step + 1) / 30) * (1.0 if progress < 0.5 else max(0.01, 2 * (1 - progress)))


def fingerprint(file: Path) -> str:
    """The first digits of a file's sha256: settings name a run's initial weights by it."""
    return sha256(file.read_bytes()).hexdigest()[:12]


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path, about: dict[str, Any]) -> None:
    """The files for plain `AutoModelForCausalLM` and `AutoTokenizer`, in bfloat16. `about`: every setting."""
    folder.mkdir(parents=True, exist_ok=True)
    half: Any = rounded(model, tokenizer)
    half.to(torch.bfloat16)
    half.generation_config.eos_token_id = 2
    half.generation_config.pad_token_id = 0
    half.generation_config.max_new_tokens = 48
    half.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "training.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


class Run:
    """The training of one member of a team: the joint work stays equal. It can be stopped after any step."""

    def __init__(
        self, settings: Settings, output: Path | None, team: Team | None = None, *, start: Path | None = None
    ) -> None:
        torch.set_num_threads(1)
        before = fingerprint(start / "model.safetensors") if start else ""
        self.settings = replace(settings, reader=fingerprint(READER), start=before)
        self.checkpoint = output / "checkpoint.pt" if output else None
        self.team, self.step, self.stopping = team or Team(), 0, False
        self.tokenizer = load_tokenizer()
        self.model = to_llama(load_reader(READER, self.tokenizer), self.tokenizer, seed=settings.seed)
        if start:
            self.model.load_state_dict(LlamaForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict())
        self.optimizers = Optimizers(self.model, free(self.model, sample(self.tokenizer)))
        period = int(settings.steps * EXAMPLES_A_STEP * settings.tokens / 6144 / self.team.size)
        self.corpus = Corpus(settings.seed + 1 + self.team.rank, period, dict(MIX), self.team)

    def stop(self, *_: object) -> None:
        """Stop after this step. Before the first one there is nothing to keep: the interrupt is an ordinary one."""
        if not self.step:
            raise KeyboardInterrupt
        self.stopping = True

    def keep(self) -> None:
        """Write the checkpoint. Every member is called."""
        state = {
            "settings": asdict(self.settings),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers.all],
            "corpora": self.team.gather(self.corpus.state()),
        }
        if self.checkpoint and self.team.rank == 0:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.checkpoint, partial(torch.save, state))

    def resume(self) -> None:
        """Take up the checkpoint of a run with the same settings, if there is one."""
        if not (self.checkpoint and self.checkpoint.exists()):
            return
        state = torch.load(self.checkpoint, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"{self.checkpoint} belongs to a run with other settings; choose another --output")
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers.all, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.corpus.restore(state["corpora"][self.team.rank])
        self.step = state["step"]

    def one_step(self, stream: Iterator[Item]) -> tuple[float, float]:
        """One step; returns the mean loss and the share of answer tokens predicted right."""
        taken = step_items(stream, self.settings.tokens // self.team.size)
        total = right = 0.0
        for batch in micro_batches(taken):
            lost, hits = loss(self.model, batch)
            lost.backward()
            total, right = total + lost.item(), right + hits
        total, right, count = self.team.total(total, right, sum(len(item.answer) for item in taken))
        self.optimizers.share(self.team, 1 / count)
        self.optimizers.step(self.settings.rate * rate_at(self.step, self.settings.steps))
        self.step += 1
        return total / count, right / count

    def known(self) -> float:
        """The share of known facts, in a held-out wording, that greedy decoding gives word for word."""
        facts = [f for f in of_split(KNOWN) if not f.several][::4][self.team.rank :: self.team.size]
        messages = [([{"role": "user", "content": question(f, 0, held_out=True)}], f.answers[0]) for f in facts]
        right, total = self.team.total(*exact(self.model, list(items(self.tokenizer, messages))))
        return right / total

    def train(self, *, every: int = 50, watch: int = 250) -> None:
        """Train to the end, or until stopped; the checkpoint is written every `watch` steps."""
        settings = self.settings
        self.resume()
        stream = items(self.tokenizer, self.corpus)
        began, first, mean, right = time.time(), self.step, 0.0, 0.0
        while self.step < settings.steps and not self.team.total(self.stopping)[0]:
            now = self.one_step(stream)
            weight = max(0.05, 1 / (self.step - first))
            mean, right = mean + weight * (now[0] - mean), right + weight * (now[1] - right)
            if self.step % every == 0:
                left = (time.time() - began) / (self.step - first) * (settings.steps - self.step)
                line = f"{self.step}/{settings.steps} loss {mean:.3f} right {right:.3f}, {left / 60:.1f} min left"
                if self.step % watch == 0:
                    line += f", known facts {self.known():.3f}"
                    self.keep()
                if self.team.rank == 0:
                    print(line, flush=True)
        if self.step < settings.steps:
            self.keep()


def _work(members: Team, settings: Settings, output: Path, start: Path | None) -> None:
    """The other members of the team: the same, silently."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one tells them when to stop
    logging.disable_progress_bar()
    Run(settings, output, members, start=start).train()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights (and the checkpoint)")
    parser.add_argument("--start", type=Path, help="the folder of an earlier training to continue from")
    for name in OPTIONS:
        parser.add_argument(f"--{name}", type=type(getattr(DEFAULTS, name)), default=getattr(DEFAULTS, name))
    given = parser.parse_args(argv)
    logging.disable_progress_bar()
    settings = replace(DEFAULTS, **{name: getattr(given, name) for name in OPTIONS})
    with team(settings.workers, _work, (settings, given.output, given.start)) as members:
        run = Run(settings, given.output, members, start=given.start)
        signal.signal(signal.SIGINT, run.stop)
        run.train()
    if run.step < settings.steps:
        print(f"stopped at step {run.step}; run the same command again to resume", file=sys.stderr)
        return 130
    with safe_open(READER, "pt") as file:  # type: ignore[no-untyped-call]
        about = {"reader": json.loads(file.metadata()["settings"]), "llama": asdict(run.settings)}
    save(run.model, run.tokenizer, given.output, about)
    print(f"saved in {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
