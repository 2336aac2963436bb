"""Which real scores are compared with the model's ordinary call (`scorer.py`), and when two of them disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from semgrad_guard.engine.replay.tape import Row
from semgrad_guard.engine.scores.exactness import Way
from semgrad_guard.engine.scores.gradients import GradientScores, deviation
from semgrad_guard.engine.scores.observed import Observation

Kind = Literal["gradient", "context", "padded", "forward"]
"""Whether a gradient score is verified, one of a response with context, one of a text that was scored together with
longer ones, or numbers of the forward pass alone."""

ROUNDING = 0.01
"""A difference in float32 that may be rounding alone, where a token's gradient is ill-conditioned."""
_CERTAIN = 0.01  # nats of an answer below which its gradient's digits are those of rounding


@dataclass(frozen=True)
class Suspect:
    """Numbers of a row that may have to be verified."""

    row: Row
    numbers: GradientScores | Observation
    way: Way = "rows"


Suspicion = tuple[Kind, int, Suspect]
"""The length of the longest text that has a part in a suspect's numbers, by its kind."""


def suspected(kinds: Mapping[Kind, Sequence[Suspect]], together: Sequence[Suspect]) -> Iterator[Suspicion]:
    """Of each kind the longest text, and of those that were read `together` the shortest, where it was padded."""
    for kind, some in kinds.items():
        for longest in sorted(some, key=_length)[-1:]:
            yield kind, longest.row.end, longest
    width = max(map(_length, together), default=0)
    for shortest in sorted(together, key=_length)[:1]:
        if shortest.row.end < width:
            yield "padded", width, shortest


def _length(one: Suspect) -> int:
    return one.row.end


def disagree(ours: GradientScores | Observation, theirs: GradientScores | Observation, tolerance: float) -> bool:
    """Whether one has numbers and the other none, or numbers of the same tokens are far apart.

    Of a nearly certain answer likelihoods and entropies alone are compared.
    """
    if ours.reason is not None or theirs.reason is not None:
        return (ours.reason is None) != (theirs.reason is None)
    if _far(ours.log_probs, theirs.log_probs, tolerance) or _far(ours.entropies, theirs.entropies, tolerance):
        return True
    if isinstance(ours, Observation) or isinstance(theirs, Observation) or (theirs.greedy_nll or 0.0) < _CERTAIN:
        return False
    return deviation(ours, theirs) > tolerance


def _far(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    """Whether log-probabilities or entropies (nats) of the same tokens differ by more than `tolerance`.

    It bounds the mean difference, relative to the mean size; below one nat, absolutely: numbers near zero carry the
    rounding of the logits.
    """
    size = max(1.0, math.fsum(map(abs, theirs)) / len(theirs))
    difference = math.fsum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(theirs)
    return not difference <= tolerance * size
