"""Bad files of every kind: broken lines, tables, outputs, records, sheets of labels and standard input."""

from __future__ import annotations

import codecs
import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .bad_calls import ASK, CALIBRATE, EVALUATE, SCORE, WITH_DATA, Bad, in_turn, over


def line(**fields: Any) -> str:
    good = {"question": "Which?", "answers": ["This."], "response": "This.", "paraphrases": ["What then?"]}
    return json.dumps({**good, **fields})


def _lines() -> dict[str, tuple[bytes, str]]:
    """Broken lines that are broken for every command, and the messages about them."""
    written: dict[str, tuple[str, str]] = {
        "a number as question": (line(question=7), '"question"'),
        "null as question": (line(question=None), '"question"'),
        "an empty question": (line(question=""), '"question"'),
        "a lone surrogate": ('{"question": "\\ud800", "answers": ["a"], "response": "b"}', '"question"'),
        "no question": ('{"answers": ["a"], "response": "b"}', '"question"'),
        "a list as id": (line(id=[1]), '"id"'),
        "a number as response": (line(response=7), '"response"'),
        "true as an answer": (line(answers=[True]), '"answers'),
        "a question twice": ('{"question": "a?", "question": "b?", "answers": ["a"], "response": "b"}', "twice"),
        "6,000 digits": (f'{{"question": "a?", "answers": [{"9" * 6000}], "response": "b"}}', "too long"),
        "cut short": (line()[:25], "not valid JSON"),
        "a list": ("[]", "not a JSON object"),
        "nested deeply": ("[" * 100_000, "nested too deeply"),
    }
    raw = {
        "Latin-1": ('{"question": "café?"}'.encode("latin-1"), "not UTF-8"),
        "a null byte": (b"\0", "not valid JSON"),
    }
    return {**{name: (text.encode(), says) for name, (text, says) in written.items()}, **raw}


LINES = _lines()


def lines() -> Iterator[Bad]:
    """A file whose second line is broken: the line is named, and `gate` stops there."""
    for number, (name, (_, says)) in enumerate(LINES.items()):
        path = f"{{in}}/lines/{number}.jsonl"
        if "answers" not in says:  # score reads none
            yield Bad(f"score: {name}", over(SCORE, "--data", path), (5,), f"line 2 @@{says}", keeps=True)
        gate = ("gate", "--calibration", "{in}/c.json", "--band", "{out}/b.json", "--record", "--data", path)
        yield Bad(f"gate: {name}", (*gate, "--model", "{model}"), (1,), f"line 2 @@{says}")


# ---- whole files


FILES: dict[str, bytes] = {
    "empty.jsonl": b"",
    "utf16-cut.jsonl": line().encode("utf-16")[:-1],
    "binary.jsonl": bytes(range(256)) * 20,
    "gzip.jsonl": b"\x1f\x8b\x08" + bytes(200),
    "cut.json": b'[{"question": "a?"',
    "numbers.json": b"[1, 2, 3]",
    "deep.json": b"[" * 100_000,
}
CSV: dict[str, bytes] = {
    "empty.csv": b"",
    "no-question.csv": b"frage,answers\na?,a\n",
    "unclosed.csv": b'question,answers\n"a?,a\n',
    "surplus.csv": b"question,answers\na?,a,b,c\n",
    "latin1.csv": "question,answers\ncafé?,a\n".encode("latin-1"),
    "huge-cell.csv": b"question,answers\n" + b"x" * 200_000 + b",a\n",
}


NO_FILES = {
    "a folder": "{in}",
    "under a file": "{in}/answers.jsonl/x.json",
    "a link to itself": "{in}/loop.jsonl",
    "a socket": "{in}/socket",
    "empty": "",
    "blank": "  ",
    "a long name": "{in}/" + "x" * 5000 + ".json",
}
"""Paths at which no regular file is, or can be."""


def files() -> Iterator[Bad]:
    """Files that are no data at all, and paths where no file is."""
    paths = {
        **NO_FILES,
        "none": "{in}/none.jsonl",
        "a link to nothing": "{in}/dangling.jsonl",
        "the empty device": os.devnull,
        "an endless device": "/dev/zero",
    }
    for (command, base), name in in_turn(WITH_DATA.items(), FILES):
        yield Bad(f"{command} of {name}", over(base, "--data", f"{{in}}/files/{name}"))
    for (command, base), (name, path) in in_turn(WITH_DATA.items(), paths.items()):
        yield Bad(f"{command} of {name} at a path", over(base, "--data", path))


def csv_files() -> Iterator[Bad]:
    """Tables gone wrong."""
    for name in CSV:
        for command in ("calibrate", "evaluate"):
            yield Bad(f"{command} of {name}", over(WITH_DATA[command], "--data", f"{{in}}/files/{name}"))


# ---- outputs


OVER = "overwrite an input"


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
            yield Bad(f"{command} over its data, {kind}", over(base, "--output", path), (1,), "overwrite an input")
            yield Bad(
                f"{command} over its data, read by {kind}", over(base, "--data", path, "--output", data), (1,), "input"
            )
        yield Bad(
            f"{command} over the model", over(base, "--output", "{model}/config.json"), (1,), "overwrite an input"
        )


