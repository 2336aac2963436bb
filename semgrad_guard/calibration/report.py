"""The report of a calibration, from its record alone: for the terminal, for the server's page and for its models.

`risk_curve` is its risk against coverage, threshold by threshold, for people who choose one by looking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.calibration_set import doubt_of_grader
from semgrad_guard.calibration.planning import plan


def report(calibration: Calibration) -> dict[str, str]:
    """Sentences by their subject: promise, assumption, effect, kinds, languages, prompts, labels, chance, scores; those
    that apply."""
    sentences = {"promise": promise(calibration), "assumption": calibration.assumption}
    if calibration.effect is not None and calibration.threshold is not None:
        sentences["effect"] = str(calibration.effect)
    if calibration.kinds:
        sentences["kinds"] = "; ".join(
            f"{kind}: {one.n} answers, "
            + (
                f"no promise. {one.reason}"
                if one.threshold is None
                else f"{one.coverage:.0%} let through up to {one.threshold:.4g}"
            )
            for kind, one in calibration.kinds.items()
        )
    if calibration.languages:
        grader = None if calibration.binding is None else calibration.binding.grader
        doubt = doubt_of_grader(calibration.languages, grader or "")
        declared = f"{', '.join(calibration.languages)}, as declared; that of a later prompt is not checked"
        sentences["languages"] = declared if doubt is None else f"{declared}. {doubt}"
    if calibration.shape is not None:
        sentences["prompts"] = calibration.shape.covers
    if (part := calibration.by_hand) is not None:
        sentences["labels"] = (
            f"{part.count} graded by hand, a random part of the surest {part.share:.1%} ({part.drawn_from} answers)"
            + (", all of which a grader graded as well: the promise is about the grades by hand" * part.machine)
        )
    elif calibration.auroc is not None and calibration.n_tested and calibration.sentences is None:
        error, level = calibration.n_wrong / calibration.n, calibration.level
        chance = plan(calibration.n_tested, error=error, auroc=calibration.auroc, alpha=calibration.alpha, delta=level)
        sentences["chance"] = f"with {error:.0%} wrong and an AUROC of {calibration.auroc:.2f}, {chance}"
    if calibration.aurocs:
        sentences["scores"] = _scores(calibration)
    return sentences


def promise(calibration: Calibration) -> str:
    """The promise in one sentence, whether or not a threshold keeps it."""
    to = {"keep": " to traffic like this", "once": " to distinct questions", None: ""}[calibration.copies]
    to += " of each kind by itself" if calibration.kinds else ""
    rate, sure = f"{100 * calibration.alpha:g}%", f"with {100 * (1 - calibration.delta):g}% probability"
    text = f"Among the answers let through{to}, at most {rate} are wrong, {sure}"
    if calibration.sentences is not None:
        delivered = f"from which something is delivered{to}"
        text = {
            "sentence": f"Take an answer {delivered}, and one of its delivered sentences at random: it is wrong at a "
            f"rate of at most {rate}, {sure}",
            "answer": f"Of the answers {delivered}, at most {rate} hold a wrong sentence, {sure}",
        }[calibration.sentences.promise]
    if calibration.tries < 2:
        return f"{text}."
    return (
        f"{text} for all {calibration.tries} tries on these labels together (this one has level "
        f"{calibration.level:.2g})."
    )


def shortfall(calibration: Calibration) -> str:
    """Why no threshold keeps the promise."""
    return calibration.reason or "All questions together keep it, and no kind of question by itself."


def _scores(calibration: Calibration) -> str:
    """The AUROC of every score that was at hand, and the estimator that `auto` takes."""
    figures = ", ".join(f"{name} {value:.3f}" for name, value in calibration.aurocs.items() if value is not None)
    text = f"AUROC {figures}" if figures else "no AUROC: all answers are right, or all wrong"
    return f"{text}; of these, --estimator auto takes {calibration.auto}" if calibration.auto else text


@dataclass(frozen=True)
class CurvePoint:
    """The share of a calibration's answers that a threshold lets through, and their risk.

    `coverage` is their share among all its questions, `risk` the error rate among them as its confidence map has it;
    both in [0, 1]. They describe these answers and promise nothing; the calibration's own threshold does.
    """

    threshold: float
    coverage: float
    risk: float


def risk_curve(calibration: Calibration, *, points: int = 100) -> tuple[CurvePoint, ...]:
    """Points of rising threshold, at quantiles of the calibration's scores; none where it has no scores.

    The calibration's own threshold is among them. A record holds no labels, so the risk is the mean of
    1 - P(correct): for an isotonic map this is the error rate, up to its rounding towards one half. By sentence there
    are no points: the scores are those of answers, and P(correct) that of a sentence.
    """
    if calibration.sentences is not None:
        return ()
    known = [right for score in calibration.scores if (right := calibration.confidence(score)) is not None]
    if not known:
        return ()
    scores, wrong = np.asarray(calibration.scores[: len(known)], dtype=np.float64), 1 - np.array(known)
    levels = np.quantile(scores, np.linspace(0, 1, points), method="inverted_cdf")
    own = [] if calibration.threshold is None else [calibration.threshold]
    thresholds = np.unique(np.append(levels, own))
    answered = np.searchsorted(scores, thresholds, side="right")
    risks = np.concatenate(([0.0], np.cumsum(wrong)))[answered] / np.maximum(answered, 1)
    return tuple(
        CurvePoint(float(threshold), int(count) / calibration.n, float(risk))
        for threshold, count, risk in zip(thresholds, answered, risks, strict=True)
    )
