"""Small held-out sets to watch while training.

The held-out tenth of the frames and the written development passages are there for making choices; the hand-written
natural passages never are.
"""

from __future__ import annotations

from random import Random

import torch
from transformers import LlamaForCausalLM

from research.pocket.batches import Item, collate, logits
from research.pocket.corpus import Example
from research.pocket.frames import Frame, plain
from research.pocket.reader.material import development
from research.pocket.reader.questions import bare
from research.pocket.reading import READING_SHAPE
from research.pocket.world import KNOWN, of_split, question


def probes(seed: int) -> dict[str, list[Example]]:
    """Held-out frames, written passages, and known facts in held-out wordings."""
    random = Random(seed)

    def examples_of(frames: tuple[Frame, ...]) -> list[Example]:
        readings = [plain(frame, random) for frame in frames]
        return [(READING_SHAPE.messages(r.passage, q), bare(a)) for r in readings for q, a in r.questions]

    facts = [f for f in of_split(KNOWN) if not f.several][::4]
    known: list[Example] = [([{"role": "user", "content": question(f, 0, held_out=True)}], f.answers[0]) for f in facts]
    return {name: examples_of(chosen) for name, chosen in development().items()} | {"known facts": known}


@torch.no_grad()
def exact(model: LlamaForCausalLM, probe: list[Item]) -> tuple[int, int]:
    """How many answers greedy decoding would give word for word, and of how many."""
    right = 0
    for item in probe:
        found, wanted = logits(model, collate([item]))
        right += int((found.argmax(-1) == wanted).all())
    return right, len(probe)
