"""Copying before reading: the optimizers' first work is on random tokens that repeat."""

from __future__ import annotations

import time
from random import Random

import torch
from transformers import LlamaForCausalLM

from semgrad_guard.pocket import network
from semgrad_guard.pocket.muon import Optimizers
from semgrad_guard.pocket.network import Batch
from semgrad_guard.pocket.settings import Settings
from semgrad_guard.pocket.team import Team


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


def warm_up(model: LlamaForCausalLM, optimizers: Optimizers, settings: Settings, team: Team) -> None:
    """Copying first: until nine in ten tokens of a repetition are right, on short strings and then on longer ones."""
    random, recent, longest, began = Random(settings.seed + 7 + team.rank), 0.0, 24, time.time()
    for step in range(settings.warm_up):
        batch = repeated(random, settings, longest)
        loss, _, right = network.loss(model, batch)
        loss.backward()
        hits, count = team.total(right.item(), batch.targets.numel())
        optimizers.share(team, 1 / count)
        optimizers.step(settings.rate * min(1.0, (step + 1) / 40))
        recent = 0.9 * recent + 0.1 * hits / count
        if step % 50 == 49 and team.rank == 0:
            print(f"warm-up {step + 1}: copying {recent:.2f}, {time.time() - began:.0f} s", flush=True)
        if recent > 0.9:
            if longest == 64:
                return
            longest, recent = 64, 0.0
