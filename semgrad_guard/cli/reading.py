"""Reading the data of a command, with a word on what is left out of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from semgrad_guard.cli.terminal import note, note_problems, say_problems

if TYPE_CHECKING:
    from semgrad_guard.evaluation.questions.data import Need, QuestionFile


def read_data(
    data: str | Path, columns: Mapping[str, str | None], *, needs: Need = "answers", strict: bool
) -> QuestionFile:
    """The questions of a source; `columns` are the names that the user gave, as `read_questions` takes them."""
    from semgrad_guard.evaluation.questions.data import read_questions

    found = read_questions(data, needs=needs, strict=strict, **columns)
    say_problems(found.problems)
    note_problems([*found.duplicates, *found.shared_ids])
    if found.unread:
        names = ", ".join(f'"{name}"' for name in found.unread)
        note(f"columns that are not read: {names}.")
    if needs == "answers" and (nowhere := sum(not row.answers for row in found.rows)):
        note(f"{nowhere} of {len(found.rows)} questions have no right answer: there, abstaining is right.")
    return found
