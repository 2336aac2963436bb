"""A new calibration from the decisions of an old one: a proposal, for a person to take or not.

The grades are those of promised answers that were drawn at random. These are a random part of the answers up to the old
threshold, so gates over them are exact as in `hand_grades`. Answers above it were not delivered, and none of them is
graded: a proposal can keep the threshold or lower it, and never raise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semgrad_guard.calibration.calibrating import calibrate
from semgrad_guard.calibration.calibration_record import Calibration, is_score
from semgrad_guard.calibration.hand_grades import HandGrades
from semgrad_guard.errors import CalibrationError


@dataclass(frozen=True)
class Proposal:
    """A new calibration in the place of an old one. Nothing takes it by itself."""

    old: Calibration
    new: Calibration

    def __str__(self) -> str:
        old, new = self.old, self.new
        before = sum(old.lets_through(score) for score in new.scores) / new.n
        graded = f"{new.n_tested} answers drawn at random, {new.n_wrong} of them wrong"
        if new.threshold is None:
            return f"No threshold up to the present one keeps the promise, by the grades of {graded}. {new.reason}"
        kept = "the same" if new.threshold == old.threshold else f"{old.threshold:.4g} now"
        return (
            f"Proposed threshold: {new.threshold:.4g} ({kept}), by the grades of {graded}. It would let "
            f"{new.coverage:.0%} of the {new.n} answers through ({before:.0%} now). Of the graded answers it would "
            f"withhold {new.n_tested - new.n_answered}, and {new.n_wrong - new.n_answered_wrong} of these were wrong."
        )


def recalibrate(
    old: Calibration, scores: Sequence[float | None], grades: Sequence[tuple[float, bool]], *, tries: int = 0
) -> Proposal:
    """Propose a calibration with the promise of an old one.

    Args:
        old: the calibration that has decided.
        scores: the uncertainties of all its answers, delivered or not (None: an answer has none).
        grades: the uncertainty of each promised answer that was drawn at random and graded, and whether it was right.
        tries: numbers the proposals on these grades, this one included; 0: there is no other.

    Raises:
        CalibrationError: the old calibration has no threshold, no answer is graded, or the promise is by kind of
            question, by engine, or about sentences.
    """
    if old.kinds:
        raise CalibrationError(
            f"Calibration {old.id} has a promise for each kind of question. Make a new one, by kind, from graded "
            "answers instead."
        )
    if old.threshold is None or not grades:
        why = "it lets nothing through" if old.threshold is None else "none of its answers drawn at random is graded"
        raise CalibrationError(
            f"Calibration {old.id} cannot be made anew from its decisions: {why}. Calibrate on graded answers instead."
        )
    if old.binding is not None and old.binding.also:
        raise CalibrationError(
            f"Calibration {old.id} has a promise for each of several engines, and the log does not tell which of them "
            "answered. Calibrate on graded answers of each instead."
        )
    if old.sentences is not None:
        raise CalibrationError(
            f"Calibration {old.id} is about sentences, and the log keeps no score of these. Calibrate on graded "
            "answers by sentence instead."
        )
    known = sorted(score for score in scores if is_score(score))
    delivered = sum(score <= old.threshold for score in known)
    found = calibrate(*zip(*grades, strict=True), alpha=old.alpha, delta=old.delta, copies="keep", tries=tries)
    new = found.with_content(
        n=len(scores),
        n_unscored=len(scores) - len(known),
        scores=tuple(known),
        coverage=sum(found.lets_through(score) for score in known) / len(scores),
        binding=None if old.binding is None else old.binding.model_copy(update={"grader": "human"}),
        choice=old.choice,
        kind=old.kind,
        shape=old.shape,
        languages=old.languages,
        by_hand=HandGrades(count=len(grades), share=delivered / len(known), drawn_from=delivered, below=old.threshold),
    )
    return Proposal(old, new)