def no_files() -> Iterator[Bad]:
    """Outputs that are no regular files, or are nowhere."""
    pipes = {"a pipe": "{in}/pipe", "a link to a pipe": "{in}/link-pipe"}
    places = {**NO_FILES, **pipes, "no folder": "{out}/none/x.json"}
    for command, (name, path) in in_turn(("score", "calibrate", "probe"), places.items()):
        yield Bad(f"{command} --output: {name}", over(WITH_DATA[command], "--output", path))
    for name in ("a pipe", "a socket", "a link to a pipe", "a link to itself", "under a file", "empty", "blank"):
        yield Bad(f"evaluate --output: {name}", over(EVALUATE, "--output", places[name]))
    for name in ("a pipe", "under a file", "empty"):
        yield Bad(f"demo --output: {name}", ("demo", f"--output={places[name]}"))


# ---- records of the program's own


JUNK: dict[str, str | bytes] = {
    "empty": "",
    "an object": "{}",
    "cut": '{"schema_version": 1, "thre',
    "binary": bytes(range(256)),
    "digits": '{"threshold": ' + "9" * 6000 + "}",
    "nested": "[" * 100_000,
}


def records() -> Iterator[Bad]:
    """Calibrations that are none, or are no longer what was written."""
    commands = {"ask": ASK, "score": SCORE}
    paths = ("{in}/none.json", "{in}", "", "{in}/loop.jsonl", "{in}/answers.jsonl")
    for (command, base), path in in_turn(commands.items(), (*(f"{{in}}/junk/{name}.json" for name in JUNK), *paths)):
        yield Bad(f"{command} --calibration {path!r}", (*base, f"--calibration={path}"))
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


RUNS: dict[str, bytes] = {
    "no header": b'{"question": "a?"}\n',
    "a header of another version": b'{"semgrad_guard_record": "scores", "settings": {}}\n',
    "other settings": b'{"semgrad_guard_record": "answers", "settings": {"model": "other"}}\n',
    "text": b"What is this?\n",
    "nested": b"[" * 100_000 + b"\n",
}


def run_records() -> Iterator[Bad]:
    """Records of runs that belong to something else, or are broken."""
    for name in RUNS:
        yield Bad(f"calibrate: {name}", over(CALIBRATE, "--output", f"{{in}}/runs/{name}/c.json"), (1,))
        yield Bad(f"evaluate: {name}", over(EVALUATE, "--output", f"{{in}}/runs/{name}"), (1,))
        again = ("evaluate", "--regrade", "--no-report", "--output", f"{{in}}/runs/{name}")
        yield Bad(f"evaluate --regrade: {name}", again, (1,))


def label_sheets() -> Iterator[Bad]:
    """Sheets of labels for another run, or none."""
    again = ("evaluate", "--regrade", "--no-report", "--output", "{run}")
    for name in LABELS:
        yield Bad(f"labels: {name}", (*again, f"--labels={{in}}/labels/{name}.csv"), (1,))
    for path in ("{in}/none.csv", "{in}", "", "{in}/loop.jsonl"):
        yield Bad(f"labels at {path!r}", (*again, f"--labels={path}"))


LABELS: dict[str, bytes] = {
    "no key": b"question,correct\na,1\n",
    "an unknown key": b"key,correct\nabc,1\n",
    "latin1": "key,correct\ncafé,1\n".encode("latin-1"),
    "unclosed": b'key,correct\n"a,1\n',
    "binary": bytes(range(256)),
}


def standard_input() -> Iterator[Bad]:
    """Standard input that is empty, or is no UTF-8."""
    wrong: dict[str, bytes] = {
        "empty": b"",
        "blank": b" \r\n",
        "a BOM": codecs.BOM_UTF8,
        "Latin-1": "café?".encode("latin-1"),
        "a stray byte": b"What\xff?",
        "UTF-16": "What?".encode("utf-16")[:-1],
        "too long": b"long " * 1000,
    }
    says = {"Latin-1": "stdin is not UTF-8", "a stray byte": "stdin is not UTF-8", "UTF-16": "stdin is UTF-16"}
    for name, content in wrong.items():
        yield Bad(f"ask - : {name}", ("ask", "-", "--model", "{model}"), (1,), says.get(name, ""), content)
        for command, base in WITH_DATA.items():
            yield Bad(f"{command} --data - : {name}", over(base, "--data", "-"), (1,), "stdin", content)


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
    os.mkfifo(folder / "pipe")
    (folder / "link-pipe").symlink_to("pipe")
    _make_socket(folder / "socket")
    (folder / "settings.json").write_text('{"queue": 0, "max_tokens": 9}')
    _write(folder / "lines", ((f"{i}.jsonl", _second(broken)) for i, (broken, _) in enumerate(LINES.values())))
    _write(folder / "files", [*FILES.items(), *CSV.items()])
    _write(folder / "labels", ((f"{name}.csv", content) for name, content in LABELS.items()))
    junk = {name: text.encode() if isinstance(text, str) else text for name, text in JUNK.items()}
    _write(folder / "junk", ((f"{name}.json", content) for name, content in junk.items()))
    for name, content in RUNS.items():
        _write(folder / "runs" / name, [("answers.jsonl", content), ("c.answers.jsonl", content)])
    old = (folder / "answers.jsonl").read_bytes()
    _write(folder / "old", [(name, old) for name in ("graded.csv", "run.json", "answers.jsonl", "grades.jsonl")])


def edit_calibration(folder: Path) -> None:
    """Edited ones of the calibration at `{in}/c.json`."""
    record = json.loads((folder / "c.json").read_text())
    edited = ((f"{name}.json", json.dumps({**record, **change}).encode()) for name, change in EDITED.items())
    _write(folder / "edited", edited)


def _second(broken: bytes) -> bytes:
    return line(question="Who?").encode() + b"\n" + broken + b"\n"


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


ALL = (lines, files, csv_files, outputs, no_files, records, run_records, label_sheets, standard_input)
