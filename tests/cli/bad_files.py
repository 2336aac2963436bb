"""Bad files of every kind: broken lines, tables, outputs, records and sheets of labels."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from typing import Any

from .bad_calls import ASK, CALIBRATE, EVALUATE, SCORE, WITH_DATA, Bad, in_turn, instead


def line(**fields: Any) -> str:
    good = {"question": "Which?", "answers": ["This."], "response": "This.", "paraphrases": ["What then?"]}
    return json.dumps({**good, **fields})


def _lines() -> dict[str, tuple[bytes, str]]:
    """Broken lines that are broken for every command, and the messages about them."""
    written: dict[str, tuple[str, str]] = {
        "a number as question": (line(question=7), '"question"'),
        "a fraction as question": (line(question=0.5), '"question"'),
        "NaN as question": (line(question=float("nan")), '"question"'),
        "true as question": (line(question=True), '"question"'),
        "null as question": (line(question=None), '"question"'),
        "a list as question": (line(question=["Which?"]), '"question"'),
        "an object as question": (line(question={"words": "Which?"}), '"question"'),
        "an empty question": (line(question=""), '"question"'),
        "a blank question": (line(question=" \t "), '"question"'),
        "a lone surrogate": ('{"question": "\\ud800", "answers": ["a"], "response": "b"}', '"question"'),
        "no question": ('{"answers": ["a"], "response": "b"}', '"question"'),
        "a number as context": (line(context=7), '"context"'),
        "NaN as id": (line(id=float("nan")), '"id"'),
        "infinity as id": (line(id=float("inf")), '"id"'),
        "a list as id": (line(id=[1]), '"id"'),
        "an object as kind": (line(kind={}), '"kind"'),
        "a number as response": (line(response=7), '"response"'),
        "NaN as response": (line(response=float("nan")), '"response"'),
        "a number as paraphrase": (line(paraphrases=[7]), '"paraphrases'),
        "NaN as an answer": (line(answers=[float("nan")]), '"answers'),
        "true as an answer": (line(answers=[True]), '"answers'),
        "null among the answers": (line(answers=["a", None]), '"answers'),
        "a list among the answers": (line(answers=[["a"]]), '"answers'),
        "answers in an unknown form": (line(answers={"best": "a"}), '"answers'),
        "answers in a form gone wrong": (line(answers={"value": {"x": 1}}), '"answers'),
        "a question twice": ('{"question": "a?", "question": "b?", "answers": ["a"], "response": "b"}', "twice"),
        "answers twice": ('{"question": "a?", "answers": ["a"], "answers": ["b"], "response": "b"}', "twice"),
        "a key twice inside": ('{"question": "a?", "answers": {"value": "a", "value": "b"}, "response": "b"}', "twice"),
        "6,000 digits": (f'{{"question": "a?", "answers": [{"9" * 6000}], "response": "b"}}', "too long"),
        "6,000 digits unread": (f'{{"question": "a?", "n": {"9" * 6000}, "answers": ["a"], "response": "b"}}', "long"),
        "a huge float": ('{"question": "a?", "answers": [1e999], "response": "b", "id": 1e999}', "wrong"),
        "cut short": (line()[:25], "not valid JSON"),
        "single quotes": ("{'question': 'a?', 'answers': ['a']}", "not valid JSON"),
        "a comma at the end": ('{"question": "a?",}', "not valid JSON"),
        "a comment": ("// nothing", "not valid JSON"),
        "two objects": (line() + line(), "not valid JSON"),
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
        "a BOM within the file": (codecs.BOM_UTF8 + line().encode(), "not valid JSON"),
        "a null byte": (b"\0", "not valid JSON"),
        "an overlong encoding": (b'{"question": "\xc0\xaf"}', "not UTF-8"),
    }
    return {**{name: (text.encode(), says) for name, (text, says) in written.items()}, **raw}


LINES = _lines()


def lines() -> Iterator[Bad]:
    """A file whose second line is broken: the line is named, and `gate` stops there."""
    for number, (name, (_, says)) in enumerate(LINES.items()):
        path = f"{{in}}/lines/{number}.jsonl"
        if "answers" not in says:  # score reads none
            yield Bad(f"score: {name}", instead(SCORE, data=path), (5,), f"line 2 @@{says}", keeps=True)
        gate = ("gate", "--calibration", "{in}/c.json", "--band", "{out}/b.json", "--record", "--data", path)
        yield Bad(f"gate: {name}", (*gate, "--model", "{model}"), (1,), f"line 2 @@{says}")


# ---- whole files


FILES: dict[str, bytes] = {
    "empty.jsonl": b"",
    "blank.jsonl": b"\n \n\t\n",
    "bom.jsonl": codecs.BOM_UTF8,
    "utf16-cut.jsonl": line().encode("utf-16")[:-1],
    "utf32.jsonl": line().encode("utf-32-le"),
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
    "utf16-cut.csv": "question,answers\na?,a\n".encode("utf-16")[:-1],
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
    for (command, base), name, heavy in in_turn(WITH_DATA.items(), FILES):
        yield Bad(f"{command} of {name}", instead(base, data=f"{{in}}/files/{name}"), heavy=heavy)
    for (command, base), (name, path), heavy in in_turn(WITH_DATA.items(), paths.items()):
        yield Bad(f"{command} of {name} at a path", instead(base, data=path), heavy=heavy)


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
    calibrated = (*instead(SCORE, output="{in}/c.json"), "--calibration", "{in}/c.json")
    yield Bad("score over its calibration", calibrated, (1,), "overwrite an input")
    for name in ("graded.csv", "run.json", "answers.jsonl", "grades.jsonl"):
        call = instead(EVALUATE, data=f"{{in}}/old/{name}", output="{in}/old")
        yield Bad(f"evaluate over its {name}", call, (1,), "overwrite an input")
    over = (*instead(EVALUATE, output="{in}/old"), "--labels", "{in}/old/graded.csv")
    yield Bad("evaluate over its labels", over, (1,), "overwrite an input")


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
    for command, (name, path), heavy in in_turn(("score", "calibrate", "probe"), places.items()):
        yield Bad(f"{command} --output: {name}", instead(WITH_DATA[command], output=path), heavy=heavy)
    for name in ("a pipe", "a socket", "a link to a pipe", "a link to itself", "under a file", "empty", "blank"):
        yield Bad(f"evaluate --output: {name}", instead(EVALUATE, output=places[name]))
    for name in ("a pipe", "under a file", "empty"):
        yield Bad(f"demo --output: {name}", ("demo", f"--output={places[name]}"))


def shared_outputs() -> Iterator[Bad]:
    """Two outputs in one file."""
    for name, path in {
        "the same": "{out}/c.json",
        "dotted": "{out}/../out/c.json",
        "in capitals": "{out}/C.JSON",
    }.items():
        yield Bad(f"labels in the calibration, {name}", (*CALIBRATE, f"--labels={path}"), (1,))


# ---- records of the program's own


JUNK: dict[str, str | bytes] = {
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
        "calibration": {"ask": ASK, "score": SCORE},
    }
    for option, commands in options.items():
        for (command, base), name, heavy in in_turn(commands.items(), JUNK):
            yield Bad(f"{command} --{option}: {name}", (*base, f"--{option}={{in}}/junk/{name}.json"), heavy=heavy)
        paths = ("{in}/none.json", "{in}", "", "{in}/loop.jsonl", "{in}/answers.jsonl")
        for (command, base), path, heavy in in_turn(commands.items(), paths):
            yield Bad(f"{command} --{option} {path!r}", (*base, f"--{option}={path}"), heavy=heavy)
    for name in EDITED:
        yield Bad(f"ask with a calibration, {name}", (*ASK, f"--calibration={{in}}/edited/{name}.json"))


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
        yield Bad(f"calibrate: {name}", instead(CALIBRATE, output=f"{{in}}/runs/{name}/c.json"), (1,))
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
    "utf16, cut": "key,correct\n".encode("utf-16")[:-1],
    "latin1": "key,correct\ncafé,1\n".encode("latin-1"),
    "unclosed": b'key,correct\n"a,1\n',
    "binary": bytes(range(256)),
}
