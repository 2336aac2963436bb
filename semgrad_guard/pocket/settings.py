"""What decides the weights: the settings, and the tokenizer and the first weights that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from semgrad_guard.pocket.copying import set_copying
from semgrad_guard.pocket.corpus import Corpus
from semgrad_guard.pocket.llama import plain_llama
from semgrad_guard.pocket.tokenizer import VOCABULARY, train_tokenizer
from semgrad_guard.pocket.word_vectors import common_words, token_vectors
from semgrad_guard.pocket.world import UNKNOWN, question, world


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the weights (with the data files, the versions and the processor)."""

    steps: int = 12000
    tokens: int = 6144  # a step
    warm_up: int = 250  # steps on repeated random tokens, at most
    seed: int = 0
    workers: int = 2  # processes of one thread
    rate: float = 3e-3
    decay: float = 0.1
    width: int = 192
    layers: int = 6
    heads: int = 6
    groups: int = 6
    inner: int = 512
    vocabulary: int = VOCABULARY
    pointing: float = 0.3  # weight of the loss of heads that should look at what the answer copies
    embedding_rate: float = 0.2  # of `rate`: what the word vectors say should not be unlearned


PERIOD = 4000  # steps in which a rare fact is shown eight times
COMMON_WORDS_SHOWN = 60  # times, to the tokenizer
NUMBERS = [f"{n:0{width}}" for width in (1, 2, 3) for n in range(10**width)]
NUMBERS_SHOWN = 120
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
        yield from [" ".join(common_words())] * COMMON_WORDS_SHOWN
        yield from [" ".join(f"{n} x{n}" for n in NUMBERS)] * NUMBERS_SHOWN

    return train_tokenizer(texts(), settings.vocabulary)


def build_model(settings: Settings, tokenizer: Tokenizer | None = None) -> LlamaForCausalLM:
    """A plain Llama with an untied head, initialised from the seed."""
    model = plain_llama(
        settings.vocabulary,
        width=settings.width,
        inner=settings.inner,
        layers=settings.layers,
        heads=settings.heads,
        groups=settings.groups,
        head=settings.width // settings.heads,
        theta=10000.0,
        seed=settings.seed,
    )
    set_copying(model, None if tokenizer is None else token_vectors(tokenizer, settings.width // 2 - 1))
    return model


def rate_at(step: int, settings: Settings) -> float:
    """A short rise, level to the middle, then down to almost nothing."""
    progress = step / settings.steps
    fall = 1.0 if progress < 0.5 else max(0.01, 2 * (1 - progress))
    return settings.rate * min(1.0, (step + 1) / 60) * fall
