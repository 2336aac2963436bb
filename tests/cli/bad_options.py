"""Bad options by the dozen: numbers, names and texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from .bad_calls import ASK, CALIBRATE, EVALUATE, ONE, WITH_DATA, Bad, brief, in_turn, over

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


ALL = (numbers, names, texts)
