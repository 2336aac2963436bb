"""A bad call of a command, and the good calls that bad ones are made from.

Arguments name places: `{in}` holds files that must come out as they went in, `{out}` is empty, `{model}` is a folder
with a good model, `{models}` holds broken ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

R, K = TypeVar("R"), TypeVar("K")
TOKENS = ("--max-tokens", "3")


@dataclass(frozen=True)
class Bad:
    """One bad call. `codes` are the exit codes that are right, `says` is a part of the message; `stdin` may be bytes.

    `keeps` tells that the call does some work before it finds out, so that files may be left in `{out}`: whole ones.
    """

    name: str
    arguments: tuple[str, ...]
    codes: tuple[int, ...] = (1, 2)
    says: str = ""
    stdin: bytes = b""
    keeps: bool = False

    def at(self, places: dict[str, Path]) -> list[str]:
        """The arguments with real paths."""
        found: list[str] = []
        for argument in self.arguments:
            for name, path in places.items():
                argument = argument.replace("{" + name + "}", str(path))
            found.append(argument)
        return found


ASK = ("ask", "What?", "--model", "{model}", *TOKENS)
ONE = ("score", "--model", "{model}", "--data", "{in}/responses.jsonl")
SCORE = ("score", "--model", "{model}", "--data", "{in}/responses.jsonl", "--output", "{out}/s.jsonl")
CALIBRATE = (
    "calibrate", "--model", "{model}", "--data", "{in}/answers.jsonl", "--output", "{out}/c.json", *TOKENS,
)  # fmt: skip
EVALUATE = (
    "evaluate", "--model", "{model}", "--data", "{in}/answers.jsonl", "--output", "{out}/e", *TOKENS,
    "--methods", "gnll", "--no-report",
)  # fmt: skip
PROBE = (
    "probe", "--model", "{model}", "--data", "{in}/paraphrases.jsonl", "--output", "{out}/p.json", "--no-answers",
)  # fmt: skip
WITH_DATA = {"score": SCORE, "calibrate": CALIBRATE, "evaluate": EVALUATE, "probe": PROBE}


def instead(command: tuple[str, ...], **options: str) -> tuple[str, ...]:
    """A command with other values for some of its options."""
    found = list(command)
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if option in found:
            found[found.index(option) + 1] = value
        else:
            found += [option, value]
    return tuple(found)


def given(command: tuple[str, ...], option: str, value: str) -> tuple[str, ...]:
    """A command with this one value for an option, which it may have had."""
    found = list(command)
    if option in found:
        del found[found.index(option) : found.index(option) + 2]
    return (*found, f"{option}={value}")


def brief(value: str) -> str:
    """A value within a case's name: its beginning, and how long it is."""
    return repr(value) if len(value) < 20 else f"{value[:9]!r} and so on, {len(value)} letters"


def in_turn(rows: Iterable[R], columns: Iterable[K]) -> Iterator[tuple[R, K]]:
    """Every second pair: the columns take turns with the rows."""
    for (i, row), (j, column) in product(enumerate(rows), [*enumerate(columns)]):
        if (i + j) % 2 == 0:
            yield row, column
