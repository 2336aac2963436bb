"""The reader: where in a prompt does the answer begin, and after which token does it end?

A causal reader has one handicap: in "Mara founded the firm" it meets the answer before it knows that it is one
for. So pointing is done in two steps, as two layers of a Llama can: every token may give the answer away ("founded"),
and tells by its `back` head where that answer began ("Mara").
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.pocket.reader.layout import CONSTANT, HEAD, INNER, LAYERS, LOUD, THETA, WIDTH, Head, heads
from research.pocket.reader.questions import Questions

FREQUENCIES = 1 / (THETA ** (torch.arange(0, HEAD, 2) / HEAD))
OWN = 33  # dimensions of an embedding that training is free to choose
SHARP = (30.0, 25.0, 10.0)  # how strongly the fastest pairs of a head prefer one place
NORMED_CONSTANT = (0.4, 0.125, 0.072, 0.057, 0.047, 0.042, 0.037)  # about the constant after a layer's norm
NEVER = -1e4  # a score that the softmax makes nothing of


class Scores(NamedTuple):
    """(rows, T): log-probability that the answer begins here; that it ended before here, as logits over the
    places and as a yes or no of its own."""

    begins: Tensor
    ended: Tensor
    over: Tensor


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions, (..., T, HEAD)."""
    angles = torch.arange(x.shape[-2])[:, None] * FREQUENCIES
    cos, sin = angles.cos(), angles.sin()
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def look_before(query: Tensor, key: Tensor, reach: int, constant: float) -> None:
    """Let a head, (HEAD, any), look `reach` places back: the constant against itself, turned by so many places."""
    query.zero_()
    key.zero_()
    for pair, strength in enumerate(SHARP):
        loud, angle = (strength * HEAD**0.5) ** 0.5 / constant, -reach * FREQUENCIES[pair].item()
        key[pair, 0] = loud
        query[pair, 0], query[pair + HEAD // 2, 0] = loud * math.cos(angle), loud * math.sin(angle)


def _prefer_near(query: Tensor, key: Tensor, reach: int) -> None:
    """Let a head (HEAD, WIDTH) begin with a window: the constant, through pairs that turn about once in it."""
    best = min(range(HEAD // 2), key=lambda i: abs(math.log(FREQUENCIES[i].item() * reach / 0.45)))
    loud = 1 / (reach * FREQUENCIES[best].item()) ** 2
    for pair, strength in ((best, loud), (best + 1, 1.5)):
        query[pair, 0] = key[pair, 0] = (strength * HEAD**0.5) ** 0.5 / 1.5


class Layer(nn.Module):
    """Attention by the heads of `layout`, then a SwiGLU; nothing writes into dimension 0."""

    def __init__(self, number: int, kinds: tuple[Head, ...]) -> None:
        super().__init__()
        self.heads, self.number = kinds, number
        self.back = kinds[-1].kind == "back"
        speaking = len(kinds) - self.back
        self.learnt = [i for i, head in enumerate(kinds) if not self.fixed(head)]
        self.value = nn.Linear(WIDTH, speaking * HEAD, bias=False)
        self.out = nn.Linear(speaking * HEAD, WIDTH - 1, bias=False)
        if self.learnt:
            self.query = nn.Linear(WIDTH, len(self.learnt) * HEAD, bias=False)
            self.key = nn.Linear(WIDTH, len(self.learnt) * HEAD, bias=False)
            with torch.no_grad():
                for place, i in enumerate(self.learnt):
                    rows = slice(place * HEAD, (place + 1) * HEAD)
                    query, key, reach = self.query.weight[rows], self.key.weight[rows], kinds[i].reach
                    if kinds[i].kind == "before":
                        look_before(query, key, reach, NORMED_CONSTANT[number])
                    elif reach:
                        _prefer_near(query, key, reach)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH - 1, bias=False)

    def fixed(self, head: Head) -> bool:
        """Does it look where it looks without having learnt it?"""
        return head.kind == "same" or (head.kind == "before" and self.number == 0)

    def forward(self, x: Tensor, questions: Questions, extra: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The stream after this layer, and the attention (rows, T, T) of a `back` head."""
        mixed, back = self._mixed(rms_norm(x), questions)
        x = x if extra is None else x + extra
        x = x + _but_the_constant(self.out(mixed))
        gate, up = self.gate_up(rms_norm(x)).chunk(2, -1)
        return x + _but_the_constant(self.down(F.silu(gate) * up)), back

    def _mixed(self, normed: Tensor, questions: Questions) -> tuple[Tensor, Tensor | None]:
        """All heads' outputs, concatenated."""
        rows, length, _ = normed.shape
        values = self.value(normed).view(rows, length, -1, HEAD)
        mixed: list[Tensor] = list(values.unbind(2))
        for i, head in enumerate(self.heads):
            if head.kind == "before" and self.fixed(head):
                mixed[i] = F.pad(mixed[i], (0, 0, head.reach, 0))[:, :length]
            elif head.kind == "same":
                mixed[i] = torch.bmm(questions.same, mixed[i])
        if not self.learnt:
            return torch.cat(mixed, -1), None
        query, key = (
            rotate(project(normed).view(rows, length, -1, HEAD).transpose(1, 2)) for project in (self.query, self.key)
        )
        back = None
        if self.back:
            scores = query[:, -1] @ key[:, -1].mT / HEAD**0.5
            back = scores.masked_fill(~questions.seen, NEVER).softmax(-1)
            query, key = query[:, :-1], key[:, :-1]
        speaking = self.learnt[: query.shape[1]]
        masks = [questions.seen_question if self.heads[i].kind == "question" else questions.seen for i in speaking]
        found = F.scaled_dot_product_attention(
            query, key, values[:, :, speaking].transpose(1, 2), attn_mask=torch.stack(masks, 1)
        )
        for place, i in enumerate(speaking):
            mixed[i] = found[:, place]
        return torch.cat(mixed, -1), back


def _but_the_constant(x: Tensor) -> Tensor:
    return F.pad(x, (1, 0))


class Reader(nn.Module):
    """`known`: each token's known meaning, (V, any); it does not change."""

    known: Tensor

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("known", known, persistent=False)
        self.own = nn.Embedding(len(known), OWN)
        nn.init.normal_(self.own.weight, std=0.3)
        self.inward = nn.Linear(known.shape[1] + OWN, WIDTH - 1)
        self.flag = nn.Parameter(torch.randn(WIDTH - 1) * 0.3)  # after the passage's mark
        self.layers = nn.ModuleList([Layer(number, heads(layer)) for number, layer in enumerate(LAYERS)])
        self.begins = nn.Linear(WIDTH, 1, bias=False)
        self.ended = nn.Linear(WIDTH, 1, bias=False)
        self.over = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.over.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """All of one loudness, or heads that use the constant would see it vary from token to token."""
        x = LOUD * rms_norm(self.inward(torch.cat([self.known[ids], self.own(ids)], -1)))
        return torch.cat([torch.full_like(x[..., :1], CONSTANT), x], -1)

    def states(self, questions: Questions) -> tuple[Tensor, Tensor]:
        """The last layer's states (rows, T, WIDTH), normed, and the `back` head's attention."""
        x, back = self.embed(questions.ids), None
        flag = _but_the_constant(self.flag * questions.after_mark[..., None])
        for number, layer in enumerate(self.layers):
            x, back = layer(x, questions, None if number else flag)
        if back is None:
            raise ValueError("the last layer needs a head of the kind `back`")
        return rms_norm(x), back

    def forward(self, questions: Questions) -> Scores:
        states, back = self.states(questions)
        telling = self.begins(states).squeeze(-1).masked_fill(~questions.valid, NEVER).softmax(-1)
        begins = torch.bmm(telling[:, None], back).squeeze(1)
        ended = self.ended(states).squeeze(-1).masked_fill(questions.after_mark == 0, NEVER)
        return Scores(torch.log(begins + 1e-9), ended, self.over(states).squeeze(-1))


def losses(scores: Scores, questions: Questions) -> Tensor:
    """The sum over rows: where it begins, where it has ended, and at every token between whether it has."""
    begins, ended, over = scores
    within, after = questions.answers()
    losses_ = F.binary_cross_entropy_with_logits(over, after.float(), reduction="none")
    return (
        F.nll_loss(begins, questions.first, reduction="sum")
        + F.cross_entropy(ended, questions.last + 1, reduction="sum")
        + (losses_ * within).sum()
    )
