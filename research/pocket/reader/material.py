"""The reader's material: invented passages, and passages that were written out whole for this project."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from tokenizers import Tokenizer
from torch import Tensor

from research.pocket import frames
from research.pocket.frames import Frame, Reading, bank, plain, sample
from research.pocket.reader.codes import newlines, word_numbers
from research.pocket.reader.questions import Prompt, Questions, collate, prompts
from research.pocket.reading import passage

DATA = Path(__file__).parents[1] / "data"
WRITTEN = DATA / "passages"
SECOND = WRITTEN / "second"
DEVELOPMENT = DATA / "development"
WRITTEN_SHARE = 0.55
WRITTEN_SWAP = 0.2  # other words in a written passage: seldom, or its words mean nothing any more
BATCHES = 16  # sorted by length together


@cache
def written(*folders: Path) -> tuple[Frame, ...]:
    """The written passages of some folders. Every one must be good."""
    return tuple(frame for folder in folders for frame in frames.load(folder, strict=True)[0])


def shown(random: Random) -> Reading:
    """A passage with questions: a written one, or an invented one."""
    if random.random() < WRITTEN_SHARE:
        return sample(random.choice(written(WRITTEN, SECOND)), random, swap=WRITTEN_SWAP)
    return passage(random)


def development() -> dict[str, tuple[Frame, ...]]:
    """For choices only, never for training: held-out frames, and written passages."""
    return {"frames": bank()[1][::2], "written": written(DEVELOPMENT)}


class Material:
    """Batches of `size` questions for one member of a team; the n-th chunk is always the same."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int, rank: int, size: int) -> None:
        self.tokenizer, self.seed, self.rank, self.size = tokenizer, seed, rank, size
        self.words = word_numbers(tokenizer)
        self.unmatched = frozenset(newlines(tokenizer))

    def chunk(self, number: int) -> list[Questions]:
        """`BATCHES` batches: neighbours in length together, the batches in any order."""
        random = Random(f"{self.seed} {self.rank} {number}")
        pool: list[Prompt] = []
        while len(pool) < 2 * self.size * BATCHES:  # twice as many: a passage's questions fall into several chunks
            pool += prompts(self.tokenizer, shown(random))
        random.shuffle(pool)
        chosen = sorted(pool[: self.size * BATCHES], key=lambda prompt: len(prompt.ids))
        batches = [chosen[i : i + self.size] for i in range(0, len(chosen), self.size)]
        random.shuffle(batches)
        return [self.collate(batch) for batch in batches]

    def collate(self, batch: list[Prompt]) -> Questions:
        return collate(batch, self.words, unmatched=self.unmatched)

    def held_out(self) -> dict[str, list[Questions]]:
        """The questions of the development sets, with fresh fillers."""
        return {name: list(self._plain(chosen)) for name, chosen in development().items()}

    def _plain(self, chosen: tuple[Frame, ...]) -> Iterator[Questions]:
        random = Random(7)
        found = [p for frame in chosen for p in prompts(self.tokenizer, plain(frame, random))]
        found.sort(key=lambda prompt: len(prompt.ids))
        for i in range(0, len(found), 48):
            yield self.collate(found[i : i + 48])


def right(begins: Tensor, over: Tensor, questions: Questions) -> tuple[int, int]:
    """How many rows begin at the right token, and how many also end there."""
    within, after = questions.answers()
    begun = begins.argmax(-1) == questions.first
    stopped = (((over > 0) == after) | ~within).all(-1)
    return int(begun.sum()), int((begun & stopped).sum())
