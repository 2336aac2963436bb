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
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from semgrad_guard.pocket import network
from semgrad_guard.pocket.batches import Item, collate, items, micro_batches, step_items
from semgrad_guard.pocket.copying import set_copying
from semgrad_guard.pocket.corpus import MIX, Corpus, Group
from semgrad_guard.pocket.frames import bank, sample
from semgrad_guard.pocket.muon import Muon
from semgrad_guard.pocket.network import Batch
from semgrad_guard.pocket.reading import READING_SHAPES
from semgrad_guard.pocket.tokenizer import VOCABULARY, save_tokenizer, train_tokenizer
from semgrad_guard.pocket.world import KNOWN, UNKNOWN, of_split, question, world


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the weights (with the data files, the versions and the processor)."""

    steps: int = 3000
    rare_steps: int = 2200  # the rare facts' exposures are spread over so many
    tokens: int = 5120  # a step
    warm_up: int = 300  # steps on repeated random tokens, at most
    seed: int = 0
    threads: int = 1
    rate: float = 3e-3
    decay: float = 0.1
    width: int = 192
    layers: int = 6
    heads: int = 6
    groups: int = 3
    inner: int = 512
    vocabulary: int = VOCABULARY


GROUPS_A_STEP = 32.0  # of 4,096 tokens, measured: spreads the rare facts over the training


def build_tokenizer(settings: Settings, samples: int = 9000) -> Tokenizer:
    """Learn the merges from the training mix and from every entity's name (an unknown fact's entity has a name too)."""
    corpus = Corpus(settings.seed + 1000, samples)
    stream = iter(corpus)

    def texts() -> Iterator[str]:
        for fact in world():
            if fact.split != UNKNOWN:
                yield from fact.answers
            yield from (fact.entity, question(fact, 0))
        for _ in range(samples):
            for messages, answer in next(stream)[:2]:
                yield "user\nassistant\nsystem\n" + "\n".join(m["content"] for m in messages) + "\n" + answer

    return train_tokenizer(texts(), settings.vocabulary)


def build_model(settings: Settings) -> LlamaForCausalLM:
    """A plain Llama with an untied head, initialised from the seed."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.groups,
        head_dim=settings.width // settings.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = LlamaForCausalLM(config)
    set_copying(model)
    for p in model.parameters():
        p.requires_grad_(p.ndim == 2)  # the norms' scales stay at one
    return model


class Optimizers:
    """Muon for the layers' matrices, AdamW for embeddings and head; one rate for both."""

    def __init__(self, model: LlamaForCausalLM, settings: Settings) -> None:
        self.model, self.settings = model, settings
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        inner = [p for n, p in named if "layers" in n]
        outer = [p for n, p in named if "layers" not in n]
        self.all = [
            Muon(inner, settings.rate, settings.decay),
            torch.optim.AdamW(outer, lr=settings.rate, betas=(0.9, 0.98), weight_decay=settings.decay),
        ]

    def step(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def repeated(random: Random, settings: Settings, longest: int) -> Batch:
    """Random tokens, a few others, then the first ones again from somewhere on: predict the repetition."""
    generator = torch.Generator().manual_seed(random.getrandbits(40))
    length = random.randint(6, longest)
    start, gap = random.randrange(length // 2), random.randrange(4)
    repeat = min(length - start, 16)
    rows = max(8, 2048 // (length + gap + repeat))
    string = torch.randint(3, settings.vocabulary, (rows, length + gap), generator=generator)
    ids = torch.cat([string, string[:, start : start + repeat]], 1)
    chosen = torch.arange(length + gap, length + gap + repeat - 1).expand(rows, -1)
    positions = torch.arange(ids.shape[1]).expand(rows, -1)
    targets = ids.gather(1, chosen + 1)
    return Batch(ids, positions, torch.zeros_like(ids), chosen, targets)


def warm_up(model: LlamaForCausalLM, optimizers: Optimizers, settings: Settings) -> None:
    """Copying first: until nine in ten tokens of a repetition are right, on short strings and then on longer ones."""
    random, recent, longest, began = Random(settings.seed + 7), 0.0, 24, time.time()
    for step in range(settings.warm_up):
        batch = repeated(random, settings, longest)
        loss, right = network.loss(model, batch)
        (loss / batch.targets.numel()).backward()
        optimizers.step(settings.rate * min(1.0, (step + 1) / 40))
        recent = 0.9 * recent + 0.1 * right.item() / batch.targets.numel()
        if step % 50 == 49:
            print(f"warm-up {step + 1}: copying {recent:.2f}, {time.time() - began:.0f} s", flush=True)
        if recent > 0.9:
            if longest == 64:
                return
            longest, recent = 64, 0.0


def probes(settings: Settings) -> dict[str, list[Group]]:
    """Small held-out sets to watch: held-out frames, and known facts in held-out wordings."""
    random = Random(settings.seed + 99)
    read = []
    for frame in bank()[1]:
        reading = sample(frame, random, swap=0.0, drop=0.0)
        if reading.questions:
            chosen = random.choice([s for s in READING_SHAPES if not s.question_first])
            read.append([(chosen.messages(reading.passage, q), a) for q, a in reading.questions])
    facts = [f for f in of_split(KNOWN) if not f.several][::4]
    known: list[Group] = [[([{"role": "user", "content": question(f, 0, held_out=True)}], f.answers[0])] for f in facts]
    return {"held-out frames": read, "known facts": known}


@torch.no_grad()
def exact(model: LlamaForCausalLM, probe: list[Item]) -> float:
    """The share of answers that greedy decoding would give word for word."""
    right = total = 0
    for item in probe:
        batch = collate([item])
        hits = (network.logits(model, batch).argmax(-1) == batch.targets)[0].tolist()
        for answer in item[1]:
            right += all(hits[: len(answer)])
            total += 1
            hits = hits[len(answer) :]
    return right / max(total, 1)


def rate_at(step: int, settings: Settings) -> float:
    """A short rise, level to the middle, then down to almost nothing."""
    progress = step / settings.steps
    fall = 1.0 if progress < 0.5 else max(0.01, 2 * (1 - progress))
    return settings.rate * min(1.0, (step + 1) / 60) * fall


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
        state = torch.load(self.checkpoint, weights_only=False)
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
