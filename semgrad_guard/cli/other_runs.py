"""Answers of the same model in another engine, from the record of that run: `calibrate --also`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semgrad_guard.calibration import EngineIdentity
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.runs.answers import Answer

_OF_ENGINES = frozenset({"fingerprint", "dtype"})
"""Settings of a run in which engines and number formats differ."""


@dataclass(frozen=True)
class OtherRun:
    """The answers to the same questions, in their order, and the engine that gave them."""

    engine: EngineIdentity
    answers: Sequence[Answer]


def read_other(path: Path, rows: Sequence[Question], settings: Mapping[str, Any]) -> OtherRun:
    """The answers that a run left at `path`, for a calibration whose own run has these `settings`.

    Raises:
        BindingMismatchError: they were asked or scored in another way, or by this very engine.
        DataFileError: a line is broken.
        InputError: it is not a record of answers, or questions have no answer there.
    """
    from semgrad_guard.calibration import EngineIdentity
    from semgrad_guard.errors import BindingMismatchError, InputError
    from semgrad_guard.evaluation.job_record import differing, read_record
    from semgrad_guard.evaluation.runs.answers import Answer

    theirs, kept = read_record(path, Answer)
    mine: dict[str, Any] = json.loads(json.dumps(settings))
    changed = differing(theirs, mine)
    if foreign := [said for name, said in changed.items() if name not in _OF_ENGINES]:
        raise BindingMismatchError(
            f"The answers in {path} come from a run that differs in more than its engine: {'; '.join(foreign)}. "
            "Answer the questions there with the settings of this command."
        )
    if not changed:
        raise BindingMismatchError(
            f"The answers in {path} are this engine's own: the fingerprint is {mine['fingerprint']!r} in both. "
            "--also takes those of another engine or number format."
        )
    found = {answer.key: answer for answer in kept}
    if missing := sum(question.key not in found for question in rows):
        raise InputError(
            f"{missing} of the {len(rows)} questions have no answer in {path}. "
            "Run that calibration with these questions."
        )
    engine = EngineIdentity(fingerprint=theirs["fingerprint"], dtype=theirs["dtype"])
    return OtherRun(engine, [found[question.key] for question in rows])
