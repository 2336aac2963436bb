"""`score --ray`: the numbers of the single process, and a cluster that is not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

pytestmark = pytest.mark.heavy

Program = Callable[..., CompletedProcess[str]]


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file without what took how long."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row | {"details": {**row["details"], "scoring_ms": None}} for row in found]


def test_the_numbers_are_those_of_one_process(
    program: Program, data: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    for name, more in (("alone", ()), ("spread", ("--ray", 2))):
        found = program("score", "--data", data, "--output", tmp_path / f"{name}.jsonl", *more)
        assert found.returncode == 0, found.stderr
    assert records(tmp_path / "spread.jsonl") == records(tmp_path / "alone.jsonl")
    assert len(records(tmp_path / "alone.jsonl")) == len(rows)


def test_no_cluster_there(program: Program, data: Path, tmp_path: Path) -> None:
    nowhere = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    found = program("score", "--data", data, "--output", tmp_path / "out.jsonl", "--ray", 1, env=nowhere)
    assert found.returncode == 1
    stderr = " ".join(found.stderr.replace("│", " ").split())
    assert "RAY_ADDRESS names the cluster" in stderr, stderr
