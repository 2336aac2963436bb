"""Write `data/tokenizer.json` (a developer's command; the file is committed, and every training uses it).

    python -m research.pocket.make_tokenizer

The merges come from the Llama's training texts, so they change with these, and with them the meaning of every
weight: after this command everything has to be trained anew. The committed file was made from the mix of 52d115b.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer

from research.pocket.corpus import Corpus
from research.pocket.tokenizer import FILE, VOCABULARY, train_tokenizer
from research.pocket.word_vectors import common_words
from research.pocket.world import UNKNOWN, question, world

EXAMPLES = 18_000
COMMON_WORDS_SHOWN = 60  # times
NUMBERS = [f"{n:0{width}}" for width in (1, 2, 3) for n in range(10**width)]
NUMBERS_SHOWN = 120


def texts(examples: int, seed: int = 1000) -> Iterator[str]:
    """The training mix, every entity's name (an unknown fact's entity has one too), common words and numbers."""
    stream = iter(Corpus(seed, examples))
    for fact in world():
        if fact.split != UNKNOWN:
            yield from fact.answers
        yield from (fact.entity, question(fact, 0))
    for _ in range(examples):
        messages, answer = next(stream)
        yield "user\nassistant\nsystem\n" + "\n".join(m["content"] for m in messages) + "\n" + answer
    yield from [" ".join(common_words())] * COMMON_WORDS_SHOWN
    yield from [" ".join(f"{n} x{n}" for n in NUMBERS)] * NUMBERS_SHOWN


def build_tokenizer(examples: int = EXAMPLES, size: int = VOCABULARY) -> Tokenizer:
    return train_tokenizer(texts(examples), size)


if __name__ == "__main__":
    build_tokenizer().save(str(FILE))
