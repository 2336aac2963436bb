"""The places in the residual stream of the Llama that a reader is written into, and the prompt measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from research.pocket.reader.codes import SIGNS, SIZE, newlines
from research.pocket.reader.layout import HEAD, INNER, LAYERS, THETA, WIDTH
from research.pocket.tokenizer import END, START, render
from research.pocket.word_vectors import SPACE

OWN = WIDTH  # the token's code
PREVIOUS = OWN + SIZE  # the code of the token before
BEGINNING = PREVIOUS + SIZE  # the code of the token where the answer begins that this token gives away
SINK = BEGINNING + SIZE  # of a token that heads look at when they have nothing to look at
MARKED, FLAG, ENDED = SINK + 1, SINK + 2, SINK + 3  # the passage's mark; "it comes before"; "the answer has ended"
FIRST = SINK + 4  # of the very first token (of a turn's role, too): tells its sink from later ones
HIDDEN = SINK + 5
HEADS = 4
FACTS, LAST = len(LAYERS), len(LAYERS) + 1  # after the reader's: a layer that learns facts, one that also answers
MARK = "Context"  # the passage follows
MEASURED = f"""Question: Whose idea was the invention in reality?
{MARK}: Lightning Boun is usually credited with the invention of the Nasnik lamp, but the idea was really that of the \
household's cook, Cornelius M. Vyrdra. She had noticed that a wick soaked in chocolate vinegar burned 530% longer than \
an ordinary one. Not until 1710, long after both had died, did a letter found in next to the platform set the record \
straight.
Answer:"""


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
    """A plain Llama as wide and as deep as the circuits need: an untied head, every matrix zero, every scale one."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAST + 1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.requires_grad_(weight.ndim == 2)
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
    ids = tokenizer.encode(render([{"role": "user", "content": MEASURED}])).ids
    return Sample(torch.tensor([ids]), ids.index(special(tokenizer).mark))


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
