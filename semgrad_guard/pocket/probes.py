"""Small held-out sets to watch while training.

The held-out tenth of the frames is the development set: choices are made on it, never on the hand-written passages.
"""

from __future__ import annotations

from random import Random

import torch
from transformers import LlamaForCausalLM

from semgrad_guard.pocket import network
from semgrad_guard.pocket.batches import Item, collate
from semgrad_guard.pocket.corpus import Group
from semgrad_guard.pocket.frames import bank, plain
from semgrad_guard.pocket.reading import READING_SHAPES
from semgrad_guard.pocket.settings import Settings
from semgrad_guard.pocket.world import KNOWN, of_split, question


def probes(settings: Settings) -> dict[str, list[Group]]:
    """Small held-out sets to watch: held-out frames, and known facts in held-out wordings."""
    random = Random(settings.seed + 99)
    read = []
    for frame in bank()[1]:
        reading = plain(frame, random)
        if reading.questions:
            chosen = random.choice([s for s in READING_SHAPES if not s.question_first])
            read.append([(chosen.messages(reading.passage, q), a) for q, a in reading.questions])
    facts = [f for f in of_split(KNOWN) if not f.several][::4]
    known: list[Group] = [[([{"role": "user", "content": question(f, 0, held_out=True)}], f.answers[0])] for f in facts]
    return {"held-out frames": read, "known facts": known}


@torch.no_grad()
def exact(model: LlamaForCausalLM, probe: list[Item]) -> tuple[int, int]:
    """How many answers greedy decoding would give word for word, and of how many."""
    right = total = 0
    for item in probe:
        batch = collate([item])
        hits = (network.logits(model, batch).argmax(-1) == batch.targets)[0].tolist()
        for answer in item[1]:
            right += all(hits[: len(answer)])
            total += 1
            hits = hits[len(answer) :]
    return right, total
