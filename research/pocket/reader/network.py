"""The trained reader: where in a prompt does the answer begin, and after which token does it end?

A causal reader has one handicap: in "Mara founded the firm" it meets the answer before it knows that it is one
for. So pointing is done in two steps, as two layers of a Llama can: every token may give the answer away ("founded"),
and tells by its `back` head where that answer began ("Mara"). Here are its weights; `to_llama` makes a model of them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from research.pocket.reader.layout import CONSTANT, HEAD, INNER, LAYERS, LOUD, WIDTH, Head, heads
from research.pocket.word_vectors import token_vectors

READER = Path(__file__).parents[1] / "data" / "reader.safetensors"
OWN = 33  # dimensions of an embedding that training was free to choose
MEANING = 95  # dimensions of the word vectors
VECTORS = 3.0  # how loud they are next to the trained dimensions


class Layer(nn.Module):
    """Attention by the heads of `layout`, then a SwiGLU; nothing writes into dimension 0."""

    def __init__(self, number: int, kinds: tuple[Head, ...]) -> None:
        super().__init__()
        self.heads, self.number = kinds, number
        speaking = len(kinds) - (kinds[-1].kind == "back")
        self.learnt = [i for i, head in enumerate(kinds) if not self.fixed(head)]
        self.value = nn.Linear(WIDTH, speaking * HEAD, bias=False)
        self.out = nn.Linear(speaking * HEAD, WIDTH - 1, bias=False)
        if self.learnt:
            self.query = nn.Linear(WIDTH, len(self.learnt) * HEAD, bias=False)
            self.key = nn.Linear(WIDTH, len(self.learnt) * HEAD, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH - 1, bias=False)

    def fixed(self, head: Head) -> bool:
        """Does it look where it looks without having learnt it?"""
        return head.kind == "same" or (head.kind == "before" and self.number == 0)


class Reader(nn.Module):
    """`known`: each token's known meaning, (V, any); it does not change."""

    known: Tensor

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("known", known, persistent=False)
        self.own = nn.Embedding(len(known), OWN)
        self.inward = nn.Linear(known.shape[1] + OWN, WIDTH - 1)
        self.flag = nn.Parameter(torch.zeros(WIDTH - 1))  # after the passage's mark
        self.layers = nn.ModuleList([Layer(number, heads(layer)) for number, layer in enumerate(LAYERS)])
        self.begins = nn.Linear(WIDTH, 1, bias=False)
        self.ended = nn.Linear(WIDTH, 1, bias=False)
        self.over = nn.Linear(WIDTH, 1)

    def embed(self, ids: Tensor) -> Tensor:
        """(..., WIDTH), all of one loudness, or heads that use the constant would see it vary from token to token."""
        x = self.inward(torch.cat([self.known[ids], self.own(ids)], -1))
        x = LOUD * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.cat([torch.full_like(x[..., :1], CONSTANT), x], -1)


def load_reader(file: Path, tokenizer: Tokenizer) -> Reader:
    """The trained reader of a file."""
    known = torch.zeros(tokenizer.get_vocab_size(), MEANING)
    for token, vector in token_vectors(tokenizer, MEANING).items():
        known[token] = VECTORS * vector
    reader = Reader(known)
    reader.load_state_dict(load_file(file))
    return reader
