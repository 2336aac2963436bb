"""`--ray` on the command line: the numbers of the single process, from every kind of file."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest

from tests.ports import free_port

from .conftest import OBJECT_STORE

pytestmark = pytest.mark.heavy

Program = Callable[..., CompletedProcess[str]]
TIMED = ("scoring_ms", "milliseconds", "generation_ms")
OF_THE_FOLDER = ("folder",)


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file without what took how long."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMED} for row in found]


def by_key(path: Path) -> dict[str, Any]:
    """The answers of a run, whatever their order, after its settings."""
    settings, *answers = records(path)
    assert len({answer["key"] for answer in answers}) == len(answers), "an answer is there twice"
    return {"": settings, **{answer["key"]: answer for answer in answers}}


def test_calibrate(program: Program, data: Path, tmp_path: Path) -> None:
    given = ("calibrate", "--data", data, "--max-tokens", 8, "--alpha", 0.3)
    alone = program(*given, "--output", tmp_path / "alone.json")
    spread = program(*given, "--output", tmp_path / "spread.json", "--ray", "--workers", 2)
    assert alone.returncode == spread.returncode == 0, spread.stderr
    assert by_key(tmp_path / "spread.answers.jsonl") == by_key(tmp_path / "alone.answers.jsonl")
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "spread"))
    assert (second["threshold"], second["scores"]) == (first["threshold"], first["scores"])


def untimed(found: Any) -> Any:
    """A JSON document without what took how long, and where it was written."""
    if isinstance(found, dict):
        fields = cast("dict[str, Any]", found)
        return {name: untimed(value) for name, value in fields.items() if name not in (*TIMED, *OF_THE_FOLDER)}
    return [untimed(row) for row in cast("list[Any]", found)] if isinstance(found, list) else found


def graded(path: Path) -> list[dict[str, str]]:
    """The rows of a table of graded answers without what took how long."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("ms: ")} for row in csv.DictReader(file)]


def test_evaluate(program: Program, data: Path, tmp_path: Path) -> None:
    given = ("evaluate", "--data", data, "--limit", 20, "--max-tokens", 6, "--no-report", "--json")
    methods = [word for name in ("hybridgrad", "gnll", "semantic_entropy") for word in ("--methods", name)]
    alone = program(*given, *methods, "--output", tmp_path / "alone")
    spread = program(*given, *methods, "--output", tmp_path / "spread", "--ray", "--workers", 2)
    assert alone.returncode == spread.returncode == 0, spread.stderr
    assert by_key(tmp_path / "spread" / "answers.jsonl") == by_key(tmp_path / "alone" / "answers.jsonl")
    metrics = untimed(json.loads(alone.stdout))
    assert untimed(json.loads(spread.stdout)) == metrics
    assert all(method["auroc"] is not None for method in metrics["methods"].values()), "something was measured"
    run = untimed(json.loads((tmp_path / "alone" / "run.json").read_text()))
    assert untimed(json.loads((tmp_path / "spread" / "run.json").read_text())) == run
    assert len(run["scores"]) == 3
    assert graded(tmp_path / "spread" / "graded.csv") == graded(tmp_path / "alone" / "graded.csv")
    sheets = [(tmp_path / name / "labels.csv").read_bytes() for name in ("spread", "alone")]
    assert sheets[0] == sheets[1]


@pytest.fixture
def running(tmp_path: Path) -> Generator[tuple[str, dict[str, str]]]:
    """The address of a cluster of a process of its own, and the environment in which `auto` is that one."""
    pytest.importorskip("ray")
    port = free_port()
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # sockets take short paths
        environment = os.environ | {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "between-these-processes" * 2}
        start = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
        more = ["--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--object-store-memory={OBJECT_STORE}"]
        log = (tmp_path / "head.log").open("w")
        with log, subprocess.Popen([*start, *more], env=environment, stdout=log, stderr=subprocess.STDOUT) as head:
            try:
                while "This command will now block" not in (tmp_path / "head.log").read_text():
                    assert head.poll() is None, (tmp_path / "head.log").read_text()
                    time.sleep(0.2)
                yield f"127.0.0.1:{port}", environment
            finally:
                head.terminate()


def test_a_cluster_that_runs_already(
    program: Program, data: Path, tmp_path: Path, running: tuple[str, dict[str, str]]
) -> None:
    """`auto` and HOST:PORT: the work is done there, and the cluster keeps running."""
    address, environment = running
    given = ("score", "--data", data)
    assert program(*given, "--output", tmp_path / "alone.jsonl").returncode == 0
    for name in (address, "auto"):
        output = tmp_path / f"{name.partition(':')[0]}.jsonl"
        found = program(*given, "--output", output, "--ray", name, env=environment)
        assert found.returncode == 0, found.stderr
        assert records(output) == records(tmp_path / "alone.jsonl")
    jobs = subprocess.run(
        [sys.executable, "-c", JOBS, address], env=environment, capture_output=True, text=True, check=True
    )
    assert int(jobs.stdout.split()[-1]) == 2, "both were done by the cluster"


JOBS = """
import sys, ray
from ray._private.state import jobs
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(len([each for each in jobs() if each["JobID"] != ray.get_runtime_context().get_job_id()]))
"""


def test_no_cluster_there(program: Program, data: Path, tmp_path: Path) -> None:
    """Reported at once: Ray by itself would look for one for minutes."""
    nowhere = f"127.0.0.1:{free_port()}"
    found = program("score", "--data", data, "--output", tmp_path / "out.jsonl", "--ray", nowhere)
    assert found.returncode == 1
    stderr = " ".join(found.stderr.replace("│", " ").split())
    assert f"There is no Ray cluster at '{nowhere}': [Errno 111] Connection refused. Start one (ray start" in stderr


def partitioned(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a folder of files of one kind, in folders that name their contents."""
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
