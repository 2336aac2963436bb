"""Every method of the paper at the paper's settings, and later ones that cost little, on the same answers."""

from __future__ import annotations

from semgrad_guard.engine.generation.options import DiverseBeams, Sampling
from semgrad_guard.estimators.base import Estimator
from semgrad_guard.estimators.cascade import Cascade
from semgrad_guard.estimators.degree import Degree
from semgrad_guard.estimators.equivalence import Equivalence, F1Equivalence
from semgrad_guard.estimators.hybridgrad import HybridGrad
from semgrad_guard.estimators.inside import Inside
from semgrad_guard.estimators.likelihood import GreatestEntropy, GreedyNLL, MaxProbability, MeanEntropy
from semgrad_guard.estimators.llm_check import AttentionScore, HiddenScore
from semgrad_guard.estimators.ln_pe import LengthNormalisedEntropy
from semgrad_guard.estimators.mutual_information import MutualInformation
from semgrad_guard.estimators.p_true import PTrue
from semgrad_guard.estimators.paragrad import ExGrad, ParaGrad
from semgrad_guard.estimators.rauq import RAUQ
from semgrad_guard.estimators.sar import SAR, Similarity, WordOverlap
from semgrad_guard.estimators.self_consistency import SelfConsistency
from semgrad_guard.estimators.semantic_density import SemanticDensity
from semgrad_guard.estimators.semantic_entropy import SemanticEntropy
from semgrad_guard.estimators.semgrad import SemGrad


def paper_suite(
    nli: Equivalence | None = None,
    importance: Similarity | None = None,
    seed: int = 0,
    *,
    max_tokens: int = 256,
) -> tuple[Estimator, ...]:
    """The paper's methods, then later ones that need no samples, and no gradient or few.

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
        HiddenScore(),
        AttentionScore(),
        RAUQ(),
        Cascade(),
    )
