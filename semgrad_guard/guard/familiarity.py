"""Familiarity: the comparison of a scored answer, its question and its prompt with those of a calibration."""

from __future__ import annotations

from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.call_options import unlike_calls
from semgrad_guard.records import OWN_CODE, PromptForm, Verdict, digest_of

_OWN_CODE = "the model runs code that cannot be compared with that of the calibration (a hook, a replaced method)"
_OTHER_PROMPT = "the answer was given to another prompt (it comes from a cache, say)"


def unlike(
    draft: Verdict, calibration: Calibration | None, *, kind: str | None, prompt: PromptForm | None
) -> tuple[str, ...]:
    """The differences from the calibration, in words; empty without one: of the kind of question, of the prompt, of the
    place where the answer ends (see `Binding.cut_elsewhere`), and of a call to another server (see `unlike_calls`).

    Of several answers in one verdict only the prompt, and the place of the cut, is compared here: the code that joins
    them compares each.
    """
    if calibration is None:
        return ()
    joined = "aggregate" in (draft.settings or {})
    tokens, text = (0, "") if joined else (draft.scored_tokens, draft.text)
    bound = calibration.binding
    elsewhere = None if bound is None else bound.cut_elsewhere(draft.cut, tokens=tokens, text=text)
    other = draft.prompt is not None and prompt is not None and draft.prompt != digest_of(prompt.text)
    return (
        *_unlike_kind(calibration, kind),
        *calibration.unfamiliar(prompt),
        *(() if elsewhere is None else (elsewhere,)),
        *unlike_calls(draft.options, bound, tokens=tokens, text=text),
        *((_OTHER_PROMPT,) if other and not joined else ()),
        *((_OWN_CODE,) if OWN_CODE in (draft.fingerprint or "") else ()),
    )


def _unlike_kind(calibration: Calibration, kind: str | None) -> tuple[str, ...]:
    """Why nothing is promised about a question of this kind; empty where the calibration is about it."""
    if kind == calibration.kind and not calibration.kinds:
        return ()
    known = ", ".join(map(repr, calibration.kinds or filter(None, [calibration.kind]))) or "no kinds"
    if kind is None:
        return (f"the kind of the question was not given, and the promise is by kind: {known}",)
    return (f"the calibration does not know questions of the kind {kind!r:.60}; it knows {known}",)
