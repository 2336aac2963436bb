"""Answers judged by sentence: the decision about each sentence of a draft, and the part of it that is delivered.

A sentence is let through where its score, and those of all that it depends on (`calibration/sentences.py`), are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.sentences import compared_scores, depending_on
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.records import SentenceVerdict, Verdict
from semgrad_guard.settings import JudgedBy, OnDoubt


def require_same_unit(calibration: Calibration, binding: Binding) -> None:
    """Refuse a threshold for whole answers about sentences, and the other way round: its promise is another.

    Raises:
        BindingMismatchError: the calibration is about another unit than the scores, or another `on_doubt`; one by kind,
            all of its kinds are.
    """
    judged: Any = (binding.settings or {}).get("on_doubt")
    units = [
        None if one.sentences is None else one.sentences.on_doubt
        for one in calibration.kinds.values() or (calibration,)
    ]
    if judged not in units:
        calibrated = units[0]
        raise BindingMismatchError(
            f"The calibration {calibration.id} is about {_unit(calibrated)}, and the answers are judged as "
            f"{_unit(judged)}. Calibrate again in that form, or give the guard the calibration's."
        )


def judged_by(calibration: Calibration | None, by: JudgedBy | None, on_doubt: OnDoubt | None) -> OnDoubt | None:
    """The action at a doubtful sentence, by the settings or else the calibration; None: whole answers are judged.

    Raises:
        InputError: `on_doubt` is given for whole answers.
    """
    made = () if calibration is None else calibration.with_kinds
    forms: list[OnDoubt] = [one.sentences.on_doubt for one in made if one.sentences is not None]
    calibrated = forms[0] if forms else None
    if (by or ("answer" if calibrated is None else "sentence")) == "sentence":
        return on_doubt or calibrated or "stop"
    if on_doubt is not None:
        raise InputError(f'on_doubt="{on_doubt}" is about sentences: judge answers by="sentence", or leave it out')
    return None


def _unit(on_doubt: str | None) -> str:
    return "whole answers" if on_doubt is None else f'sentences with on_doubt="{on_doubt}"'


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
                "action": "deliver" if passes else _held(sentence, on_doubt),
                "compared": score,
                "confidence": confidence(score),
                "promised": passes and promises(score),
            }
        )
        for sentence, passes, score in zip(sentences, through, compared, strict=True)
    )


def _held(sentence: SentenceVerdict, on_doubt: OnDoubt) -> OnDoubt:
    """The action at a sentence that is not let through; one without a score has no number that marks it."""
    return "drop" if on_doubt == "mark" and sentence.uncertainty is None else on_doubt


def delivers(sentence: SentenceVerdict) -> bool:
    """Whether a sentence goes out, marked or not."""
    return sentence.action in ("deliver", "mark")


def watched_score(verdict: Verdict) -> float | None:
    """The score of an answer that a calibration keeps, and drift compares: by sentence that of the most certain one."""
    if not verdict.sentences:
        return verdict.uncertainty
    return min((sentence.compared for sentence in verdict.sentences if sentence.compared is not None), default=None)


def with_delivered(draft: Verdict, *, closing_line: str) -> Verdict:
    """The verdict with the part of its text that is delivered; behind an answer that was ended early, the line.

    A part that a target finishes has neither the line nor a promise about all of it.
    """
    text, kept = "", list[SentenceVerdict]()
    for sentence in draft.sentences:
        begin = len(text)
        text += draft.text[sentence.start : sentence.end] if delivers(sentence) else ""
        kept.append(sentence.model_copy(update={"start": begin, "end": len(text)}))
    withheld = [sentence for sentence in kept if not delivers(sentence)]
    if any(sentence.action == "stop" for sentence in kept):
        text = _closed(text, closing_line)
    doubtful = sum(sentence.action != "deliver" for sentence in kept)
    changes = {
        "action": "escalate" if any(sentence.action == "escalate" for sentence in kept) else "answer",
        "text": text,
        "sentences": tuple(kept),
        "draft": draft.text if withheld else None,
        "reasoning": None if withheld else draft.reasoning,
        "reason": f"{doubtful} of {len(kept)} sentences are not let through",
    }
    return draft.model_copy(update=changes)


def ended(part: Verdict, reason: str, *, closing_line: str) -> Verdict:
    """The part that no target finishes, for this reason: it ends with the line."""
    sentences = (
        one.model_copy(update={"action": "stop"}) if one.action == "escalate" else one for one in part.sentences
    )
    changes = {
        "action": "answer",
        "text": _closed(part.text, closing_line),
        "sentences": tuple(sentences),
        "reason": f"{part.reason}; {reason}",
    }
    return part.model_copy(update=changes)


def _closed(text: str, closing_line: str) -> str:
    return text + closing_line if not closing_line or text[-1:].isspace() else f"{text} {closing_line}"


def is_part(verdict: Verdict) -> bool:
    """Whether some sentences of an answer were delivered, and others not."""
    shown = verdict.action == "answer" or verdict.is_continued
    return shown and verdict.draft is not None and any(map(delivers, verdict.sentences))


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
        sentence.model_copy(update={**nowhere, **({"action": "stop"} if delivers(sentence) else {})})
        for sentence in sentences
    )
