"""The score by which a sentence is let through, under each `on_doubt`: a calibration and a guard compare the same."""

from __future__ import annotations

from collections.abc import Sequence

from semgrad_guard.settings import OnDoubt


def compared_scores(
    uncertainties: Sequence[float | None], leans_on: Sequence[int | None], on_doubt: OnDoubt
) -> list[float | None]:
    """The score of each sentence of one answer that a threshold is compared with; None where one it needs is missing.

    "stop", "escalate": the greatest up to the sentence, for it is delivered where none before it was doubtful. "drop":
    the greatest of its own and of those that it leans on (`leans_on`: the number of the earlier sentence), for it is
    left out with them. "mark": its own. A sentence is let through exactly where this score is at or below the
    threshold.
    """
    compared: list[float | None] = []
    for number, (own, earlier) in enumerate(zip(uncertainties, leans_on, strict=True)):
        if on_doubt in ("stop", "escalate"):
            earlier = number - 1 if number else None
        needed = own if earlier is None or on_doubt == "mark" else _greatest(own, compared[earlier])
        compared.append(needed)
    return compared


def _greatest(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else max(one, two)
