"""Bad options of every kind: numbers, names, combinations and texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

from .bad_calls import ASK, CALIBRATE, EVALUATE, ONE, PROBE, SCORE, WITH_DATA, Bad, brief, given, in_turn, instead

_NO_NUMBER = ("abc", "", " ", "1e", "0x10", "1,5", "--", "None", "9" * 6000 + "x")
_NO_FLOAT = ("inf", "-inf", "nan", "-nan", "1e400", "-1e400")
_NO_INT = ("1.5", "nan", "inf", "1e3", "9" * 6000, "-" + "9" * 30, "9" * 30)


def numbers() -> Iterator[Bad]:
    """No numbers, numbers that are not finite, and numbers out of range, for every option that takes one."""
    floats = {
        ("ask", "--temperature"): ("-1", "101", "1e308"),
        ("ask", "--tau"): ("0", "-1"),
        ("ask", "--beta"): ("-1", "-1e308"),
        ("ask", "--threshold"): (),
        ("score", "--tau"): ("0", "-0.0"),
        ("score", "--beta"): ("-1e-9",),
        ("calibrate", "--alpha"): ("0", "1", "-0.1", "10"),
        ("calibrate", "--delta"): ("0", "1", "-0.1", "10"),
        ("calibrate", "--temperature"): ("-1",),
        ("calibrate", "--beta"): ("-1",),
    }
    whole = {
        ("ask", "--max-tokens"): ("0", "-1"),
        ("ask", "--seed"): (),
        ("score", "--batch-size"): ("0", "-1"),
        ("calibrate", "--max-tokens"): ("0",),
        ("calibrate", "--batch-size"): ("0",),
        ("calibrate", "--seed"): (),
        ("evaluate", "--limit"): ("0", "-1"),
        ("evaluate", "--batch-size"): ("0",),
        ("evaluate", "--sampled-questions"): ("0",),
        ("evaluate", "--seed"): ("-1",),
        ("probe", "--tokens"): ("0", "-1"),
        ("probe", "--max-tokens"): ("0",),
        ("probe", "--batch-size"): ("-3",),
    }
    base, words, kept = {"ask": ASK, **WITH_DATA}, cycle(_NO_NUMBER), cycle((True, False, False, False))
    for options, never in ((floats, _NO_FLOAT), (whole, _NO_INT)):
        wrong = cycle(never)
        for (command, option), out_of_range in options.items():
            light = {next(wrong), next(wrong), *out_of_range}
            for value in (*islice(words, 4), *never, *out_of_range):
                heavy = not next(kept) if value in _NO_NUMBER else value not in light
                yield Bad(f"{command} {option} {brief(value)}", given(base[command], option, value), heavy=heavy)


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
        "ask variant": (ASK, "variant"),
        "ask device": (ASK, "device"),
        "score by": (ONE, "by"),
        "evaluate prompt": (EVALUATE, "prompt"),
        "ask on-unscored": (ASK, "on-unscored"),
    }
    for value, (name, (base, option)), heavy in in_turn(wrong, options.items()):
        yield Bad(f"{name} {brief(value)}", (*base, f"--{option}={value}"), heavy=heavy)
    for value in ("bem", "judge", "judge=x", "bem={in}/none", "nli={in}/answers.jsonl", "judge=openai:"):
        yield Bad(f"evaluate grader {value}", (*EVALUATE, f"--grader={value}"))
    for option in ("nli", "cross-encoder"):
        for value in ("./nowhere", "{in}/answers.jsonl", "{in}", "{model}", ""):
            yield Bad(f"evaluate {option} {value}", (*EVALUATE, f"--{option}={value}"))


def conflicts() -> Iterator[Bad]:
    """Options that exclude each other, that are missing, or that do not exist."""
    calls: dict[str, tuple[str, ...]] = {
        "no command": ("bark",),
        "no question": ("ask", "--model", "{model}"),
        "two questions": (*ASK, "Why?"),
        "unknown option": (*ASK, "--loud"),
        "long unknown option": (*ASK, "--" + "x" * 5000),
        "an option without its value": (*ASK, "--temperature"),
        "calibration and threshold": (*ASK, "--calibration", "{in}/c.json", "--threshold", "1"),
        "quiet and verbose": (*ASK, "--quiet", "--verbose"),
        "quiet twice over": (*PROBE, "-q", "-v"),
        "by and a sampling estimator": (*ONE, "--by", "sentence", "--estimator", "sar"),
        "data and question": (*SCORE, "--question", "What?"),
        "question alone": ("score", "--model", "{model}", "--question", "What?"),
        "response alone": ("score", "--model", "{model}", "--response", "That."),
        "nothing to score": ("score", "--model", "{model}"),
        "calibrate without output": ("calibrate", "--data", "{in}/answers.jsonl"),
        "calibrate without data": ("calibrate", "--output", "{out}/c.json"),
        "evaluate without data": ("evaluate", "--output", "{out}/e"),
        "evaluate without output": ("evaluate", "--data", "{in}/answers.jsonl"),
        "probe without data": ("probe", "--output", "{out}/p.json"),
        "regrade without answers": ("evaluate", "--output", "{out}/e", "--regrade"),
        "tau for gnll": (*ASK, "--estimator", "gnll", "--tau", "1"),
        "beta for sar": (*ONE, "--estimator", "sar", "--beta", "1"),
        "beta for states": (*CALIBRATE, "--estimator", "states", "--beta", "2"),
        "a grader twice": (*EVALUATE, "--grader", "exact-match", "--grader", "exact-match"),
        "plot of no kind": (*CALIBRATE, "--plot", "{out}/plot.bmp"),
        "plot without suffix": (*CALIBRATE, "--plot", "{out}/plot"),
        "the demo on an unknown model": ("demo", "--model", "gpt2"),
    }
    for name, arguments in calls.items():
        yield Bad(name, arguments)


# ---- texts


def texts() -> Iterator[Bad]:
    """Questions and answers that are none, or are no text, or are too long."""
    for name, value in (("empty", ""), ("blank", " \t\n"), ("no-break space", "\u00a0")):
        yield Bad(f"ask {name}", ("ask", value, "--model", "{model}"), says="The question is empty")
        yield Bad(f"score question {name}", instead(ONE, question=value), says="The question is empty")
        yield Bad(f"score response {name}", instead(ONE, response=value), says="The response is empty")
    surrogate = "caf\udce9"
    yield Bad("ask in Latin-1", ("ask", surrogate, "--model", "{model}"), says="not UTF-8")
    yield Bad("score question in Latin-1", instead(ONE, question=surrogate), says="not UTF-8")
    yield Bad("score response in Latin-1", instead(ONE, response=surrogate), says="not UTF-8")
    for command, base in {**WITH_DATA, "ask": ASK, "score": ONE}.items():
        yield Bad(f"{command} system in Latin-1", (*base, "--system", surrogate), says="not UTF-8")
    for length in (300, 100_000):
        long = "long " * (length // 5)
        yield Bad(f"ask {length}", ("ask", long, "--model", "{model}"), says="context window")
        yield Bad(f"score question {length}", instead(ONE, question=long), says="context window")
        yield Bad(f"score response {length}", instead(ONE, response=long), says="context window")
        yield Bad(f"ask system {length}", (*ASK, "--system", long), says="context window")
    for option in ("--data", "--output"):
        for command, base in WITH_DATA.items():
            yield Bad(f"{command} {option} with a null", given(base, option, "a\0b"))
