"""Heads that are set by hand: the reader's given parts, as weights of a Llama's attention.

Every score of a head is a product over rotary pairs. The first pairs turn fast and tell places apart, the last ones
hardly turn: through them a head compares entries of the stream, at any place. Common to all of them:
a query of the constant, so that the key alone decides, and a sink to look at when nothing fits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from research.pocket.reader.codes import MATCHED, SIGNS, SIZE, THE_TOKEN, THE_WORD
from research.pocket.reader.layout import CONSTANT, HEAD, THETA, WIDTH
from research.pocket.reader.places import BEGINNING, ENDED, FIRST, FLAG, MARKED, OWN, PREVIOUS, SINK, Seen

HALF, SCALE = HEAD // 2, HEAD**0.5
FREQUENCIES = 1 / (THETA ** (torch.arange(0, HEAD, 2) / HEAD))
SHARP = (30.0, 25.0, 10.0)  # how strongly the fastest pairs of a head prefer one place
ONE, OTHER = HALF - 1, HEAD - 1  # the two halves of the pair that turns least
STILL = torch.cat([torch.arange(end - MATCHED // 2, end) for end in (ONE, OTHER)])  # of the pairs next to it


class AttentionHead:
    """Rows of one head in a Llama's projections; every circuit here writes to them."""

    def __init__(self, attention: Any, number: int, seen: Seen) -> None:
        rows = slice(number * HEAD, (number + 1) * HEAD)
        self.query: Tensor = attention.q_proj.weight[rows]
        self.key: Tensor = attention.k_proj.weight[rows]
        self.value: Tensor = attention.v_proj.weight[rows]
        self.out: Tensor = attention.o_proj.weight[:, rows]
        self.seen = seen

    def clear(self) -> None:
        for weight in (self.query, self.key, self.value, self.out):
            weight.zero_()

    def carry(self, source: int, target: int, gain: float) -> None:
        """Bring a code from where the head looks: from `source` dimensions there to `target` dimensions here."""
        every = torch.arange(SIZE)
        self.value[every, source + every] = 1.0
        self.out[target + every, every] = gain

    def hush_the_sink(self, column: int = SINK) -> None:
        """Make the sink's value nothing at all, by one column of the weights."""
        sink = self.seen.sink
        self.value[:, column] -= self.value @ sink / sink[column]

    def look_before(self, places: int) -> None:
        """Look so many places back: the constant against itself, turned by so many places."""
        self.query.zero_()
        self.key.zero_()
        for pair, strength in enumerate(SHARP):
            loud = (strength * SCALE) ** 0.5 / self.seen.constant
            angle = -places * FREQUENCIES[pair].item()
            self.key[pair, 0] = loud
            self.query[pair, 0], self.query[pair + HALF, 0] = loud * math.cos(angle), loud * math.sin(angle)

    def look_for_the_mark(self) -> None:
        """From the mark on everything sees it, but for sinks (or a later one would be taken for the passage)."""
        mark, sink = self.seen.states[self.seen.sample.mark, MARKED].item(), self.seen.sink
        self.query[ONE, 0] = 1 / self.seen.constant
        self.query[ONE, SINK] = -sink[0].item() / self.seen.constant / sink[SINK].item()
        self.key[ONE, MARKED] = 30 * SCALE / mark
        self.key[ONE, SINK] = 14 * SCALE / self.seen.sink[SINK].item()
        self.value[0, MARKED] = 1 / mark

    def look_for_the_same_word(self, loudness: float) -> None:
        """Own code against own code, in the question alone; the sink for the rest. `loudness`: `_match`."""
        here, there = (part[:, OWN : OWN + SIGNS].abs().mean() for part in (self.seen.passage, self.seen.question))
        threshold = self._match(OWN, THE_WORD, 19.0, loudness, here * there)
        self.key[ONE, FLAG] = -80 * SCALE / self.seen.flag / (threshold * self.seen.constant)
        self._look_at_the_sink_unless_flagged(OTHER)

    def _match(self, place: int, compared: Tensor, enough: float, loudness: float, arriving: Tensor | float) -> float:
        """Own code against the code at `place`: above the sink's score where their product is more than `enough`.

        The threshold is a product of constants, so that it grows and shrinks with the norms on both sides as the
        product of the codes does; `loudness` is a sign's in the stream, `arriving` the product of how loud they are
        seen. Returns the threshold's loudness in the query.
        """
        gain = 66.0 * SCALE / MATCHED / float(arriving)
        self.query[STILL, OWN + compared] = self.key[STILL, place + compared] = gain**0.5
        threshold = (gain * loudness**2 * enough / CONSTANT**2) ** 0.5
        self.query[ONE, 0], self.key[ONE, 0] = threshold, -threshold
        self.key[ONE, SINK] = threshold * self.seen.sink[0] / self.seen.sink[SINK]
        return threshold

    def _look_at_the_sink_unless_flagged(self, row: int) -> None:
        """Constant and flag cancel whatever the norm: they are in the stream as first written."""
        self.query[row, 0] = 1 / self.seen.question[:, 0].mean().item()
        self.query[row, FLAG] = -self.query[row, 0] * self.seen.constant / self.seen.flag
        self.key[row, SINK] = 60 * SCALE / self.seen.sink[SINK].item()

    def keep_out_of_passages(self, strongly: float) -> None:
        """Look at the first token where a passage comes before, and from sinks, whatever else the head has learnt."""
        for weight in (self.query, self.key):
            weight[[ONE, OTHER]] = 0
        self.query[OTHER, FLAG] = 1 / self.seen.flag
        self.query[OTHER, SINK] = 1 / self.seen.sink[SINK]
        for place in (SINK, FIRST):
            self.key[OTHER, place] = strongly * SCALE / self.seen.sink[place]

    def keep_to_the_passage(self) -> None:
        """Keep a learnt head from writing about unflagged tokens."""
        self._look_at_the_sink_unless_flagged(self._spare_pair())

    def keep_to_the_question(self) -> None:
        """Keep a learnt head from looking at flagged tokens."""
        row = self._spare_pair()
        self.query[row, 0] = 1 / self.seen.constant
        self.key[row, FLAG] = -90 * SCALE / self.seen.flag

    def _spare_pair(self) -> int:
        """The least used pair of a learnt head, emptied; its first row."""
        used = (self.query.pow(2).sum(1) * self.key.pow(2).sum(1)).sqrt()
        first = 6  # pairs before it turn too fast
        pair = first + int((used[:HALF] + used[HALF:])[first:].argmin())
        for row in (pair, pair + HALF):
            self.query[row], self.key[row] = 0, 0
        return pair

    def point(self, begins: Tensor, gain: float) -> None:
        """Look where the reader finds that the answer is given away, and bring the code of where it begins.

        Never where no passage comes before; where there is none at all, at sinks, which bring nothing.
        """
        self.query[ONE, 0] = 1 / self.seen.states[-1, 0].item()
        self.key[ONE, :WIDTH] = begins * SCALE
        self._never_look_at_what_is_not_flagged(1.0)
        self.key[ONE, SINK] -= 100 * SCALE / self.seen.sink[SINK]
        self.carry(BEGINNING, OWN, gain / self.seen.code(OWN))

    def _never_look_at_what_is_not_flagged(self, query: float) -> None:
        """But at sinks. Constant and flag cancel, whatever the norm. `query`: how loud the constant's query is."""
        unflagged = 300 * SCALE / self.seen.constant / query
        self.key[ONE, 0] -= unflagged
        self.key[ONE, FLAG] += unflagged * self.seen.constant / self.seen.flag
        self.key[ONE, SINK] += unflagged * self.seen.sink[0] / self.seen.sink[SINK]

    def go_on(self, begins: Tensor, over: Tensor, bias: float, gain: float, loudness: float) -> None:
        """Look at the token after the one just written ("induction"); bring its code, and whether the answer is over.

        Where that token occurs more than once, the place that gives the answer away weighs more.
        `over` and `bias` are the reader's verdict; it arrives in dimension ENDED. `loudness`: see `_match`.
        """
        threshold = self._match(PREVIOUS, THE_TOKEN, 26.0, loudness, self.seen.code(OWN) * self.seen.code(PREVIOUS))
        last = self.seen.states[-1, 0].item()
        self._never_look_at_what_is_not_flagged(threshold * last)
        self.key[ONE, FLAG] += 6 * SCALE / self.seen.flag / (threshold * last)
        self.key[ONE, :WIDTH] += begins * SCALE / (threshold * last)
        self.key[ONE, SINK] -= 30 * SCALE / self.seen.sink[SINK] / (threshold * last)  # of a later turn, too
        self.key[ONE, FIRST] = 30 * SCALE / self.seen.sink[FIRST] / (threshold * last)
        self.carry(OWN, OWN, gain / self.seen.code(OWN))
        self.value[SIZE, :WIDTH] = over
        self.value[SIZE, 0] += bias / self.seen.constant
        self.out[ENDED, SIZE] = 1.0
        self.hush_the_sink()
