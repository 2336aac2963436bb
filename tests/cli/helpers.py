"""What the tests of the commands share in addition to fixtures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from click.testing import Result
from safetensors.torch import save_file

from semgrad_guard import LanguageModel

Run = Callable[..., Result]
ASKED = [f"What is item {i}?" for i in range(60)]
TOKENS = 4


def saved(folder: Path, language_model: LanguageModel) -> Path:
    """A checkpoint as transformers would save it (it may not under a running test's progress bars)."""
    model: Any = language_model._model
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    language_model.tokenizer.save_pretrained(folder)
    return folder


def rows_of(texts: Sequence[str], *, wrong: int = 0) -> list[dict[str, Any]]:
    """The usual questions with these texts as references; every so many, from the first on, has another."""
    found = ["seven" if wrong and row % wrong == 0 else text for row, text in enumerate(texts)]
    return [{"question": question, "answers": [text]} for question, text in zip(ASKED, found, strict=True)]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def fill(sheet: Path, labels: Sequence[str] | Mapping[str, str], *, delimiter: str = ",") -> None:
    """Labels as a person gives them in a program that keeps the rest: row by row, or by answers, sorted otherwise."""
    rows, encoding = table(sheet), "utf-8"
    if isinstance(labels, Mapping):
        rows, encoding = rows[::-1], "utf-8-sig"
        labels = [labels.get(row["answer"], "") for row in rows]
    with sheet.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows({**row, "correct": word} for row, word in zip(rows, labels, strict=True))


def jsonl(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """A data file; rows that are text are written as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


SEVERAL = ("--methods", "--grader", "--column")
"""Options that may be given several times."""


def merged(fixed: Sequence[object], more: Sequence[object]) -> list[object]:
    """The arguments of a call: `fixed` ones, pairs of an option and its value, but for what `more` has instead."""
    kept = list[object]()
    for option, value in zip(fixed[::2], fixed[1::2], strict=True):
        if option not in more or option in SEVERAL:
            kept += [option, value]
    return [*kept, *more]


def flat(text: str) -> str:
    """Terminal text without frames and line breaks."""
    return " ".join(text.translate(dict.fromkeys(map(ord, "│╭╮╰╯─"), " ")).split())
