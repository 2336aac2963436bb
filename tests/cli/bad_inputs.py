"""Bad inputs of every kind, made by rule: what a hurried person, a broken export or a hostile file hands to a command.

Arguments name places: `{in}` holds files that must come out as they went in, `{out}` is empty, `{model}` is a folder
with a good model, `{models}` holds broken ones.
"""

from __future__ import annotations

import codecs
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

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
ONE = ("score", "--model", "{model}", "--question", "What?", "--response", "That.")
SCORE = ("score", "--model", "{model}", "--data", "{in}/responses.jsonl", "--output", "{out}/s.jsonl")
CALIBRATE = (
    "calibrate", "--model", "{model}", "--data", "{in}/answers.jsonl", "--output", "{out}/c.json", *TOKENS,
)  # fmt: skip
EVALUATE = (
    "evaluate", "--model", "{model}", "--data", "{in}/answers.jsonl", "--output", "{out}/e", *TOKENS,
    "--methods", "gnll", "--no-ablations", "--no-report",
)  # fmt: skip
PROBE = (
    "probe", "--model", "{model}", "--data", "{in}/paraphrases.jsonl", "--output", "{out}/p.json", *TOKENS,
    "--no-plots", "--no-answers",
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


def _brief(value: str) -> str:
    """A value within a case's name: its beginning, and how long it is."""
    return repr(value) if len(value) < 20 else f"{value[:9]!r} and so on, {len(value)} letters"


def all_of_them() -> list[Bad]:
    """Every case, under a name of its own."""
    groups = [
        *(numbers, names, conflicts, texts, lines, files, csv_files, outputs, other_outputs, no_files),
        *(shared_outputs, records, run_records, label_sheets, models, templates, hub_names, standard_input),
    ]
    cases = [case for group in groups for case in group()]
    twice = {case.name for case in cases if sum(case.name == other.name for other in cases) > 1}
    if twice:
        raise ValueError(f"names used twice: {sorted(twice)}")
    return cases


# ---- numbers


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
        ("ask", "--sampled-rows"): ("1", "0", "-5"),
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
    base, words = {"ask": ASK, **WITH_DATA}, cycle(_NO_NUMBER)
    for options, never in ((floats, _NO_FLOAT), (whole, _NO_INT)):
        for (command, option), out_of_range in options.items():
            for value in (*islice(words, 4), *never, *out_of_range):
                yield Bad(f"{command} {option} {_brief(value)}", given(base[command], option, value))


# ---- names and combinations


def names() -> Iterator[Bad]:
    """Unknown names, and names of the wrong kind."""
    wrong = ("guess", "", "HybridGrad", "hybridgrad ", "x" * 5000, "ünbekannt", "\x1b[31m")
    for value in wrong:
        for command, base in {"ask": ASK, "score": ONE, "calibrate": CALIBRATE}.items():
            yield Bad(f"{command} estimator {_brief(value)}", (*base, f"--estimator={value}"))
        yield Bad(f"calibrate grader {_brief(value)}", (*CALIBRATE, f"--grader={value}"))
        yield Bad(f"evaluate methods {_brief(value)}", (*EVALUATE, f"--methods={value}"))
        yield Bad(f"evaluate grader {_brief(value)}", (*EVALUATE, f"--grader={value}"))
        yield Bad(f"ask dtype {_brief(value)}", (*ASK, f"--dtype={value}"))
        yield Bad(f"ask variant {_brief(value)}", (*ASK, f"--variant={value}"))
        yield Bad(f"ask device {_brief(value)}", (*ASK, f"--device={value}"))
        yield Bad(f"score by {_brief(value)}", (*ONE, f"--by={value}"))
        yield Bad(f"evaluate prompt {_brief(value)}", (*EVALUATE, f"--prompt={value}"))
        yield Bad(f"ask on-unscored {_brief(value)}", (*ASK, f"--on-unscored={value}"))
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
        "by and calibration": (*ONE, "--by", "clause", "--calibration", "{in}/c.json"),
        "by and a sampling estimator": (*ONE, "--by", "clause", "--estimator", "sar"),
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
        "rows for semgrad": (*ASK, "--estimator", "semgrad", "--sampled-rows", "40"),
        "beta for fused": (*CALIBRATE, "--estimator", "fused", "--beta", "2"),
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


# ---- lines of data


def _line(**fields: Any) -> str:
    good = {"question": "Which?", "answers": ["This."], "response": "This.", "paraphrases": ["What then?"]}
    return json.dumps({**good, **fields})


def _lines() -> dict[str, tuple[bytes, str]]:
    """Broken lines that are broken for every command, and the messages about them."""
    written: dict[str, tuple[str, str]] = {
        "a number as question": (_line(question=7), '"question"'),
        "a fraction as question": (_line(question=0.5), '"question"'),
        "NaN as question": (_line(question=float("nan")), '"question"'),
        "true as question": (_line(question=True), '"question"'),
        "null as question": (_line(question=None), '"question"'),
        "a list as question": (_line(question=["Which?"]), '"question"'),
        "an object as question": (_line(question={"text": "Which?"}), '"question"'),
        "an empty question": (_line(question=""), '"question"'),
        "a blank question": (_line(question=" \t "), '"question"'),
        "a lone surrogate": ('{"question": "\\ud800", "answers": ["a"], "response": "b"}', '"question"'),
        "no question": ('{"answers": ["a"], "response": "b"}', '"question"'),
        "a number as context": (_line(context=7), '"context"'),
        "NaN as id": (_line(id=float("nan")), '"id"'),
        "infinity as id": (_line(id=float("inf")), '"id"'),
        "a list as id": (_line(id=[1]), '"id"'),
        "an object as kind": (_line(kind={}), '"kind"'),
        "a number as response": (_line(response=7), '"response"'),
        "NaN as response": (_line(response=float("nan")), '"response"'),
        "a number as paraphrase": (_line(paraphrases=[7]), '"paraphrases'),
        "NaN as an answer": (_line(answers=[float("nan")]), '"answers'),
        "true as an answer": (_line(answers=[True]), '"answers'),
        "null among the answers": (_line(answers=["a", None]), '"answers'),
        "a list among the answers": (_line(answers=[["a"]]), '"answers'),
        "answers in an unknown form": (_line(answers={"best": "a"}), '"answers'),
        "answers in a form gone wrong": (_line(answers={"value": {"x": 1}}), '"answers'),
        "a question twice": ('{"question": "a?", "question": "b?", "answers": ["a"], "response": "b"}', "twice"),
        "answers twice": ('{"question": "a?", "answers": ["a"], "answers": ["b"], "response": "b"}', "twice"),
        "a key twice inside": ('{"question": "a?", "answers": {"value": "a", "value": "b"}, "response": "b"}', "twice"),
        "6,000 digits": (f'{{"question": "a?", "answers": [{"9" * 6000}], "response": "b"}}', "too long"),
        "6,000 digits unread": (f'{{"question": "a?", "n": {"9" * 6000}, "answers": ["a"], "response": "b"}}', "long"),
        "a huge float": ('{"question": "a?", "answers": [1e999], "response": "b", "id": 1e999}', "wrong"),
        "cut short": (_line()[:25], "not valid JSON"),
        "single quotes": ("{'question': 'a?', 'answers': ['a']}", "not valid JSON"),
        "a comma at the end": ('{"question": "a?",}', "not valid JSON"),
        "a comment": ("// nothing", "not valid JSON"),
        "two objects": (_line() + _line(), "not valid JSON"),
        "a list": ("[]", "not a JSON object"),
        "a text": ('"question"', "not a JSON object"),
        "a number": ("7", "not a JSON object"),
        "null": ("null", "not a JSON object"),
        "NaN": ("NaN", "not a JSON object"),
        "words": ("What is this?", "not valid JSON"),
        "a raw control character": ('{"question": "a\x01b"}', "not valid JSON"),
        "nested deeply": ("[" * 100_000, "nested too deeply"),
        "a deep question": ('{"question": ' + '{"a":' * 50_000, "nested too deeply"),
    }
    raw = {
        "Latin-1": ('{"question": "café?"}'.encode("latin-1"), "not UTF-8"),
        "a stray byte": (b'{"question": "\xff"}', "not UTF-8"),
        "a BOM within the file": (codecs.BOM_UTF8 + _line().encode(), "not valid JSON"),
        "a null byte": (b"\0", "not valid JSON"),
        "an overlong encoding": (b'{"question": "\xc0\xaf"}', "not UTF-8"),
    }
    return {**{name: (text.encode(), says) for name, (text, says) in written.items()}, **raw}


LINES = _lines()


def lines() -> Iterator[Bad]:
    """A file whose second line is broken: the line is named, and `--strict` stops there."""
    strictly = cycle(WITH_DATA.items())
    for number, (name, (_, says)) in enumerate(LINES.items()):
        path = f"{{in}}/lines/{number}.jsonl"
        yield Bad(f"score: {name}", instead(SCORE, data=path), (5,), f"line 2 @@{says}", keeps=True)
        command, base = next(strictly)
        yield Bad(f"{command} --strict: {name}", (*instead(base, data=path), "--strict"), (1,), f"line 2 @@{says}")


# ---- whole files


FILES: dict[str, bytes] = {
    "empty.jsonl": b"",
    "blank.jsonl": b"\n \n\t\n",
    "bom.jsonl": codecs.BOM_UTF8,
    "utf16.jsonl": _line().encode("utf-16"),
    "utf32.jsonl": _line().encode("utf-32-le"),
    "binary.jsonl": bytes(range(256)) * 20,
    "png.jsonl": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "gzip.jsonl": b"\x1f\x8b\x08" + bytes(200),
    "text.jsonl": b"What is this?\nI do not know.\n",
    "cut.json": b'[{"question": "a?"',
    "empty-list.json": b"[]",
    "numbers.json": b"[1, 2, 3]",
    "digits.json": b"[" + b"9" * 6000 + b"]",
    "twins.json": b'[{"question": "a?", "question": "b?"}]',
    "deep.json": b"[" * 100_000,
    "utf16.json": '[{"question": "a?"}]'.encode("utf-16"),
    "latin1.json": '[{"question": "café?"}]'.encode("latin-1"),
}
CSV: dict[str, bytes] = {
    "empty.csv": b"",
    "blank.csv": b"\n\n",
    "no-question.csv": b"frage,answers\na?,a\n",
    "header.csv": b"question,answers\n",
    "unclosed.csv": b'question,answers\n"a?,a\n',
    "surplus.csv": b"question,answers\na?,a,b,c\n",
    "utf16.csv": "question,answers\na?,a\n".encode("utf-16"),
    "latin1.csv": "question,answers\ncafé?,a\n".encode("latin-1"),
    "nulls.csv": b"question,answers\n\0\0,a\n",
    "blank-question.csv": b"question,answers\n ,a\n",
    "no-answer.csv": b"question,answers\na?,\n",
    "huge-cell.csv": b"question,answers\n" + b"x" * 200_000 + b",a\n",
    "empty.tsv": b"",
}


def files() -> Iterator[Bad]:
    """Files that are no data at all, and paths where no file is."""
    paths = {
        "none": "{in}/none.jsonl",
        "a folder": "{in}",
        "under a file": "{in}/answers.jsonl/x.jsonl",
        "a link to itself": "{in}/loop.jsonl",
        "a link to nothing": "{in}/dangling.jsonl",
        "a long name": "{in}/" + "x" * 5000,
        "a socket": "{in}/socket",
        "the empty device": os.devnull,
        "an endless device": "/dev/zero",
        "empty": "",
        "blank": "  ",
        "root": "/",
    }
    for command, base in WITH_DATA.items():
        for name in FILES:
            yield Bad(f"{command} of {name}", instead(base, data=f"{{in}}/files/{name}"))
        for name, path in paths.items():
            yield Bad(f"{command} of {name} at a path", instead(base, data=path))


def csv_files() -> Iterator[Bad]:
    """Tables gone wrong."""
    for name in CSV:
        for command in ("calibrate", "evaluate"):
            yield Bad(f"{command} of {name}", instead(WITH_DATA[command], data=f"{{in}}/files/{name}"))


def hub_names() -> Iterator[Bad]:
    """Data sets that cannot be had."""
    for value in ("hub:", "hub:nobody/nothing", "hub:@", "hub:::", "hub:a b", "hub:../..", "hub:{in}", "hub:x@y"):
        yield Bad(f"evaluate {value}", instead(EVALUATE, data=value))


# ---- outputs


def outputs() -> Iterator[Bad]:
    """Places where nothing may be written: inputs under any name, what is no regular file, and where nothing can be."""
    inputs = {"score": "responses", "calibrate": "answers", "probe": "paraphrases"}
    for command, name in inputs.items():
        base, data = WITH_DATA[command], f"{{in}}/{name}.jsonl"
        for kind, path in {
            "itself": data,
            "a dotted path": f"{{in}}/./files/../{name}.jsonl",
            "a symbolic link": f"{{in}}/link-{name}.jsonl",
            "a hard link": f"{{in}}/hard-{name}.jsonl",
            "a linked folder": f"{{in}}/again/{name}.jsonl",
        }.items():
            yield Bad(f"{command} over its data, {kind}", instead(base, output=path), (1,), "overwrite an input")
            yield Bad(f"{command} over its data, read by {kind}", instead(base, data=path, output=data), (1,), "input")
        yield Bad(f"{command} over the model", instead(base, output="{model}/config.json"), (1,), "overwrite an input")


def other_outputs() -> Iterator[Bad]:
    """Inputs of other kinds in the way of an output."""
    for command in ("score", "calibrate"):
        base = WITH_DATA[command]
        probed = (*instead(base, output="{in}/probe.json"), "--probe", "{in}/probe.json")
        yield Bad(f"{command} over its probe", probed, (1,), "overwrite an input")
    calibrated = (*instead(SCORE, output="{in}/c.json"), "--calibration", "{in}/c.json")
    yield Bad("score over its calibration", calibrated, (1,), "overwrite an input")
    for option in ("answers", "plot"):
        value = {"answers": "{in}/answers.jsonl", "plot": "{in}/plot.png"}[option]
        call = instead(CALIBRATE, **{"data": value, option: value})
        yield Bad(f"calibrate --{option} over its data", call, (1,), "overwrite an input")
    for name in ("graded.csv", "run.json", "answers.jsonl", "grades.jsonl"):
        call = instead(EVALUATE, data=f"{{in}}/old/{name}", output="{in}/old")
        yield Bad(f"evaluate over its {name}", call, (1,), "overwrite an input")
    over = (*instead(EVALUATE, output="{in}/old"), "--labels", "{in}/old/graded.csv")
    yield Bad("evaluate over its labels", over, (1,), "overwrite an input")
    beside = (*instead(EVALUATE, output="{in}/old"), "--beside", "{in}/old")
    yield Bad("evaluate over the run next to it", beside, (1,))


def no_files() -> Iterator[Bad]:
    """Outputs that are no regular files, or are nowhere."""
    places = {
        "a folder": "{in}",
        "a pipe": "{in}/pipe",
        "a socket": "{in}/socket",
        "a link to a pipe": "{in}/link-pipe",
        "a link to itself": "{in}/loop.jsonl",
        "a link into nothing": "{in}/dangling-far.jsonl",
        "no folder": "{out}/none/x.json",
        "under a file": "{in}/answers.jsonl/x.json",
        "empty": "",
        "blank": " ",
        "a dot": ".",
        "two dots": "..",
        "root": "/",
        "a long name": "{out}/" + "x" * 5000 + ".json",
        "the process table": "/proc/none.json",
    }
    for command in ("score", "calibrate", "probe"):
        for name, path in places.items():
            yield Bad(f"{command} --output: {name}", instead(WITH_DATA[command], output=path))
    for name in ("a pipe", "a socket", "a link to a pipe", "a link to itself", "under a file", "empty", "blank"):
        yield Bad(f"evaluate --output: {name}", instead(EVALUATE, output=places[name]))
    for option in ("answers", "plot"):
        for name in ("a folder", "a pipe", "a socket", "no folder", "under a file", "empty", "a link to a pipe"):
            path = places[name]
            yield Bad(f"calibrate --{option}: {name}", (*CALIBRATE, f"--{option}={path}"))
    for name in ("a pipe", "under a file", "empty"):
        yield Bad(f"demo --output: {name}", ("demo", f"--output={places[name]}"))


def shared_outputs() -> Iterator[Bad]:
    """Two outputs in one file."""
    for name, path in {
        "the same": "{out}/c.json",
        "dotted": "{out}/../out/c.json",
        "in capitals": "{out}/C.JSON",
    }.items():
        yield Bad(f"answers in the calibration, {name}", (*CALIBRATE, f"--answers={path}"), (1,), "one file")
    same = (*instead(CALIBRATE, output="{out}/p.png"), "--plot", "{out}/p.png")
    yield Bad("a picture in the calibration", same, (1,), "one file")
    yield Bad("answers in the picture", (*CALIBRATE, "--plot={out}/p.svg", "--answers={out}/p.svg"), (1,), "one file")


# ---- records of the program's own


_JUNK: dict[str, str | bytes] = {
    "empty": "",
    "a list": "[]",
    "an object": "{}",
    "null": "null",
    "a number": "7",
    "a text": '"x"',
    "cut": '{"schema_version": 1, "thre',
    "binary": bytes(range(256)),
    "utf16": "{}".encode("utf-16"),
    "digits": '{"threshold": ' + "9" * 6000 + "}",
    "nested": "[" * 100_000,
    "NaN": '{"threshold": NaN}',
    "a null byte": "\0",
}


def records() -> Iterator[Bad]:
    """Calibrations, probes and finished runs that are none, or are no longer what was written."""
    options = {
        "calibration": {"ask": ASK, "score": SCORE, "evaluate": EVALUATE},
        "probe": {"ask": ASK, "score": ONE, "calibrate": CALIBRATE, "evaluate": EVALUATE},
    }
    for option, commands in options.items():
        for command, base in commands.items():
            for name in _JUNK:
                path = f"{{in}}/junk/{name}.json"
                yield Bad(f"{command} --{option}: {name}", (*base, f"--{option}={path}"))
            for path in ("{in}/none.json", "{in}", "", "{in}/loop.jsonl", "{in}/answers.jsonl"):
                yield Bad(f"{command} --{option} {path!r}", (*base, f"--{option}={path}"))
    for name in EDITED:
        yield Bad(f"ask with a calibration, {name}", (*ASK, f"--calibration={{in}}/edited/{name}.json"))
    for name in _JUNK:
        yield Bad(f"evaluate next to: {name}", (*EVALUATE, f"--beside={{in}}/junk/{name}"))


EDITED: dict[str, dict[str, Any]] = {
    "another threshold": {"threshold": 9.0},
    "another alpha": {"alpha": 0.01},
    "no scores": {"scores": []},
    "a text as score": {"scores": ["a"]},
    "another version": {"schema_version": 99},
    "a field more": {"more": 1},
    "no binding": {"binding": 7},
}


def run_records() -> Iterator[Bad]:
    """Records of runs that belong to something else, or are broken."""
    header = {
        "no header": b'{"question": "a?"}\n',
        "a header of another version": b'{"semgrad_guard_record": "scores", "settings": {}}\n',
        "a header without settings": b'{"semgrad_guard_record": "answers"}\n',
        "settings that are a list": b'{"semgrad_guard_record": "answers", "settings": []}\n',
        "other settings": b'{"semgrad_guard_record": "answers", "settings": {"model": "other"}}\n',
        "a broken header": b'{"semgrad_guard_record": "answers", "settings": {\n',
        "text": b"What is this?\n",
        "binary": bytes(range(256)) + b"\n",
        "digits": b'{"semgrad_guard_record": ' + b"9" * 6000 + b"}\n",
        "nested": b"[" * 100_000 + b"\n",
    }
    RUNS.update(header)
    for name in header:
        yield Bad(f"calibrate --answers: {name}", (*CALIBRATE, f"--answers={{in}}/runs/{name}/answers.jsonl"), (1,))
        yield Bad(f"evaluate: {name}", instead(EVALUATE, output=f"{{in}}/runs/{name}"), (1,))
        again = ("evaluate", "--regrade", "--no-report", "--output", f"{{in}}/runs/{name}")
        yield Bad(f"evaluate --regrade: {name}", again, (1,))


RUNS: dict[str, bytes] = {}


def label_sheets() -> Iterator[Bad]:
    """Sheets of labels for another run, or none."""
    again = ("evaluate", "--regrade", "--no-report", "--output", "{run}")
    for name in LABELS:
        yield Bad(f"labels: {name}", (*again, f"--labels={{in}}/labels/{name}.csv"), (1,))
    for path in ("{in}/none.csv", "{in}", "", "{in}/loop.jsonl"):
        yield Bad(f"labels at {path!r}", (*again, f"--labels={path}"))


LABELS: dict[str, bytes] = {
    "empty": b"",
    "no key": b"question,correct\na,1\n",
    "no correct": b"key,question\na,1\n",
    "an unknown key": b"key,correct\nabc,1\n",
    "utf16": "key,correct\n".encode("utf-16"),
    "latin1": "key,correct\ncafé,1\n".encode("latin-1"),
    "unclosed": b'key,correct\n"a,1\n',
    "binary": bytes(range(256)),
}


# ---- models


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _file(name: str, content: str | bytes) -> Callable[[Path], object]:
    written = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(written)


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _renamed(name: str, other: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / other)


def _cut(share: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return cut


def _template(text: str) -> Callable[[Path], object]:
    return _file("chat_template.jinja", text)


MODELS: dict[str, Callable[[Path], object]] = {
    "a list as config": _file("config.json", "[]"),
    "an empty config": _file("config.json", ""),
    "an empty object as config": _file("config.json", "{}"),
    "null as config": _file("config.json", "null"),
    "a cut config": _file("config.json", '{"model_type": "lla'),
    "a binary config": _file("config.json", bytes(range(256))),
    "an unknown kind": _config(model_type="guess"),
    "T5": _file("config.json", json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})),
    "BERT": _config(model_type="bert"),
    "a picture model": _config(model_type="vit"),
    "a number as kind": _config(model_type=7),
    "heads that do not divide": _config(num_attention_heads=5, head_dim=None),
    "no heads": _config(num_attention_heads=0, head_dim=None),
    "groups that do not divide": _config(num_key_value_heads=3),
    "no layers": _config(num_hidden_layers=0),
    "negative layers": _config(num_hidden_layers=-1),
    "more layers": _config(num_hidden_layers=6),
    "another width": _config(hidden_size=64, head_dim=None),
    "no width": _config(hidden_size=0, head_dim=None),
    "a text as width": _config(hidden_size="wide"),
    "another vocabulary": _config(vocab_size=100),
    "an unknown activation": _config(hidden_act="guess"),
    "an unknown dtype": _config(dtype="guess", torch_dtype="guess"),
    "rope of no kind": _config(rope_parameters={"rope_type": "guess"}, rope_scaling={"rope_type": "guess"}),
    "code of its own": _config(auto_map={"AutoModelForCausalLM": "x.Y"}, model_type="custom"),
    "no config": _without("config.json"),
    "no weights": _without("model.safetensors"),
    "no tokenizer": _without("tokenizer.json"),
    "half the weights": _cut(0.5),
    "no bytes in the weights": _cut(0),
    "a stump of weights": _cut(0.001),
    "junk as weights": _file("model.safetensors", b"\xff" * 100),
    "an index without files": _renamed("model.safetensors", "model.safetensors.index.json"),
    "a broken tokenizer": _file("tokenizer.json", "{}"),
    "a cut tokenizer": _file("tokenizer.json", '{"version": "1.0", "mod'),
    "a list as tokenizer": _file("tokenizer.json", "[]"),
    "a broken tokenizer config": _file("tokenizer_config.json", "[]"),
}
TEMPLATES: dict[str, str] = {
    "a syntax error": "{% for m in messages %}{{ m.content }",
    "an unknown tag": "{% guess %}",
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}{{ messages[0].content }}",
    "a range of 30 digits": "{{ range(10**30) }}",
    "the question left out": "{{ 'Say something. ' }}",
    "an empty one": "{% if false %}x{% endif %}",
    "a refusal": "{{ raise_exception('no such role') }}",
    "a division by zero": "{{ 1 / 0 }}{{ messages[0].content }}",
    "an index out of range": "{{ messages[7].content }}",
    "an unknown filter": "{{ messages | guess }}",
    "a call of nothing": "{{ nothing() }}",
    "an attribute of nothing": "{{ nothing.at.all }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a forbidden attribute": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
    "a number for a text": "{{ messages[0].content + 1 }}",
}


