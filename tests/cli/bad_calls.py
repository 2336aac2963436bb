"""Bad calls of commands: the good ones that they are made from, the table of refused ones, and bad options.

Arguments name places: `{in}` holds files that must come out as they went in, `{out}` is empty, `{model}` is a folder
with a good model, `{other}` one with another, `{models}` holds broken ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
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


_NO_NUMBER = ("abc", "", " ", "1e", "0x10", "1,5", "--", "None", "9" * 6000 + "x")
_NO_FLOAT = ("inf", "-inf", "nan", "-nan", "1e400", "-1e400")
_NO_INT = ("1.5", "nan", "inf", "1e3", "9" * 6000, "-" + "9" * 30, "9" * 30)


def numbers() -> Iterator[Bad]:
    """No numbers, numbers that are not finite, and numbers out of range, for every option that takes one."""
    floats = {
        ("plan", "--error"): ("-1", "1.1", "1e308"),
        ("plan", "--auroc"): ("-1e-9", "2"),
        ("serve", "--threshold"): (),
        ("serve", "--timeout"): ("0", "-1", "86401"),
        ("calibrate", "--alpha"): ("0", "1", "-0.1", "10"),
        ("calibrate", "--delta"): ("0", "1", "-0.1", "10"),
    }
    whole = {
        ("ask", "--max-tokens"): ("0", "-1"),
        ("score", "--ray"): ("0", "-1"),
        ("calibrate", "--max-tokens"): ("0",),
        ("calibrate", "--by-hand"): ("0", "-3"),
        ("evaluate", "--limit"): ("0", "-1"),
        ("evaluate", "--seed"): ("-1",),
        ("serve", "--port"): ("-1", "65536"),
        ("plan", "--labels"): ("0",),
    }
    plan = ("plan", "--error", "0.2", "--auroc", "0.8")
    base: dict[str, tuple[str, ...]] = {"ask": ASK, "plan": plan, "serve": ("serve",), **WITH_DATA}
    words = cycle(_NO_NUMBER)
    for options, never in ((floats, cycle(_NO_FLOAT)), (whole, cycle(_NO_INT))):
        for (command, option), out_of_range in options.items():
            for value in dict.fromkeys((next(words), next(never), next(never), *out_of_range)):
                yield Bad(f"{command} {option} {brief(value)}", over(base[command], f"{option}={value}"))


def names() -> Iterator[Bad]:
    """Unknown names, and names of the wrong kind."""
    wrong = ("guess", "", "HybridGrad", "hybridgrad ", "x" * 5000, "ünbekannt", "\x1b[31m")
    options = {
        "ask estimator": (ASK, "estimator"),
        "score estimator": (ONE, "estimator"),
        "calibrate estimator": (CALIBRATE, "estimator"),
        "calibrate grader": (CALIBRATE, "grader"),
        "evaluate methods": (EVALUATE, "methods"),
        "evaluate grader": (EVALUATE, "grader"),
        "ask dtype": (ASK, "dtype"),
        "ask on-no-threshold": (ASK, "on-no-threshold"),
        "calibrate engine": (CALIBRATE, "engine"),
        "calibrate column": (CALIBRATE, "column"),
        "calibrate on-doubt": (CALIBRATE, "on-doubt"),
        "serve mode": (("serve",), "mode"),
        "ask device": (ASK, "device"),
        "score by": (ONE, "by"),
        "evaluate prompt": (EVALUATE, "prompt"),
    }
    for value, (name, (base, option)) in in_turn(wrong, options.items()):
        yield Bad(f"{name} {brief(value)}", (*base, f"--{option}={value}"))


def texts() -> Iterator[Bad]:
    """Questions and answers that are none, or are no text, or are too long."""
    for name, value in (("blank", " \t\n"), ("no-break space", "\u00a0")):
        yield Bad(f"ask {name}", ("ask", value, "--model", "{model}"), says="The question is empty")
    yield Bad("a long unknown option", (*ASK, "--" + "x" * 5000), (2,), "No such option")
    deep = f"--template-option=on={'[' * 100_000}"
    yield Bad("a deep template option", (*ASK, deep), (2,), "'--template-option' @@ JSON")
    surrogate = "caf\udce9"
    yield Bad("ask in Latin-1", ("ask", surrogate, "--model", "{model}"), says="not UTF-8")
    for command, base in {**WITH_DATA, "ask": ASK}.items():
        yield Bad(f"{command} system in Latin-1", (*base, "--system", surrogate), says="not UTF-8")
    for length in (300, 100_000):
        long = "long " * (length // 5)
        yield Bad(f"ask {length}", ("ask", long, "--model", "{model}"), says="context window")
        yield Bad(f"ask system {length}", (*ASK, "--system", long), says="context window")
    for option in ("--data", "--output"):
        for command, base in WITH_DATA.items():
            yield Bad(f"{command} {option} with a null", over(base, f"{option}=a\0b"))


ALL = (refused, numbers, names, texts)
