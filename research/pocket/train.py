"""Train the pocket model on CPU cores, one thread each: first to read, then to know facts.

    python -m research.pocket.reader.train --output DIR
    python -m research.pocket.train --reader DIR/reader.safetensors --output DIR

A small network learns to read and is written into a Llama, which then learns its facts in layers of their own, while
the reading parts do not change. Without `--reader` it is the committed one; `--start` continues from what this
command wrote before (with the same reader). On the same type of processor, library versions and number of workers the
result is the same, bit for bit. A run that was stopped (Ctrl-C) resumes from its last checkpoint when started again
with the same output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM
from transformers.utils import logging

from research.pocket.batches import Item, items, loss, micro_batches, step_items
from research.pocket.corpus import MIX, Corpus
from research.pocket.optimizers import Optimizers
from research.pocket.probes import exact, probes
from research.pocket.reader.memory import free
from research.pocket.reader.places import sample
from research.pocket.reader.to_llama import rounded, to_llama
from research.pocket.reader.train import READER, load_reader
from research.pocket.run import TrainingRun, add_options, fingerprint, with_options
from research.pocket.settings import EXAMPLES_A_STEP, Settings, rate_at
from research.pocket.team import Team, team
from research.pocket.tokenizer import load_tokenizer, save_tokenizer


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


class Run(TrainingRun):
    """The Llama's training, from its reader on. It can be stopped after any step."""

    FILE = "checkpoint.pt"
    settings: Settings

    def __init__(
        self,
        settings: Settings,
        output: Path | None,
        reader: Path = READER,
        team: Team | None = None,
        *,
        start: Path | None = None,
    ) -> None:
        before = fingerprint(start / "model.safetensors") if start else ""
        super().__init__(replace(settings, reader=fingerprint(reader), start=before), output, team)
        self.tokenizer = load_tokenizer()
        self.model = to_llama(load_reader(reader, self.tokenizer), self.tokenizer, seed=settings.seed)
        if start:
            self.model.load_state_dict(LlamaForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict())
        self.optimizers = Optimizers(self.model, free(self.model, sample(self.tokenizer)))
        period = int(settings.steps * EXAMPLES_A_STEP * settings.tokens / 6144 / self.team.size)
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
            lost, hits = loss(self.model, batch)
            lost.backward()
            total, right = total + lost.item(), right + hits
        total, right, count = self.team.total(total, right, sum(len(item.answer) for item in taken))
        self.optimizers.share(self.team, 1 / count)
        self.optimizers.step(self.settings.rate * rate_at(self.step, self.settings.steps))
        self.step += 1
        return total / count, right / count

    def right(self, probe: list[Item]) -> float:
        """The share of a probe's answers that greedy decoding would give word for word; each member reads a part."""
        right, total = self.team.total(*exact(self.model, probe[self.team.rank :: self.team.size]))
        return right / max(total, 1)

    def train(self, *, every: int = 50, watch: int = 250) -> None:
        """Train to the end, or until stopped; the checkpoint is written every `watch` steps."""
        settings = self.settings
        self.resume()
        stream = items(self.tokenizer, self.corpus)
        watched = {name: list(items(self.tokenizer, examples)) for name, examples in probes(settings.seed).items()}
        began, first, mean, right = time.time(), self.step, 0.0, 0.0
        while self.step < settings.steps and not self.team.total(self.stopping)[0]:
            now = self.one_step(stream)
            weight = max(0.05, 1 / (self.step - first))
            mean, right = mean + weight * (now[0] - mean), right + weight * (now[1] - right)
            if self.step % every == 0:
                left = (time.time() - began) / (self.step - first) * (settings.steps - self.step)
                line = f"{self.step}/{settings.steps} loss {mean:.3f} right {right:.3f}, {left / 60:.1f} min left"
                if self.step % watch == 0:
                    line += "".join(f", {name} {self.right(probe):.3f}" for name, probe in watched.items())
                    self.keep()
                self.say(line)
        if self.step < settings.steps:
            self.keep()


def _work(members: Team, settings: Settings, output: Path, reader: Path, start: Path | None) -> None:
    """The other members of the team: the same, silently."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one tells them when to stop
    logging.disable_progress_bar()
    Run(settings, output, reader, members, start=start).train()


def train_llama(settings: Settings, output: Path, reader: Path, start: Path | None = None) -> Run:
    """Train with a team of workers; the result may have been stopped before its last step."""
    with team(settings.workers, _work, (settings, output, reader, start)) as members:
        run = Run(settings, output, reader, members, start=start)
        parameters = sum(p.numel() for p in run.model.parameters())
        run.say(f"{parameters / 1e6:.2f} M parameters, {settings.steps} steps of {settings.tokens} tokens")
        signal.signal(signal.SIGINT, run.stop)
        run.train()
    return run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights (and the checkpoint)")
    parser.add_argument("--reader", type=Path, default=READER, help="what reader.train wrote")
    parser.add_argument("--start", type=Path, help="the folder of an earlier training to continue from")
    add_options(parser, Settings())
    given = parser.parse_args(argv)
    logging.disable_progress_bar()
    settings: Settings = with_options(Settings(), given)
    run = train_llama(settings, given.output, given.reader, given.start)
    if run.step < settings.steps:
        print(f"stopped at step {run.step}; run the same command again to resume", file=sys.stderr)
        return 130
    with safe_open(given.reader, "pt") as file:  # type: ignore[no-untyped-call]
        about = {"reader": json.loads(file.metadata()["settings"]), "llama": asdict(run.settings)}
    save(run.model, run.tokenizer, given.output, about)
    print(f"saved in {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