def models() -> Iterator[Bad]:
    """Folders that hold no model, or a broken one, or one of another kind."""
    for name in MODELS:
        yield Bad(f"a model with {name}", instead(ASK, model=f"{{models}}/{name}"), (1,))
    for name in ("T5", "a list as config", "half the weights", "heads that do not divide", "another vocabulary"):
        for command, base in WITH_DATA.items():
            yield Bad(f"{command} a model with {name}", instead(base, model=f"{{models}}/{name}"), (1,))
    for name, path in {
        "empty": "", "blank": " ", "a file": "{in}/answers.jsonl", "a folder": "{in}", "none": "./nowhere",
        "a long name": "x" * 5000, "a long path": "./" + "x" * 5000, "a null": "a\0b", "a hub name": "nobody/nothing",
        "no name": "//", "three parts": "a/b/c", "a URL": "https://example.org/model", "dots": "a/../b",
        "a space": "a b",
        "a link to itself": "{in}/loop.jsonl", "a socket": "{in}/socket", "in Latin-1": "caf\udce9",
    }.items():  # fmt: skip
        yield Bad(f"the model is {name}", instead(ASK, model=path))
    nan = instead(ASK, model="{models}/NaN weights")
    yield Bad("ask a model of NaN", nan, (6,), "cannot be scored")
    yield Bad("ask a model of NaN with a threshold", (*nan, "--threshold", "1e9"), (6,), "cannot be scored")
    yield Bad("ask a model of NaN for JSON", (*nan, "--json"), (6,), "cannot be scored")
    score = instead(ONE, model="{models}/NaN weights")
    yield Bad("score with a model of NaN", score, (6,), "has no score")
    yield Bad("score claims with a model of NaN", (*score, "--by", "clause"), (6,), "has no score")
    for command, base in WITH_DATA.items():
        code = 1 if command == "probe" else 6
        yield Bad(f"{command} a model of NaN", instead(base, model="{models}/NaN weights"), (code,), keeps=True)


