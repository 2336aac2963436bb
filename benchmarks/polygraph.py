"""HybridGrad and LM-Polygraph's estimators: extra time over plain greedy generation, process by process in turns.

    python -m venv .venv-polygraph
    .venv-polygraph/bin/pip install torch==2.13.0 lm-polygraph==0.7.0     (2.2 GB on disk with torch's CPU build)
    python benchmarks/polygraph.py --environment .venv-polygraph [--rounds 5] [--output polygraph.json] [--quick]

LM-Polygraph (https://github.com/IINemo/lm-polygraph) has an environment of its own because it brings sixty packages;
0.7.0 runs with torch 2.13 and transformers 5. Both sides load one checkpoint of random weights and answer a prompt of
the same length. Every round is a process of each side, in an order that alternates; a process measures plain generation
and then its own ways, in CPU seconds, imports and loading left out. A way is the answer with its score, as a user of
the library calls it. Its extra time is a ratio to plain generation in the same process, minus 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import command
import torch
from judges import LARGE_NLI, TINY_NLI, word_tokenizer
from machine import about, spread
from rich.console import Console
from shapes import Setting, build
from tables import machine_line, table

SETTINGS = (Setting(60, 8), Setting(60, 32))
SIDES = {"ours": "semgrad-guard", "polygraph": "LM-Polygraph"}
PLAIN = "plain"


def save_models(folder: Path, shape: str, dtype: str, *, quick: bool) -> None:
    """The checkpoints that both sides load: `folder`/model and `folder`/judge."""
    model = build(shape, getattr(torch, dtype))
    model.save_pretrained(folder / "model")
    word_tokenizer(model.config.vocab_size).save_pretrained(folder / "model")
    (TINY_NLI if quick else LARGE_NLI).save(folder / "judge")


def run(side: str, python: str, folder: Path, setting: Setting) -> dict[str, float]:
    """CPU seconds of one side's ways, from a process of its own.

    Raises:
        SystemExit: the process failed; the message ends with its output.
    """
    found = folder / "seconds.json"
    worker = str(Path(__file__).with_name("polygraph_worker.py"))
    line = [python, worker, side, str(folder), str(setting.prompt), str(setting.answer), str(found)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if side == "polygraph":  # nothing of this environment
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(line, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(line)} failed; it said at last:\n{done.stderr[-2000:]}")
    return json.loads(found.read_text())


def measured(pythons: Mapping[str, str], folder: Path, setting: Setting, rounds: int) -> Iterator[dict[str, Any]]:
    """One setting, after every round: seconds per way and round, by side, and the extra time over plain generation."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    console = Console(stderr=True)
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else reversed(list(SIDES)):
            with console.status(f"{setting}: round {number + 1} of {rounds}, {side}"):
                runs[side].append(run(side, pythons[side], folder, setting))
        yield {"setting": str(setting), "seconds": runs, "extra": {side: extra_time(runs[side]) for side in SIDES}}


def extra_time(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Each way over plain generation, minus 1: median, least, greatest of the processes."""
    return {way: spread([run[way] / run[PLAIN] - 1 for run in runs]) for way in runs[0] if way != PLAIN}


def markdown(report: Mapping[str, Any]) -> str:
    """The table for a page of the documentation."""
    lines: list[tuple[str, ...]] = []
    for row in report["rows"]:
        for side, name in SIDES.items():
            for way, (middle, low, high) in row["extra"][side].items():
                seconds = statistics.median(run[way] for run in row["seconds"][side])
                share = f"{middle:+.0%} ({low:+.0%} to {high:+.0%})"
                lines.append((row["setting"], name, way, f"{seconds:.2f}", share))
    header = ("prompt/answer", "environment", "answer and score", "seconds", "extra over plain generation")
    theirs = ", ".join(f"{package} {version}" for package, version in report["theirs"].items())
    return "\n".join([machine_line(report), "", f"Their environment: {theirs}.", "", *table(header, lines)]) + "\n"


def versions(python: Path) -> dict[str, str]:
    """The measurement in the other environment.

    Raises:
        SystemExit: LM-Polygraph is not there.
    """
    packages = ("lm-polygraph", "torch", "transformers")
    code = (
        f"import json; from importlib.metadata import version; print(json.dumps({{p: version(p) for p in {packages}}}))"
    )
    done = subprocess.run([str(python), "-c", code], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{python} knows no LM-Polygraph; install it as --help says")
    return json.loads(done.stdout)


def main() -> None:
    arguments = parsed()
    theirs = arguments.environment / "bin" / "python"
    if not theirs.exists():
        sys.exit(f"{theirs} does not exist; make the environment first, as --help says")
    shape, rounds = ("small", 1) if arguments.quick else (arguments.shape, arguments.rounds)
    machine = {**about(), "threads": 1}
    report: dict[str, Any] = {"shape": shape, "device": "cpu", "dtype": arguments.dtype, "machine": machine, "rows": []}
    report["theirs"] = versions(theirs)
    with tempfile.TemporaryDirectory() as name:
        save_models(Path(name), shape, arguments.dtype, quick=arguments.quick)
        for setting in SETTINGS[:1] if arguments.quick else SETTINGS:
            pythons = {"ours": sys.executable, "polygraph": str(theirs)}
            rows: list[dict[str, Any]] = report["rows"]
            rows.append({})
            for row in measured(pythons, Path(name), setting, rounds):
                rows[-1] = row
                command.keep(report, arguments.output)
    print(markdown(report))


def parsed() -> argparse.Namespace:
    options = command.parser(__doc__, rounds="processes of each side")
    options.add_argument("--environment", type=Path, required=True, help="the environment that LM-Polygraph is in")
    options.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    options.add_argument("--quick", action="store_true", help="small shapes, one round: does everything run?")
    return command.parsed(options)


if __name__ == "__main__":
    main()
