"""Texts with thoughts in the marks of all families and in all their forms, and how each is read: a table for tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLE: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "thoughts.json").read_text(encoding="utf-8"))
DOUBTED: list[str] = _TABLE["doubted"]
"""Texts with signs of a thought that is in no family's marks: they are no answers."""
GLUED: list[str] = _TABLE["glued"]
"""Thoughts that a model of channels wrote without its marks."""
ORDINARY: list[str] = _TABLE["ordinary"]
"""Answers that hold words, tags and quotations like those of thoughts."""
OWN: list[Any] = [
    *(tuple(row) for row in _TABLE["own"]),
    *((name, text, text, "", False) for text in (*DOUBTED, *GLUED) for name in ("plain", "qwen3 off")),
    *(("plain", text, text, None, False) for text in ORDINARY),
]
"""The family, what its model wrote, the answer, the thought (None: no reasoning), and whether a limit ended it."""
GRADED: list[tuple[str, str, bool]] = [tuple(row) for row in _TABLE["graded"]]
"""What a thinking model wrote, the reference, and whether its answer is right."""
MARKS: dict[str, dict[str, str]] = {
    name: {"next": family["close"], **family} for name, family in _TABLE["families"].items()
}


@dataclass(frozen=True)
class Written:
    """A text, and what a reader has to find in it: no thought is None, an unknown one "".

    `scored`: by a scorer that has a place for its thought; None where that depends on the scorer's own marks."""

    name: str
    text: str
    answer: str
    thought: str | None
    scored: bool | None


def _written(name: str, row: dict[str, Any], marks: dict[str, str]) -> Written:
    def filled(text: str | None) -> Any:
        for mark, own in marks.items():
            text = text and text.replace(f"{{{mark}}}", own)
        return text

    return Written(name, filled(row["text"]), filled(row["answer"]), filled(row["thought"]), row["scored"])


WRITTEN = (
    *(
        _written(f"{family}: {form}", row, marks)
        for form, row in _TABLE["forms"].items()
        for family, marks in MARKS.items()
        if family in row.get("families", MARKS)
    ),
    *(_written(row["text"][:40], row, {}) for row in _TABLE["others"]),
    *(Written(f"doubted: {text}", text, text, "", False) for text in DOUBTED),
    *(
        Written(f"glued: {text}", text, "", re.sub(r"\A(?:analysis|commentary|thought)\s*", "", text), False)
        for text in GLUED
    ),
    *(Written(f"ordinary: {text}", text, text, None, True) for text in ORDINARY),
)
_SHORT = ("r1: whole", "magistral: cut", "r1: opening left out", "gpt-oss: whole", "seed: a quoted mark")
SHORT = tuple(
    one for one in WRITTEN if one.name in _SHORT or one.name.partition(": ")[0] not in (*MARKS, "doubted", "ordinary")
)
"""A few of each kind, for readers that take long."""