def templates() -> Iterator[Bad]:
    """Chat templates that fail, that never end, or that leave the question out."""
    for name in TEMPLATES:
        yield Bad(f"a template with {name}", instead(ASK, model=f"{{models}}/template {name}"), (1,))
    for name in ("a huge range", "the question left out", "a syntax error"):
        for command, base in WITH_DATA.items():
            call = instead(base, model=f"{{models}}/template {name}")
            yield Bad(f"{command} a template with {name}", call, (1,), keeps=True)


# ---- standard input


def standard_input() -> Iterator[Bad]:
    """Standard input that is empty, is no UTF-8, or is wanted twice."""
    wrong: dict[str, bytes] = {
        "empty": b"",
        "blank": b" \r\n",
        "a BOM": codecs.BOM_UTF8,
        "Latin-1": "café?".encode("latin-1"),
        "a stray byte": b"What\xff?",
        "UTF-16": "What?".encode("utf-16"),
        "too long": b"long " * 1000,
    }
    says = {"Latin-1": "stdin is not UTF-8", "a stray byte": "stdin is not UTF-8", "UTF-16": "stdin is UTF-16"}
    for name, content in wrong.items():
        yield Bad(f"ask - : {name}", ("ask", "-", "--model", "{model}"), (1,), says.get(name, ""), content)
        for command, base in WITH_DATA.items():
            yield Bad(f"{command} --data - : {name}", instead(base, data="-"), (1,), "stdin", content)
    both = ("evaluate", "--model", "{model}", "--data", "-", "--labels", "-", "--output", "{out}/e")
    yield Bad("stdin twice", both, says="stdin", stdin=_line().encode())


