"""Which prompt token to differentiate by: the chat template's own, unless graded answers speak against it.

Bare argmax of the Semantic Preservation Score is a trap: on a small model the prompt's last token has the highest
score and the worst SemGrad (every layer has seen the whole prompt there, and is busy with the next token), and the
paper's correlation of the two need not hold. But the paper's own choices are all of one kind, the first token behind
the user's text, or that text's last token, and a chat template gives that place away. So:

1. The template's own place is the recommendation to beat.
2. The Semantic Preservation Score alone never beats it. It is reported, also where it disagrees.
3. Graded answers are split in two halves. The first proposes the token at which SemGrad tells right from wrong best;
   the second compares that one token with the template's, on answers that had no part in choosing it. The proposal is
   recommended only if the interval of the difference in AUROC lies above zero.

Tokens in question are those that have read the whole question: the ones that all prompts end with, and the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from semgrad_guard.evaluation.metrics import auroc
from semgrad_guard.evaluation.metrics.bootstrap import Estimate, paired_difference
from semgrad_guard.evaluation.metrics.ranking import Tally

FEWEST = 25
"""Right answers, and wrong ones, that each half needs: intervals of a handful are not to be trusted."""

Scores = Sequence[float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Recommendation:
    """`offset` is None for the template's own place. `difference` in AUROC, proposal against template, is from the
    half that did not choose; None where no other token was proposed."""

    offset: int | None
    reason: str
    proposal: int | None = None
    difference: Estimate | None = None


def without_answers(own: int, preserved: Mapping[int, float]) -> Recommendation:
    """The choice from Semantic Preservation Scores (by offset) alone: the template's own token, `own`."""
    best = max(preserved, key=lambda offset: preserved[offset])
    reason = f"the chat template's own place ({own}); no graded answers were given that could speak against it"
    if best != own:
        reason += (
            f". The Semantic Preservation Score is highest at {best} ({preserved[best]:.3f}, against "
            f"{preserved.get(own, float('nan')):.3f}); alone that proves nothing, since at the prompt's last tokens "
            "it can be high where SemGrad is poor"
        )
    return Recommendation(None, reason)


def with_answers(
    own: int, own_scores: Scores, by_offset: Mapping[int, Scores], correct: Sequence[bool], *, seed: int = 0
) -> Recommendation:
    """The rule's step 3.

    Args:
        own: the template's offset (the commonest, where prompts differ).
        own_scores: SemGrad at each prompt's own t*.
        by_offset: SemGrad at every other token in question, by offset.
        correct: whether each answer is right.
        seed: of the split and the bootstrap.
    """
    choosing, testing = _halves(correct, seed)
    right = [sum(_at(correct, half)) for half in (choosing, testing)]
    wrong = [len(half) - count for half, count in zip((choosing, testing), right, strict=True)]
    if min(*right, *wrong) < FEWEST:
        return Recommendation(
            None,
            f"the chat template's own place ({own}); {sum(correct)} right and {len(correct) - sum(correct)} wrong "
            f"answers are too few to speak against it (it takes {2 * FEWEST} of each)",
        )
    found = {offset: _auroc(scores, correct, choosing) for offset, scores in by_offset.items()}
    found[own] = _auroc(own_scores, correct, choosing)
    proposal = max(found, key=lambda offset: (found[offset], offset == own))
    if proposal == own:
        return Recommendation(None, f"the chat template's own place ({own}): SemGrad is best there as well")
    difference = paired_difference(
        {"auroc": Tally.auroc},
        _at(by_offset[proposal], testing),
        _at(own_scores, testing),
        _at(correct, testing),
        seed=seed,
    )["auroc"]
    return _verdict(own, proposal, difference)


def _verdict(own: int, proposal: int, difference: Estimate) -> Recommendation:
    if difference.value is None or difference.low is None or difference.high is None:
        finding = "on the other half the difference is undefined"
        return Recommendation(None, f"the chat template's own place ({own}): {finding}", proposal, difference)
    measured = f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}] in AUROC"
    if difference.low > 0:
        reason = f"SemGrad is better at {proposal} than at the chat template's own place ({own}): {measured}"
        return Recommendation(proposal, f"{reason}, on answers that had no part in the choice", proposal, difference)
    reason = f"the chat template's own place ({own}): one half of the answers proposed {proposal}, and the other did "
    return Recommendation(None, f"{reason}not confirm it: {measured}", proposal, difference)


def _halves(correct: Sequence[bool], seed: int) -> tuple[list[int], list[int]]:
    """Two halves at random, right and wrong answers alike."""
    rng = np.random.default_rng(seed)
    halves: tuple[list[int], list[int]] = ([], [])
    for kind in (True, False):
        members = rng.permutation([i for i, right in enumerate(correct) if right is kind]).tolist()
        for half in (0, 1):
            halves[half].extend(int(i) for i in members[half::2])
    return halves


def _auroc(scores: Scores, correct: Sequence[bool], half: Sequence[int]) -> float:
    found = auroc(_at(scores, half), _at(correct, half))
    return -1.0 if found is None else found


def _at(values: Sequence[T], places: Sequence[int]) -> list[T]:
    return [values[i] for i in places]
