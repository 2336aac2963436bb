"""Bad options of every kind: numbers, names, combinations and texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from .bad_calls import ASK, CALIBRATE, EVALUATE, ONE, PROBE, WITH_DATA, Bad, brief, given, in_turn

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
                yield Bad(f"{command} {option} {brief(value)}", given(base[command], option, value))


# ---- names and combinations


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
    for value in ("bem", "judge", "judge=x", "bem={in}/none", "nli={in}/answers.jsonl", "judge=openai:"):
        yield Bad(f"evaluate grader {value}", (*EVALUATE, f"--grader={value}"))
    for value in ("./nowhere", "{in}/answers.jsonl", "{in}", "{model}", ""):
        yield Bad(f"evaluate nli {value}", (*EVALUATE, f"--nli={value}"))


def conflicts() -> Iterator[Bad]:
    """Options that exclude each other, that are missing, or that do not exist."""
    calls: dict[str, tuple[str, ...]] = {
        "no command": ("bark",),
        "no question": ("ask", "--model", "{model}"),
        "two questions": (*ASK, "Why?"),
        "unknown option": (*ASK, "--loud"),
        "long unknown option": (*ASK, "--" + "x" * 5000),
        "an option without its value": (*ASK, "--dtype"),
        "calibration and threshold": ("serve", "--calibration", "{in}/c.json", "--threshold", "1"),
        "vLLM on a device": (*CALIBRATE, "--engine", "vllm", "--device", "cpu"),
        "a server and a dtype": (*CALIBRATE, "--engine", "http://localhost:1/v1", "--dtype", "float32"),
        "grades by hand without a sheet": (*CALIBRATE, "--by-hand", "5"),
        "grades by hand of learned scores": (
            *CALIBRATE,
            "--by-hand",
            "5",
            "--labels",
            "{out}/l",
            "--estimator",
            "auto",
        ),
        "a sheet and a grader": (*CALIBRATE, "--labels", "{out}/l.csv", "--grader", "contains"),
        "a reachable promise of nothing": (*ASK, "--on-no-threshold", "reachable"),
        "a reachable promise about texts": (*ONE, "--on-no-threshold", "reachable"),
        "a reachable promise of a threshold": ("serve", "--threshold", "1", "--on-no-threshold", "reachable"),
        "an action at doubt about whole answers": (*CALIBRATE, "--on-doubt", "drop"),
        "quiet and verbose": (*ASK, "--quiet", "--verbose"),
        "quiet twice over": (*PROBE, "-q", "-v"),
        "by and a sampling estimator": (*ONE, "--by", "sentence", "--estimator", "sar"),
        "nothing to score": ("score", "--model", "{model}"),
        "calibrate without output": ("calibrate", "--data", "{in}/answers.jsonl"),
        "calibrate without data": ("calibrate", "--output", "{out}/c.json"),
        "evaluate without data": ("evaluate", "--output", "{out}/e"),
        "evaluate without output": ("evaluate", "--data", "{in}/answers.jsonl"),
        "probe without data": ("probe", "--output", "{out}/p.json"),
        "regrade without answers": ("evaluate", "--output", "{out}/e", "--regrade"),
        "a grader twice": (*EVALUATE, "--grader", "exact-match", "--grader", "exact-match"),
        "the demo on an unknown model": ("demo", "--model", "gpt2"),
    }
    for name, arguments in calls.items():
        yield Bad(name, arguments)


# ---- texts


def texts() -> Iterator[Bad]:
    """Questions and answers that are none, or are no text, or are too long."""
    for name, value in (("empty", ""), ("blank", " \t\n"), ("no-break space", "\u00a0")):
        yield Bad(f"ask {name}", ("ask", value, "--model", "{model}"), says="The question is empty")
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
            yield Bad(f"{command} {option} with a null", given(base, option, "a\0b"))


ALL = (numbers, names, conflicts, texts)
