"""Answers judged by sentence: the scores of a draft's sentences, the decision about each, and the part that goes out.

A sentence is let through where its score, and those of all that it depends on (`calibration/sentences.py`), are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from semgrad_guard.calibration.sentences import compared_scores, depending_on
from semgrad_guard.engine.sentences import Span, leanings
from semgrad_guard.records import Score, SentenceVerdict, Verdict
from semgrad_guard.settings import OnDoubt

if TYPE_CHECKING:
    from semgrad_guard.engine.answers.answer import Evidence
    from semgrad_guard.engine.answers.sentences import EndedSentences
    from semgrad_guard.engine.language_model import LanguageModel

WITHOUT_END = "no token of the answer ends in this sentence"
OTHER_TOKENS = "the answer's tokens spell another text than it has, so that its sentences have no scores"
WITH_CALLS = "an answer that calls tools is not judged by sentence"
_PARTS = ("semgrad", "paragrad", "mean_entropy", "gnll", "max_probability")

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
    milliseconds += 0.0 if known is None else known.details.scoring_ms or 0.0
    details = {"scored_tokens": len(answer.response_ids), "scoring_ms": round(milliseconds, 3)}
    return sentences, Score(uncertainty, reason, details)


def most_doubtful(sentences: Sequence[SentenceVerdict]) -> tuple[float | None, str | None]:
    """The score of an answer by its sentences; where one of them has none, the reason."""
    own = [one.uncertainty for one in sentences if one.uncertainty is not None]
    reason = next((one.reason for one in sentences if one.uncertainty is None), None)
    return (None if reason else max(own)), reason


# The decision.


def decided_sentences(
    sentences: Sequence[SentenceVerdict],
    *,
    on_doubt: OnDoubt,
    lets_through: Callable[[float | None], bool],
    promises: Callable[[float | None], bool],
    confidence: Callable[[float | None], float | None],
) -> tuple[SentenceVerdict, ...]:
    """The sentences with the decision about each; their ranges are still those of the whole draft."""
    leans_on = [sentence.leans_on for sentence in sentences]
    compared = compared_scores([sentence.uncertainty for sentence in sentences], leans_on, on_doubt=on_doubt)
    through: list[bool] = []
    for sentence, earlier in zip(sentences, depending_on(leans_on, on_doubt=on_doubt), strict=True):
        through.append(lets_through(sentence.uncertainty) and (earlier is None or through[earlier]))
    return tuple(
        sentence.model_copy(
            update={
                "action": "deliver" if passes else on_doubt,
                "compared": score,
                "confidence": confidence(score),
                "promised": passes and promises(score),
            }
        )
        for sentence, passes, score in zip(sentences, through, compared, strict=True)
    )


def watched_score(verdict: Verdict) -> float | None:
    """The score of an answer that a calibration keeps, and drift compares: by sentence that of the most certain one."""
    if not verdict.sentences:
        return verdict.uncertainty
    return min((sentence.compared for sentence in verdict.sentences if sentence.compared is not None), default=None)


def with_delivered(draft: Verdict, *, closing_line: str) -> Verdict:
    """The verdict with the part of its text that is delivered; behind an answer that was ended early, the line."""
    text, kept = "", list[SentenceVerdict]()
    for sentence in draft.sentences:
        begin = len(text)
        text += draft.text[sentence.start : sentence.end] if sentence.action == "deliver" else ""
        kept.append(sentence.model_copy(update={"start": begin, "end": len(text)}))
    if closing_line and any(sentence.action == "stop" for sentence in kept):
        text += closing_line if text[-1:].isspace() else f" {closing_line}"
    withheld = sum(sentence.action != "deliver" for sentence in kept)
    changes = {
        "action": "answer",
        "text": text,
        "sentences": tuple(kept),
        "draft": draft.text,
        "reasoning": None,
        "reason": f"{withheld} of {len(kept)} sentences are not let through",
    }
    return draft.revised(**changes)


def undecided_sentences(sentences: Sequence[SentenceVerdict]) -> tuple[SentenceVerdict, ...]:
    """The delivered sentences without the decision about them."""
    nothing = {"action": "deliver", "compared": None, "confidence": None, "promised": False}
    kept = [number for number, sentence in enumerate(sentences) if sentence.end > sentence.start]
    places: dict[int | None, int] = {number: place for place, number in enumerate(kept)}
    return tuple(
        sentences[number].model_copy(update={**nothing, "leans_on": places.get(sentences[number].leans_on)})
        for number in kept
    )


def none_delivered(sentences: Sequence[SentenceVerdict]) -> tuple[SentenceVerdict, ...]:
    """The sentences of a draft that does not go out, whatever goes out instead."""
    nowhere = {"start": 0, "end": 0, "promised": False}
    return tuple(
        sentence.model_copy(update={**nowhere, **({"action": "stop"} if sentence.action == "deliver" else {})})
        for sentence in sentences
    )
