"""`--ray` where it cannot be followed: each time a word on what to do. What it does is tested by `make check-ray`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import Result

from .helpers import flat, jsonl

Run = Callable[..., Result]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "d.jsonl", [{"question": "q", "answers": ["a"], "response": "r"}])


def test_without_ray(run: Run, data: Path) -> None:
    if find_spec("ray"):
        pytest.skip("ray is installed")
    result = run("score", "--ray", 2, "--model", "pocket", "--data", data)
    assert result.exit_code == 1
    assert "ray is not installed. Run: pip install 'semgrad-guard[ray]'" in flat(result.stderr)


def test_parquet_without_its_library(run: Run, tmp_path: Path) -> None:
    if find_spec("pyarrow"):
        pytest.skip("pyarrow is installed")
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    result = run("score", "--data", tmp_path / "d.parquet")
    assert result.exit_code == 1
    assert "pip install 'semgrad-guard[parquet]'" in flat(result.stderr)
