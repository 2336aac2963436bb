"""Answers that a limit cut off (`max_tokens`): which of them have a score.

One that ends within its first sentence is seldom right, and often looks sure: copied passages, beginnings. So it
has no score, by default; with "abstain" no answer that was cut off has one. Which rule holds is decided before labels
are seen, and bound to the calibration (`Binding.on_cut`): one that was made before these rules scored all of them
("score"), and still does. By sentence, the sentence that was cut off is the one without a score.
"""

from __future__ import annotations

from semgrad_guard.engine.text_units import is_unfinished, sentences
from semgrad_guard.records import Verdict
from semgrad_guard.settings import OnCut

FIRST_SENTENCE = "a limit (max_tokens) cut it off within its first sentence"
LATER = 'a limit (max_tokens) cut it off, and on_cut is "abstain"'


def why_unscored(text: str, on_cut: OnCut, *, by_sentence: bool = False) -> str | None:
    """Why an answer that a limit cut off has no score, or by sentence the last of its sentences; None where it has."""
    unfinished = is_unfinished(text)
    if on_cut == "score" or (by_sentence and not unfinished):
        return None
    if unfinished and len(sentences(text)) == 1:
        return FIRST_SENTENCE
    return LATER if on_cut == "abstain" else None


def without_cut_score(draft: Verdict, on_cut: OnCut) -> Verdict:
    """The undecided draft; unscored where a limit cut it off, and the rule says so.

    Tool calls and values of a structure are whole or not there, so these drafts keep their scores.
    """
    details = draft.details
    if not isinstance(details.cut, int) or draft.status != "scored" or draft.tool_calls or details.fields:
        return draft
    if (why := why_unscored(draft.text, on_cut, by_sentence=bool(draft.sentences))) is None:
        return draft
    changes = {"status": "unscored", "uncertainty": None, "reason": why}
    if not draft.sentences:
        return draft.revised(**changes)
    last = draft.sentences[-1].model_copy(update={"uncertainty": None, "reason": why})
    return draft.revised(**changes, sentences=(*draft.sentences[:-1], last))
