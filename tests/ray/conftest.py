"""A cluster of one, and files of questions about the embedded model's world. `make check-ray` runs these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard.questions.data import Question, read_questions

OBJECT_STORE = 100_000_000
"""Bytes: small, so that what is not bounded would not fit."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """For the program as for workers, and as here: numbers are equal to the last digit where threads are."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def ray() -> Generator[Any]:
    pytest.importorskip("ray")
    from semgrad_guard.ray.dataset import library

    found = library()
    found.init("local", num_cpus=2, object_store_memory=OBJECT_STORE, include_dashboard=False, log_to_driver=False)
    yield found
    found.shutdown()


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    return list(read_questions("pocket").rows[:60])


@pytest.fixture(scope="session")
def rows(questions: list[Question]) -> list[dict[str, Any]]:
    """Texts to score: the references."""
    return [
        {"id": str(i), "question": question.question, "context": question.context, "answers": list(question.answers)}
        | {"response": question.answers[0]}
        for i, question in enumerate(questions)
    ]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> Path:
    """The rows in a file of JSON Lines."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def program() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The program in a process of its own."""
    pytest.importorskip("ray")

    def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "semgrad_guard.cli", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    return run
