"""The sentences of a draft with their scores, before anything is decided about them."""

from __future__ import annotations

from collections.abc import Callable

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.leaning import leanings
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.sampled import AskingEstimator
from semgrad_guard.records import Score, SentenceVerdict
from semgrad_guard.settings import OnDoubt

WITHOUT_END = "no token of the answer ends in this sentence"
OTHER_TOKENS = "the answer's tokens spell another text than it has, so that its sentences have no scores"
WITH_CALLS = "an answer that calls tools is not judged by sentence"
_PARTS = ("semgrad", "paragrad", "mean_entropy", "gnll", "max_probability")


def require_by_sentence(estimator: Estimator, on_doubt: OnDoubt) -> None:
    """Refuse an estimator that compares whole answers.

    Raises:
        InputError: it draws further answers, or asks the model about this one; or a target should finish answers.
    """
    if on_doubt == "escalate":
        raise InputError('on_doubt="escalate" is not available yet: take "stop", "drop" or "mark"')
    if isinstance(estimator, AskingEstimator):
        raise InputError(
            f'{estimator.name} compares whole answers; by="sentence" needs an estimator of one replay, or of the '
            "likelihoods, e.g. HybridGrad()"
        )


def scored_sentences(
    model: LanguageModel, score: Callable[[Evidence], Score], answer: Evidence
) -> tuple[tuple[SentenceVerdict, ...], Score]:
    """The undecided sentences of an answer, and the score of the whole: that of its most doubtful sentence."""
    if not answer.response_ids:
        return (), Score(None, answer.why_empty)
    found = model.sentences(answer)
    if found is None:
        return (), Score(None, OTHER_TOKENS)
    leans_on = leanings(answer.text, [span for span, _ in found])
    scores = [Score(None, WITHOUT_END) if own is None else score(own) for _, own in found]
    sentences = tuple(
        SentenceVerdict(
            start=span[0],
            end=span[1],
            tokens=0 if own is None else len(own.response_ids),
            uncertainty=one.uncertainty,
            scores={name: part for name in _PARTS if (part := (one.details or {}).get(name)) is not None},
            leans_on=earlier,
            reason=one.reason,
        )
        for (span, own), one, earlier in zip(found, scores, leans_on, strict=True)
    )
    own = [one.uncertainty for one in scores if one.uncertainty is not None]
    reason = next((one.reason for one in scores if one.uncertainty is None), None)
    milliseconds = sum((one.details or {}).get("scoring_ms", 0.0) for one in scores)
    details = {"scored_tokens": len(answer.response_ids), "scoring_ms": round(milliseconds, 3)}
    return sentences, Score(None if reason else max(own), reason, details)
