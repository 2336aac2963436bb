"""Calibrating by sentence: from scored and graded sentences to a threshold that keeps a promise about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibrating import calibrate
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.sentence_gates import Promise
from semgrad_guard.calibration.sentence_set import AnswerSentences, SentenceSet
from semgrad_guard.errors import CalibrationError
from semgrad_guard.settings import OnDoubt


def calibrate_sentences(
    answers: Sequence[AnswerSentences],
    *,
    on_doubt: OnDoubt,
    promise: Promise = "sentence",
    binding: Binding | None = None,
    **how: Any,
) -> Calibration:
    """Find the largest threshold that keeps a promise about the sentences that `on_doubt` delivers.

    `promise` is `"sentence"` (take an answer of which something is delivered, and one of its delivered sentences at
    random: it is wrong with probability at most alpha) or `"answer"` (of the answers from which something is delivered,
    at most alpha hold a wrong sentence); see `sentence_gates`. The calibration is bound to `on_doubt`. `how` are
    options of `calibrate` (alpha, delta, copies, prompts ...); the answers name their questions.

    Raises:
        CalibrationError: a form or an entry is none of those described.
    """
    if on_doubt not in get_args(get_args(OnDoubt)[0]) or promise not in get_args(Promise):
        raise CalibrationError(
            'on_doubt is "stop", "drop", "mark" or "escalate", and promise is "sentence" or "answer"; they are '
            f"{on_doubt!r} and {promise!r}."
        )
    found = SentenceSet.read(answers, on_doubt=on_doubt, promise=promise)
    if binding is not None:
        form = {"by": "sentence", "on_doubt": on_doubt}
        binding = binding.model_copy(update={"settings": {**(binding.settings or {}), **form}})
    return calibrate(
        found.most_certain,
        found.all_right,
        groups=[answer.question for answer in answers],
        binding=binding,
        sentences=found,
        **how,
    )
