"""`--ray` on the command line: the numbers of the single process, from every kind of file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

pytestmark = pytest.mark.heavy

Program = Callable[..., CompletedProcess[str]]
TIMED = ("scoring_ms", "milliseconds", "generation_ms")


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file without what took how long."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in each.items() if name not in TIMED} for each in found]


def by_key(path: Path) -> dict[str, Any]:
    """The answers of a run, whatever their order, after its settings."""
    settings, *answers = records(path)
    assert len({each["key"] for each in answers}) == len(answers), "an answer is there twice"
    return {"": settings, **{each["key"]: each for each in answers}}


def test_calibrate(program: Program, data: Path, tmp_path: Path) -> None:
    given = ("calibrate", "--data", data, "--max-tokens", 8, "--alpha", 0.3)
    alone = program(*given, "--output", tmp_path / "alone.json")
    spread = program(*given, "--output", tmp_path / "spread.json", "--ray", "--workers", 2)
    assert alone.returncode == spread.returncode == 0, spread.stderr
    assert by_key(tmp_path / "spread.answers.jsonl") == by_key(tmp_path / "alone.answers.jsonl")
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "spread"))
    assert (second["threshold"], second["scores"]) == (first["threshold"], first["scores"])


def test_evaluate(program: Program, data: Path, tmp_path: Path) -> None:
    given = ("evaluate", "--data", data, "--limit", 20, "--max-tokens", 6, "--no-report")
    methods = [word for name in ("hybridgrad", "gnll", "semantic_entropy") for word in ("--methods", name)]
    alone = program(*given, *methods, "--output", tmp_path / "alone")
    spread = program(*given, *methods, "--output", tmp_path / "spread", "--ray", "--workers", 2)
    assert alone.returncode == spread.returncode == 0, spread.stderr
    assert by_key(tmp_path / "spread" / "answers.jsonl") == by_key(tmp_path / "alone" / "answers.jsonl")


def partitioned(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a folder of files of one kind, in folders that say what they hold."""
    for number in range(3):
        part = folder / f"kind={number}"
        part.mkdir(parents=True)
        some = [{name: row[name] for name in ("id", "question", "response")} for row in rows[number::3]]
        path = part / f"part-0.{kind}"
        if kind == "parquet":
            import pyarrow as arrow
            from pyarrow import parquet

            parquet.write_table(arrow.Table.from_pylist(some), path)
        elif kind == "csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(some[0]))
                writer.writeheader()
                writer.writerows(some)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_score_over_a_partitioned_folder(
    program: Program, rows: list[dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    folder = partitioned(kind, tmp_path / "data", rows)
    outputs = [tmp_path / "alone.jsonl", tmp_path / "spread.jsonl"]
    for output, more in zip(outputs, ((), ("--ray", "--workers", 2)), strict=True):
        found = program("score", "--data", folder, "--output", output, *more)
        assert found.returncode == 0, found.stderr
    assert records(outputs[1]) == records(outputs[0])
    assert len(records(outputs[1])) == len(rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.jsonl", "data", "spread.jsonl"]
