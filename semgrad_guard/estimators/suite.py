"""Every method of the paper at the paper's settings, and later ones that cost nothing, on the same answers."""

from __future__ import annotations

from semgrad_guard.engine.answers.options import DiverseBeams, Sampling
from semgrad_guard.estimators.base import Estimator
from semgrad_guard.estimators.equivalence import Equivalence, F1Equivalence
from semgrad_guard.estimators.gradients import (
    ExGrad,
    GreatestEntropy,
    GreedyNLL,
    HybridGrad,
    MaxProbability,
    MeanEntropy,
    ParaGrad,
    RootNLL,
    SemGrad,
)
from semgrad_guard.estimators.reading import SAR, MutualInformation, PTrue, Similarity, WordOverlap
from semgrad_guard.estimators.samples import (
    Degree,
    Inside,
    LengthNormalisedEntropy,
    SelfConsistency,
    SemanticDensity,
    SemanticEntropy,
)


def paper_suite(
    nli: Equivalence | None = None,
    importance: Similarity | None = None,
    seed: int = 0,
    *,
    max_tokens: int = 256,
) -> tuple[Estimator, ...]:
    """The paper's methods, then later ones that cost nothing.

    Those with equal plans share their samples: 55 answers are drawn for each question.

    Args:
        nli: tells equivalent answers (the paper: deberta-xlarge-mnli); default: shared words.
        importance: similarity for SAR (the paper: cross-encoder/stsb-roberta-large); default: shared words.
        seed: of all samples.
        max_tokens: the longest sample.
    """
    same, alike = nli or F1Equivalence(), importance or WordOverlap()
    common = {"seed": seed, "max_tokens": max_tokens}
    plain, cooler = Sampling(10, 1.0, **common), Sampling(10, 0.7, **common)
    return (
        HybridGrad(),
        SemGrad(),
        ParaGrad(),
        LengthNormalisedEntropy(plain),
        PTrue(),
        SelfConsistency(cooler, same),
        Degree(cooler, same),
        Inside(Sampling(10, 0.5, top_p=0.99, top_k=5, **common)),
        SemanticEntropy(plain, same),
        SemanticDensity(DiverseBeams(10, 1.0, max_tokens), same),
        MutualInformation(Sampling(10, 0.9, **common)),
        GreedyNLL(),
        SAR(Sampling(5, 1.0, **common), alike),
        ExGrad(),
        MeanEntropy(),
        MaxProbability(),
        GreatestEntropy(),
        RootNLL(),
    )
