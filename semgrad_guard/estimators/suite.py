"""Every method of the paper at the paper's settings, and later ones that cost nothing, on the same answers."""

from __future__ import annotations

from semgrad_guard.engine.answers.options import DiverseBeams, Sampling
from semgrad_guard.estimators import own_tokens, reading, samples
from semgrad_guard.estimators.base import Estimator
from semgrad_guard.estimators.text_pairs import Equivalence, F1Equivalence


def paper_suite(
    nli: Equivalence | None = None,
    importance: reading.Similarity | None = None,
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
    same, alike = nli or F1Equivalence(), importance or reading.WordOverlap()
    common = {"seed": seed, "max_tokens": max_tokens}
    plain, cooler = Sampling(10, 1.0, **common), Sampling(10, 0.7, **common)
    return (
        own_tokens.HybridGrad(),
        own_tokens.SemGrad(),
        own_tokens.ParaGrad(),
        samples.LengthNormalisedEntropy(plain),
        reading.PTrue(),
        samples.SelfConsistency(cooler, same),
        samples.Degree(cooler, same),
        samples.Inside(Sampling(10, 0.5, top_p=0.99, top_k=5, **common)),
        samples.SemanticEntropy(plain, same),
        samples.SemanticDensity(DiverseBeams(10, 1.0, max_tokens), same),
        reading.MutualInformation(Sampling(10, 0.9, **common)),
        own_tokens.GreedyNLL(),
        reading.SAR(Sampling(5, 1.0, **common), alike),
        own_tokens.ExGrad(),
        own_tokens.MeanEntropy(),
        own_tokens.MaxProbability(),
        own_tokens.GreatestEntropy(),
        own_tokens.RootNLL(),
    )
