"""A bad call of a command, and the good calls that bad ones are made from.

Arguments name places: `{in}` holds files that must come out as they went in, `{out}` is empty, `{model}` is a folder
with a good model, `{other}` one with another, `{models}` holds broken ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
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
    One that `loads` may load a model first, and one that `works` may answer something.
    """

    name: str
    arguments: tuple[str, ...]
    codes: tuple[int, ...] = (1, 2)
    says: str = ""
    stdin: bytes = b""
    keeps: bool = False
    loads: bool = True
    works: bool = True

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
GATE = (
    "gate", "--model", "{model}", "--calibration", "{in}/c.json", "--data", "{in}/right.jsonl",
    "--band", "{in}/band.json", "--max-tokens", "4",
)  # fmt: skip
BASES = {
    "ASK": ASK, "ONE": ONE, "SCORE": SCORE, "CALIBRATE": CALIBRATE, "EVALUATE": EVALUATE, "PROBE": PROBE, "GATE": GATE,
}  # fmt: skip
WITH_DATA = {"score": SCORE, "calibrate": CALIBRATE, "evaluate": EVALUATE, "probe": PROBE}


def over(base: Sequence[str], *more: str) -> tuple[str, ...]:
    """A call with further arguments; an option takes the place of the same one in `base`."""
    kept = list(base)
    for option in (one.partition("=")[0] for one in more):
        if option.startswith("--") and option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
    return (*kept, *more)


def refused() -> Iterator[Bad]:
    """The calls in `refused.txt`."""
    for line in Path(__file__).with_name("refused.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            call, _, says = line.partition("  ->  ")
            when, first, *more = shlex.split(call)
            code = 2 if when == "usage" else 1
            yield Bad(call, over(BASES.get(first, (first,)), *more), (code,), says, loads=when == "model", works=False)


def brief(value: str) -> str:
    """A value within a case's name: its beginning, and how long it is."""
    return repr(value) if len(value) < 20 else f"{value[:9]!r} and so on, {len(value)} letters"


def in_turn(rows: Iterable[R], columns: Iterable[K]) -> Iterator[tuple[R, K]]:
    """Every second pair: the columns take turns with the rows."""
    for (i, row), (j, column) in product(enumerate(rows), [*enumerate(columns)]):
        if (i + j) % 2 == 0:
            yield row, column
