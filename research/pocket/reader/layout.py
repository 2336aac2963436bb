"""The reader's structure: layers of attention heads, each of a kind that a Llama's head can be made into.

before n   looks n places back: always in the first layer, elsewhere before training
window n   looks anywhere among roughly the last n places
same       looks at the question's tokens that are this very word
question   looks anywhere in the question
free       looks anywhere
back       in the last layer: tells, for every token, where the answer begins that this token gives away
"""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = 128  # of the reader's residual stream; dimension 0 is a constant that no layer writes
HEAD = 32
INNER = 256
THETA = 1e12  # rotary base: the later half of a head's pairs hardly turns within any prompt
CONSTANT = 0.8
LOUD = 2.0  # root mean square of an embedding's other dimensions
LAYERS = (
    "before 1, before 2",
    "same, question, question, before 1",
    "before 1, before 2, window 4, window 12",
    "before 1, before 2, window 4, window 12",
    "before 1, window 4, window 12, window 40",
    "same, question, window 16, free",
    "before 1, window 4, window 12, back 1",
)


@dataclass(frozen=True, slots=True)
class Head:
    """One head: its kind, and how far it looks (places)."""

    kind: str
    reach: int = 0


def heads(layer: str) -> tuple[Head, ...]:
    """The heads of one of `LAYERS`."""
    parts = (part.split() for part in layer.split(", "))
    return tuple(Head(kind, *map(int, reach)) for kind, *reach in parts)
