"""Bad inputs of every kind, made by rule: what a hurried person, a broken export or a hostile file hands to a command.

Arguments name places: `{in}` holds files that must come out as they went in, `{out}` is empty, `{model}` is a folder
with a good model, `{models}` holds broken ones.
"""

from __future__ import annotations

import codecs
import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from .bad_calls import WITH_DATA, Bad, instead
from .bad_files import (
    CSV,
    EDITED,
    FILES,
    JUNK,
    LABELS,
    LINES,
    RUNS,
    csv_files,
    files,
    hub_names,
    label_sheets,
    line,
    lines,
    no_files,
    other_outputs,
    outputs,
    records,
    run_records,
    shared_outputs,
)
from .bad_models import models, templates
from .bad_options import conflicts, names, numbers, texts


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


def standard_input() -> Iterator[Bad]:
    """Standard input that is empty, is no UTF-8, or is wanted twice."""
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
            yield Bad(f"{command} --data - : {name}", instead(base, data="-"), (1,), "stdin", content)
    both = ("evaluate", "--model", "{model}", "--data", "-", "--labels", "-", "--output", "{out}/e")
    yield Bad("stdin twice", both, says="stdin", stdin=line().encode())


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
    _write(folder / "lines", ((f"{i}.jsonl", _second(broken)) for i, (broken, _) in enumerate(LINES.values())))
    _write(folder / "files", [*FILES.items(), *CSV.items()])
    _write(folder / "labels", ((f"{name}.csv", content) for name, content in LABELS.items()))
    junk = {name: text.encode() if isinstance(text, str) else text for name, text in JUNK.items()}
    _write(folder / "junk", ((f"{name}.json", content) for name, content in junk.items()))
    for name, content in junk.items():
        _write(folder / "junk" / name, [("run.json", content)])
    for name, content in RUNS.items():
        _write(folder / "runs" / name, [("answers.jsonl", content), ("c.answers.jsonl", content)])
    old = (folder / "answers.jsonl").read_bytes()
    _write(folder / "old", [(name, old) for name in ("graded.csv", "run.json", "answers.jsonl", "grades.jsonl")])


def edit_calibration(folder: Path, calibration: Path) -> None:
    """A good calibration at `{in}/c.json`, and edited ones."""
    content = calibration.read_text()
    (folder / "c.json").write_text(content)
    record = json.loads(content)
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
