"""Segments of a response coloured by how uncertain they are: HTML for reports; the shades serve terminals too."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

Claim = tuple[str, float | None]
"""A segment's text and its uncertainty."""


def shades(uncertainties: Sequence[float | None]) -> list[float | None]:
    """How dark each segment is among those of its text, in [0, 1]: 0 the most certain, 1 the least.

    Scores span decades, so the scale is that of their logarithms. Segments that are all alike are all 0; None stays
    None. A shade compares a text's segments with each other; it cannot be compared with those of another text.
    """
    logs = [None if u is None or not math.isfinite(u) else math.log(max(u, 1e-300)) for u in uncertainties]
    known = [value for value in logs if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if high - low < 1e-9:
        return [None if value is None else 0.0 for value in logs]
    return [None if value is None else (value - low) / (high - low) for value in logs]


def highlighted_html(claims: Sequence[Claim]) -> str:
    """The text as one HTML paragraph, its segments marked: the less certain, the darker and the thicker underlined.

    Every mark's title tells the number. White space is kept, everything is escaped, and no style sheet is needed.
    """
    marks = (
        _mark(text, value, shade) for (text, value), shade in zip(claims, shades([u for _, u in claims]), strict=True)
    )
    return f'<p class="claims" style="white-space: pre-wrap; line-height: 1.7">{"".join(marks)}</p>'


def _mark(text: str, uncertainty: float | None, shade: float | None) -> str:
    body, behind = text.rstrip(), text[len(text.rstrip()) :]
    if shade is None or uncertainty is None:
        return f'<span title="no score">{html.escape(body)}</span>{html.escape(behind)}'
    style = (
        f"color: inherit; background: rgb(213 94 0 / {0.6 * shade:.2f}); "
        f"border-bottom: {round(1 + 3 * shade)}px solid rgb(213 94 0 / {0.25 + 0.75 * shade:.2f})"
    )
    return (
        f'<mark style="{style}" title="uncertainty {uncertainty:.4g}">{html.escape(body)}</mark>{html.escape(behind)}'
    )
