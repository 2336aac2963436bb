"""Familiarity: the comparison of a scored answer, its question and its unit with those of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.call_options import unlike_calls
from semgrad_guard.declared import declared
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.records import OWN_CODE, PromptForm, Verdict, digest_of
from semgrad_guard.settings import JudgedBy, OnDoubt

_OWN_CODE = "the model runs code that cannot be compared with that of the calibration (a hook, a replaced method)"
_OTHER_PROMPT = "the answer was given to another prompt (it comes from a cache, say)"


def unlike(draft: Verdict, calibration: Calibration | None, prompt: PromptForm | None) -> tuple[str, ...]:
    """The differences from the calibration, in words; empty without one: of the prompt, of the place where the answer
    ends (see `Binding.cut_elsewhere`), and of a call to another server (see `unlike_calls`)."""
    if calibration is None:
        return ()
    details, bound = draft.details, calibration.binding
    written: Any = {"tokens": details.scored_tokens, "text": draft.text}
    found = list(calibration.unfamiliar(prompt))
    if bound is not None and (elsewhere := bound.cut_elsewhere(details.cut, **written)) is not None:
        found.append(elsewhere)
    found += unlike_calls(details.options, bound, **written)
    if details.prompt is not None and prompt is not None and details.prompt != digest_of(prompt.text):
        found.append(_OTHER_PROMPT)
    if OWN_CODE in (details.fingerprint or ""):
        found.append(_OWN_CODE)
    return tuple(found)


# The unit of scores and promises: a whole answer, a sentence, a value of a structured answer, or a question, which may
# take several answers.

_UNIT = {"unit": "question"}
_FIELD = {"unit": "field", "on_doubt": "drop"}


def as_question(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings to which the score of a whole question is bound: those of its answers, and this unit."""
    return {**(settings or {}), **_UNIT}


def is_of_question(binding: Binding | None) -> bool:
    """Whether these are scores of whole questions: of each, that of its most doubtful answer."""
    return binding is not None and _UNIT.items() <= (binding.settings or {}).items()


def as_fields(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings to which the scores of an answer's values are bound: those of the answer, and this unit."""
    return {**(settings or {}), **_FIELD}


def is_of_fields(calibration: Calibration | None) -> bool:
    """Whether a calibration is about the values of structured answers."""
    bound = None if calibration is None else calibration.binding
    return bound is not None and _FIELD.items() <= (bound.settings or {}).items()


def require_same_unit(calibration: Calibration, binding: Binding) -> None:
    """Refuse a threshold for whole answers about sentences, and the other way round: its promise is another.

    Raises:
        BindingMismatchError: the calibration is about another unit than the scores, or another `on_doubt`.
    """
    if is_of_question(calibration.binding) and not is_of_question(binding):
        raise BindingMismatchError(
            f"The calibration {calibration.id} is about whole questions, and this answer is not part of one. Ask the "
            "chain or engine that was calibrated through guarded(...), or within asking(router)."
        )
    judged: Any = (binding.settings or {}).get("on_doubt")
    calibrated = None if calibration.sentences is None else calibration.sentences.on_doubt
    if judged != calibrated:
        raise BindingMismatchError(
            f"The calibration {calibration.id} is about {_unit(calibrated)}, and the answers are judged as "
            f"{_unit(judged)}. Calibrate again in that form, or give the guard the calibration's."
        )


def judged_by(calibration: Calibration | None, by: JudgedBy | None, on_doubt: OnDoubt | None) -> OnDoubt | None:
    """The action at a doubtful sentence, by the settings or else the calibration; None: whole answers are judged.

    Raises:
        InputError: a setting is none of its choices, or `on_doubt` is given for whole answers.
    """
    for name, kind, given in (("by", JudgedBy, by), ("on_doubt", OnDoubt, on_doubt)):
        if given is not None:
            declared(name, kind).require(given)
    made = None if calibration is None or is_of_fields(calibration) else calibration.sentences
    calibrated = None if made is None else made.on_doubt
    if (by or ("answer" if calibrated is None else "sentence")) == "sentence":
        return on_doubt or calibrated or "stop"
    if on_doubt is not None:
        raise InputError(f'on_doubt="{on_doubt}" is about sentences: judge answers by="sentence", or leave it out')
    return None


def _unit(on_doubt: str | None) -> str:
    return "whole answers" if on_doubt is None else f'sentences with on_doubt="{on_doubt}"'
