"""The sentences of a run's answers, scored each by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.sentences import leanings
from semgrad_guard.evaluation.runs.answers import AnsweredSentence, AnswerScore
from semgrad_guard.guard.scored_sentences import OTHER_TOKENS, WITHOUT_END

Scores = dict[str, AnswerScore]


def sentence_fields(
    model: LanguageModel, evidence: Evidence, score: Callable[[Sequence[Evidence]], list[Scores]], names: Iterable[str]
) -> dict[str, Any]:
    """The fields of an `Answer` about its sentences; `score` scores several by the estimators of these names."""
    parts = model.sentences(evidence) if evidence.response_ids else []
    if not parts:
        reason = evidence.why_empty if parts is not None else OTHER_TOKENS
        return {"scores": _nothing(names, reason), "sentences": ()}
    scored = iter(score([own for _, own in parts if own is not None]))
    scores = [_nothing(names, WITHOUT_END) if own is None else next(scored) for _, own in parts]
    leans_on = leanings(evidence.text, [span for span, _ in parts])
    return {
        "scores": {
            name: max(
                (own[name] for own in scores),
                key=lambda score: math.inf if score.uncertainty is None else score.uncertainty,
            )
            for name in names
        },
        "sentences": tuple(
            AnsweredSentence(start=start, end=end, leans_on=earlier, scores=own)
            for ((start, end), _), earlier, own in zip(parts, leans_on, scores, strict=True)
        ),
    }


def _nothing(names: Iterable[str], reason: str | None) -> Scores:
    return dict.fromkeys(names, AnswerScore(uncertainty=None, reason=reason))
