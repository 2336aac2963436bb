"""Self-Consistency (Self-Con): how many samples differ in meaning from the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.options import Sampling
from semgrad_guard.estimators.equivalence import SHARED_WORDS, Equivalence
from semgrad_guard.estimators.sampled import AskingEstimator, texts_of

_PLAN = Sampling(count=10, temperature=0.7)


@dataclass(frozen=True)
class SelfConsistency(AskingEstimator):
    """The share of samples that are not equivalent to the answer, in [0, 1].

    Source: Wang et al., "Self-consistency improves chain of thought reasoning in language models", ICLR 2023. The
    paper's setting: 10 samples at temperature 0.7, equivalence by NLI.
    """

    plan: Sampling = _PLAN
    equivalence: Equivalence = SHARED_WORDS
    name: ClassVar[str] = "self_consistency"
    title: ClassVar[str] = "Self-Con"

    def value(self, evidence: Evidence) -> float:
        """1 - the share of equivalent samples; equal texts are equivalent without a comparison."""
        answer, texts = evidence.text.strip(), texts_of(evidence.samples(self.plan))
        others = [text for text in dict.fromkeys(texts) if text != answer]
        same = self.equivalence([(answer, other) for other in others], evidence.question)
        agreeing = {answer, *(other for other, agrees in zip(others, same, strict=True) if agrees)}
        return disagreement([text in agreeing for text in texts])


def disagreement(agrees: Sequence[bool]) -> float:
    """The share of False."""
    return 1 - sum(agrees) / len(agrees)