# ---- the files that the cases name


def make_inputs(folder: Path) -> None:
    """Everything below `{in}`, but for the calibration and what comes from it."""
    good = [f"Which is item {i}?" for i in range(3)]
    for name, fields in {
        "responses": {"response": "This."},
        "answers": {"answers": ["This."]},
        "paraphrases": {"paraphrases": ["What then?"]},
    }.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"question": q, **fields}) + "\n" for q in good))
        (folder / f"link-{name}.jsonl").symlink_to(path)
        os.link(path, folder / f"hard-{name}.jsonl")
    (folder / "again").symlink_to(folder)
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "dangling.jsonl").symlink_to("nothing")
    (folder / "dangling-far.jsonl").symlink_to("no/where")
    os.mkfifo(folder / "pipe")
    (folder / "link-pipe").symlink_to("pipe")
    _make_socket(folder / "socket")
    (folder / "plot.png").write_bytes((folder / "answers.jsonl").read_bytes())
    (folder / "probe.json").write_text("{}")
    _write(folder / "lines", ((f"{i}.jsonl", _second(line)) for i, (line, _) in enumerate(LINES.values())))
    _write(folder / "files", [*FILES.items(), *CSV.items()])
    _write(folder / "labels", ((f"{name}.csv", content) for name, content in LABELS.items()))
    junk = {name: text.encode() if isinstance(text, str) else text for name, text in _JUNK.items()}
    _write(folder / "junk", ((f"{name}.json", content) for name, content in junk.items()))
    for name, content in junk.items():
        _write(folder / "junk" / name, [("run.json", content)])
    for name, content in RUNS.items():
        _write(folder / "runs" / name, [("answers.jsonl", content)])
    old = (folder / "answers.jsonl").read_bytes()
    _write(folder / "old", [(name, old) for name in ("graded.csv", "run.json", "answers.jsonl", "grades.jsonl")])


def edit_calibration(folder: Path, calibration: Path) -> None:
    """A good calibration at `{in}/c.json`, and edited ones."""
    content = calibration.read_text()
    (folder / "c.json").write_text(content)
    record = json.loads(content)
    edited = ((f"{name}.json", json.dumps({**record, **change}).encode()) for name, change in EDITED.items())
    _write(folder / "edited", edited)


def break_models(folder: Path, good: Path, nan: Callable[[Path], None]) -> None:
    """Everything below `{models}`; `nan` fills a model's weights with NaN."""
    broken = {**MODELS, **{f"template {name}": _template(text) for name, text in TEMPLATES.items()}, "NaN weights": nan}
    for name, change in broken.items():
        change(shutil.copytree(good, folder / name))


def _second(line: bytes) -> bytes:
    return _line(question="Who?").encode() + b"\n" + line + b"\n"


def _write(folder: Path, contents: Iterable[tuple[str, bytes]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents:
        (folder / name).write_bytes(content)


def _make_socket(path: Path) -> None:
    """A socket's path may have about a hundred letters only: bound in its own folder."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)
