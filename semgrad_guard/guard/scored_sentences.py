"""The sentences of a draft with their scores, before anything is decided about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.sentence_scoring import EndedSentences
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.sentences import Span, leanings
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.sampled import AskingEstimator
from semgrad_guard.records import Score, SentenceVerdict, Verdict

WITHOUT_END = "no token of the answer ends in this sentence"
OTHER_TOKENS = "the answer's tokens spell another text than it has, so that its sentences have no scores"
WITH_CALLS = "an answer that calls tools is not judged by sentence"
_PARTS = ("semgrad", "paragrad", "mean_entropy", "gnll", "max_probability")


def require_by_sentence(estimator: Estimator) -> None:
    """Refuse an estimator that compares whole answers.

    Raises:
        InputError: it draws further answers, or asks the model about this one.
    """
    if isinstance(estimator, AskingEstimator):
        raise InputError(
            f'{estimator.name} compares whole answers; by="sentence" needs an estimator of one replay, or of the '
            "likelihoods, e.g. HybridGrad()"
        )


Found = tuple[tuple[SentenceVerdict, ...], Score]
"""The undecided sentences of an answer, and the score of the whole: that of its most doubtful sentence."""


def scored_sentences(
    model: LanguageModel, score: Callable[[Evidence], Score], answer: Evidence, known: Verdict | None = None
) -> Found:
    """Those of an answer; `known` is the verdict on its beginning, which was scored while it was written."""
    if not answer.response_ids:
        return (), Score(None, answer.why_empty)
    count = 0 if known is None else len(known.sentences)
    found = model.sentences(answer, known=count)
    if found is None:
        return (), Score(None, OTHER_TOKENS)
    spans, evidence = [span for span, _ in found], [own for _, own in found[count:]]
    return _joined(answer, spans, known, [_scored(score, own) for own in evidence], evidence)


def scored_as_they_end(score: Callable[[Evidence], Score], ended: EndedSentences, known: Verdict | None) -> Found:
    """As `scored_sentences`, of the sentences that have ended in an answer that is still being written."""
    return _joined(ended.answer, ended.spans, known, [_scored(score, own) for own in ended.found], ended.found)


def _scored(score: Callable[[Evidence], Score], own: Evidence | None) -> Score:
    return Score(None, WITHOUT_END) if own is None else score(own)


def _joined(
    answer: Evidence,
    spans: Sequence[Span],
    known: Verdict | None,
    scores: Sequence[Score],
    evidence: Sequence[Evidence | None],
) -> Found:
    leans_on, earlier = leanings(answer.text, spans), () if known is None else known.sentences
    new = [
        SentenceVerdict(
            start=0,
            end=0,
            tokens=0 if own is None else len(own.response_ids),
            uncertainty=one.uncertainty,
            scores={name: part for name in _PARTS if (part := (one.details or {}).get(name)) is not None},
            reason=one.reason,
        )
        for one, own in zip(scores, evidence, strict=True)
    ]
    sentences = tuple(
        one.model_copy(update={"start": start, "end": end, "leans_on": before})
        for (start, end), one, before in zip(spans, [*earlier, *new], leans_on, strict=True)
    )
    uncertainty, reason = most_doubtful(sentences)
    milliseconds = sum((one.details or {}).get("scoring_ms", 0.0) for one in scores)
    milliseconds += 0.0 if known is None else known.scoring_ms or 0.0
    details = {"scored_tokens": len(answer.response_ids), "scoring_ms": round(milliseconds, 3)}
    return sentences, Score(uncertainty, reason, details)


def most_doubtful(sentences: Sequence[SentenceVerdict]) -> tuple[float | None, str | None]:
    """The score of an answer by its sentences; where one of them has none, the reason."""
    own = [one.uncertainty for one in sentences if one.uncertainty is not None]
    reason = next((one.reason for one in sentences if one.uncertainty is None), None)
    return (None if reason else max(own)), reason
