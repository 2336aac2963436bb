"""The record of a probe: numbers by layer and prompt token, and the t* that follows from them; plain JSON.

Which prompt token to differentiate by: the chat template's own, unless graded answers speak against it. Bare argmax of
the Semantic Preservation Score is a trap: on a small model the prompt's last token has the highest score and the worst
SemGrad (every layer has seen the whole prompt there, and is busy with the next token), and the paper's correlation of
the two need not hold. But the paper's own choices are all of one kind, the first token after the user's text, or that
text's last token, and a chat template gives that place away. So:

1. The template's own place is the recommendation to beat.
2. The Semantic Preservation Score alone never beats it. It is reported, also where it disagrees.
3. Graded answers are split in two halves. The first proposes the token at which SemGrad tells right from wrong best;
   the second compares that one token with the template's, on answers that had no part in choosing it. The proposal is
   recommended only if the interval of the difference in AUROC lies above zero.

Tokens in question are those that have read the whole question: the ones that all prompts end with, and the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from semgrad_guard.declared import read_record
from semgrad_guard.engine.objective import TokenChoice
from semgrad_guard.files import atomic_write
from semgrad_guard.metrics import Tally, auroc
from semgrad_guard.named import title_of
from semgrad_guard.paper.summary import Estimate, Resampling, paired_difference

Table = tuple[tuple[float, ...], ...]
"""Layers 0 .. L-1 x the last prompt tokens, the prompt's last token in the last column."""

Gaps = tuple[tuple[float | None, ...], ...]


class GradedGrid(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How well SemGrad tells right answers from wrong ones at every layer and token, and how that goes with SPS.

    `auroc` is None where it is undefined; `by_token` is that of the paper's layers together. `pearson` and `spearman`
    correlate `auroc` with the Semantic Preservation Score over all layers and tokens. `proposal`, `difference`, `low`
    and `high` are the comparison of the rule, if it made one.
    """

    answers: int
    right: int
    without_grid: int
    grader: str
    auroc: Gaps
    by_token: tuple[float | None, ...]
    pearson: float | None
    spearman: float | None
    proposal: int | None
    difference: float | None
    low: float | None
    high: float | None


class Probe(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()):
    """A probe of one model on one file of questions.

    `tokens` names the last prompt tokens, None where prompts differ; `own_token` is the chat template's own t*.
    `preservation` = `within` - `across` is the Semantic Preservation Score. `questions` counts those with paraphrases,
    `without_paraphrases` those left out of it. `graded` is None without answers.
    """

    schema_version: Literal[1] = 1
    created: str
    model: str
    revision: str | None
    fingerprint: str
    dtype: str
    prompt_template: str
    data: str
    questions: int
    without_paraphrases: int
    tokens: tuple[str | None, ...]
    upper_layers: tuple[int, ...]
    own_token: int
    preservation: Table
    within: Table
    across: Table
    graded: GradedGrid | None
    semantic_token: TokenChoice

    @property
    def by_token(self) -> tuple[float, ...]:
        """The Semantic Preservation Score of each token, averaged over the layers that SemGrad uses."""
        rows = [self.preservation[layer] for layer in self.upper_layers]
        return tuple(sum(column) / len(column) for column in zip(*rows, strict=True))

    @property
    def title(self) -> str:
        """What was probed, for pictures."""
        return f"{title_of(self.model)} on {self.data}: {self.questions} questions"

    @property
    def aurocs(self) -> NDArray[np.float64] | None:
        """[layers, tokens] SemGrad's AUROC with that hidden state alone, nan where undefined; None where all are."""
        found = np.array([] if self.graded is None else self.graded.auroc, dtype=np.float64)
        return found if np.isfinite(found).any() else None

    @property
    def labels(self) -> list[str]:
        """The tokens' texts with their offsets where all prompts share them, else the offsets."""
        offsets = range(-len(self.tokens), 0)
        return [
            str(offset) if name is None else f"{json.dumps(name, ensure_ascii=False)[1:-1].strip()} {offset}"
            for offset, name in zip(offsets, self.tokens, strict=True)
        ]

    def save(self, path: Path) -> Path:
        """Write JSON; never half a file."""
        return atomic_write(path, self.model_dump_json() + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataFileError: it cannot be read, or is something else.
        """
        return read_record(cls, path, title="record of a probe", advice="Probe again.")


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
        Resampling(seed=seed),
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
