"""The places in the residual stream of the Llama that a reader is written into, and the prompt measured on."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from research.pocket.frames import bank, plain
from research.pocket.llama import plain_llama
from research.pocket.reader.codes import SIGNS, SIZE, newlines
from research.pocket.reader.layout import HEAD, INNER, LAYERS, THETA, WIDTH
from research.pocket.reader.questions import MARK, Prompt, prompts
from research.pocket.tokenizer import END, START
from research.pocket.word_vectors import SPACE

OWN = WIDTH  # the token's code
PREVIOUS = OWN + SIZE  # the code of the token before
BEGINNING = PREVIOUS + SIZE  # the code of the token where the answer begins that this token gives away
SINK = BEGINNING + SIZE  # of a token that heads look at when they have nothing to look at
MARKED, FLAG, ENDED = SINK + 1, SINK + 2, SINK + 3  # the passage's mark; "it comes before"; "the answer has ended"
FIRST = SINK + 4  # of the very first token (of a turn's role, too): tells its sink from later ones
HIDDEN = SINK + 5
HEADS = 4
FACTS, LAST = (
    len(LAYERS),
    len(LAYERS) + 1,
)  # the layers after the reader's: one that learns facts, one that also answers


@dataclass(frozen=True, slots=True)
class Special:
    """Token ids that the circuits know by name. `silent` ones have no code: nothing matches them or copies them."""

    sink: int  # the beginning of every turn
    end: int
    mark: int
    silent: tuple[int, ...]


def special(tokenizer: Tokenizer) -> Special:
    number = tokenizer.get_vocab()
    start, end = number[START], number[END]
    return Special(start, end, number[SPACE + MARK], (start, end, *newlines(tokenizer)))


def empty_llama(vocabulary: int) -> LlamaForCausalLM:
    """A Llama as wide and as deep as the circuits need: every matrix is zero."""
    model = plain_llama(
        vocabulary,
        width=HIDDEN,
        inner=INNER,
        layers=LAST + 1,
        heads=HEADS,
        groups=HEADS,
        head=HEAD,
        theta=THETA,
        seed=0,
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.zero_()
    return model


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt on which the circuits' loudness is measured."""

    ids: Tensor
    mark: int

    @property
    def passage(self) -> slice:
        return slice(self.mark + 2, None)

    @property
    def question(self) -> slice:
        return slice(4, self.mark - 1)


def sample(tokenizer: Tokenizer) -> Sample:
    """The longest prompt of some held-out frames."""
    random = Random(7)
    found: list[Prompt] = [p for frame in bank()[1][:30] for p in prompts(tokenizer, plain(frame, random))]
    longest = max(found, key=lambda prompt: len(prompt.ids))
    return Sample(torch.tensor([longest.ids]), longest.mark)


@dataclass(frozen=True, slots=True)
class Seen:
    """A layer's view of the sample, (T, HIDDEN), normed: how loud each thing arrives.

    `loudness`, (T,): the norm's divisor.
    """

    states: Tensor
    loudness: Tensor
    sample: Sample

    @property
    def passage(self) -> Tensor:
        return self.states[self.sample.passage]

    @property
    def question(self) -> Tensor:
        return self.states[self.sample.question]

    @property
    def sink(self) -> Tensor:
        return self.states[0]

    @property
    def constant(self) -> float:
        """How loud dimension 0 arrives in the passage."""
        return self.passage[:, 0].mean().item()

    @property
    def flag(self) -> float:
        """How loud the flag arrives in the passage."""
        return self.passage[:, FLAG].mean().item()

    def code(self, place: int) -> float:
        """The mean loudness of a code's signs in the passage."""
        return self.passage[:, place : place + SIGNS].abs().mean().item()


@torch.no_grad()
def residual(model: LlamaForCausalLM, sample: Sample, layer: int) -> Tensor:
    """(T, HIDDEN): the stream before a layer (after the last norm for one beyond the last)."""
    states = model(sample.ids, output_hidden_states=True).hidden_states
    if states is None:
        raise RuntimeError("the model gave no hidden states")
    return states[layer][0]


def seen(model: LlamaForCausalLM, sample: Sample, layer: int) -> Seen:
    stream = residual(model, sample, layer)
    loudness = stream.pow(2).mean(-1).sqrt()
    return Seen(stream / loudness[:, None], loudness, sample)
