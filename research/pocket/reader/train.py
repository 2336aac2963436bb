"""Train the reader on CPU cores, one thread each, and write `DIR/reader.safetensors`.

    python -m research.pocket.reader.train --output DIR [--start FILE]

The committed one is `data/reader.safetensors`. `--start` continues from an earlier reader. On the same
type of processor, library versions and number of workers the result is the same, bit for bit. A run that was stopped
(Ctrl-C) resumes from its last checkpoint, `DIR/reader.pt`, when started again with the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from research.pocket.muon import Muon
from research.pocket.reader.material import BATCHES, DATA, Material, right
from research.pocket.reader.network import Reader, losses
from research.pocket.reader.questions import Questions
from research.pocket.run import TrainingRun, add_options, fingerprint, with_options
from research.pocket.settings import rate_at
from research.pocket.team import Team, team
from research.pocket.tokenizer import load_tokenizer
from research.pocket.word_vectors import token_vectors
from semgrad_guard.files import atomic_write

READER = DATA / "reader.safetensors"
MEANING = 95  # dimensions of the word vectors
VECTORS = 3.0  # how loud they are next to the trained dimensions


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Everything that decides the reader (with the tokenizer, the data files, the versions and the processor)."""

    steps: int = 4800
    batch: int = 32  # questions of one worker in a step
    rate: float = 6e-3  # of Muon
    table_rate: float = 1 / 3  # of it: AdamW's, for embeddings and single vectors
    decay: float = 0.1
    seed: int = 0
    workers: int = 2
    compiled: bool = True
    start: str = ""  # the first digits of its file's sha256


def build_reader(tokenizer: Tokenizer, seed: int) -> Reader:
    torch.manual_seed(seed)
    known = torch.zeros(tokenizer.get_vocab_size(), MEANING)
    for token, vector in token_vectors(tokenizer, MEANING).items():
        known[token] = VECTORS * vector
    return Reader(known)


def save_reader(reader: Reader, file: Path, settings: ReaderSettings) -> None:
    """The file for `load_reader`, in float32, with the settings."""
    state = {name: p.contiguous() for name, p in reader.state_dict().items()}
    atomic_write(file, partial(save_file, state, metadata={"settings": json.dumps(asdict(settings))}))


def load_reader(file: Path, tokenizer: Tokenizer) -> Reader:
    """A trained reader."""
    reader = build_reader(tokenizer, 0)
    reader.load_state_dict(load_file(file))
    return reader


class ReaderRun(TrainingRun):
    """The reader's training. It can be stopped between chunks of its material."""

    FILE = "reader.pt"
    settings: ReaderSettings

    def __init__(
        self,
        settings: ReaderSettings,
        output: Path | None,
        tokenizer: Tokenizer,
        team: Team | None = None,
        *,
        start: Path | None = None,
    ) -> None:
        super().__init__(replace(settings, start=fingerprint(start) if start else ""), output, team)
        self.reader = load_reader(start, tokenizer) if start else build_reader(tokenizer, settings.seed)
        self.forward: Any = torch.compile(self.reader, dynamic=True) if settings.compiled else self.reader
        self.parameters = list(self.reader.parameters())
        matrices = [p for p in self.reader.layers.parameters() if p.ndim == 2]
        others = [p for p in self.parameters if not any(p is m for m in matrices)]
        self.optimizers = [
            Muon(matrices, settings.rate, settings.decay),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
        ]
        self.material = Material(tokenizer, seed=settings.seed + 1, rank=self.team.rank, size=settings.batch)

    def state(self) -> dict[str, Any]:
        return {"reader": self.reader.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}

    def restore(self, state: dict[str, Any]) -> None:
        self.reader.load_state_dict(state["reader"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)

    def one_step(self, questions: Questions) -> float:
        """One step of the whole team; this member's mean loss."""
        rows = len(questions.ids)
        loss = losses(self.forward(questions), questions) / (rows * self.team.size)
        loss.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.team.add(gradients)
        torch.nn.utils.clip_grad_norm_(self.parameters, 2.0)
        rate = self.settings.rate * rate_at(self.step, self.settings.steps)
        for optimizer, share in zip(self.optimizers, (1.0, self.settings.table_rate), strict=True):
            optimizer.param_groups[0]["lr"] = share * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item() * self.team.size

    @torch.no_grad()
    def accuracy(self, sets: list[Questions]) -> tuple[float, float]:
        """Shares of answers that begin right, and that are right word for word; each member reads a part."""
        begun = exact = rows = 0.0
        for questions in sets[self.team.rank :: self.team.size]:
            scores = self.reader(questions)
            first, whole = right(scores.begins, scores.over, questions)
            begun, exact, rows = begun + first, exact + whole, rows + len(questions.ids)
        begun, exact, rows = self.team.total(begun, exact, rows)
        return begun / max(rows, 1), exact / max(rows, 1)

    def train(self, *, every: int = 100, watch: int = 400) -> None:
        """Train to the end, or until stopped; the checkpoint is written every `watch` steps and at the end."""
        self.resume()
        settings, held_out = self.settings, self.material.held_out()
        began, first, loss = time.time(), self.step, 0.0
        while self.step < settings.steps and not self.team.total(self.stopping)[0]:
            for questions in self.material.chunk(self.step // BATCHES)[: settings.steps - self.step]:
                loss += (self.one_step(questions) - loss) * max(0.02, 1 / (self.step - first))
                if self.step % every == 0:
                    left = (time.time() - began) / (self.step - first) * (settings.steps - self.step)
                    self.say(f"{self.step}/{settings.steps} loss {loss:.3f}, {left / 60:.1f} min left")
            if self.step % watch == 0:
                shares = {name: self.accuracy(sets) for name, sets in held_out.items()}
                self.say("".join(f"{name}: begun {a:.3f}, exact {b:.3f}  " for name, (a, b) in shares.items()))
                self.keep()
        self.keep()


def _work(members: Team, settings: ReaderSettings, output: Path, tokenizer: str, start: Path | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one tells them when to stop
    ReaderRun(settings, output, Tokenizer.from_str(tokenizer), members, start=start).train()


def train_reader(settings: ReaderSettings, output: Path, tokenizer: Tokenizer, start: Path | None = None) -> ReaderRun:
    """Train with a team of workers; the result may have been stopped before its last step."""
    with team(settings.workers, _work, (settings, output, tokenizer.to_str(), start)) as members:
        run = ReaderRun(settings, output, tokenizer, members, start=start)
        signal.signal(signal.SIGINT, run.stop)
        run.train()
    return run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--start", type=Path, help="a reader to continue from")
    add_options(parser, ReaderSettings())
    options = parser.parse_args(argv)
    settings: ReaderSettings = with_options(ReaderSettings(), options)
    run = train_reader(settings, options.output, load_tokenizer(), options.start)
    if run.step < settings.steps:
        print(f"stopped at step {run.step}; run the same command again to resume", file=sys.stderr)
        return 130
    save_reader(run.reader, options.output / READER.name, run.settings)
    print(f"saved in {options.output / READER.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
