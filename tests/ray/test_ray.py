"""Ray: a verdict for every row of a dataset, whatever its blocks, in bounded memory; and `score --ray`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from semgrad_guard import HybridGrad, LanguageModel, Verdict, calibrate
from semgrad_guard.errors import InputError
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.run import TextScorer

from .conftest import OBJECT_STORE

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel.from_pretrained("pocket")


@pytest.fixture(scope="module")
def alone(model: LanguageModel, rows: list[dict[str, Any]]) -> list[Verdict]:
    scorer = TextScorer(model, HybridGrad())
    questions = [Question.model_validate(row) for row in rows]
    texts = [text for i in range(0, len(questions), 8) for text in scorer(questions[i : i + 8])]
    return [text.verdict for text in texts if text.verdict]


def record_of(row: dict[str, Any]) -> dict[str, Any]:
    """The whole verdict of a row."""
    return json.loads(row["semgrad_guard"]["record"])


def numbers(found: list[dict[str, Any]]) -> list[Any]:
    return [row["semgrad_guard"]["uncertainty"] for row in found]


@pytest.mark.parametrize("blocks", [1, 7])
def test_rows_and_numbers_are_the_single_processs(
    ray: Any, rows: list[dict[str, Any]], alone: list[Verdict], tmp_path: Path, blocks: int
) -> None:
    from semgrad_guard.ray import score

    given = ray.data.from_items(rows, override_num_blocks=blocks)
    found = score(given, workers=2).take_all()
    assert [{k: v for k, v in row.items() if k != "semgrad_guard"} for row in found] == given.take_all()
    assert numbers(found) == [verdict.uncertainty for verdict in alone]
    written = record_of(found[0])
    assert written["action"] == alone[0].action
    for name in ("gnll", "model", "fingerprint", "scored_tokens"):
        assert written["details"][name] == getattr(alone[0].details, name)


def test_rows_that_cannot_be_scored_stay_and_say_why(ray: Any, rows: list[dict[str, Any]]) -> None:
    from semgrad_guard.ray import score

    plain = [{"question": row["question"], "response": row["response"]} for row in rows[:2]]
    odd = [{"question": " ", "response": "r"}, {"question": "q", "response": ""}]
    odd += [{"question": "q", "response": "word " * 5000}]
    found = score(ray.data.from_items([plain[0], *odd, plain[1]])).take_all()
    outcomes = [(row["semgrad_guard"]["status"], row["semgrad_guard"]["reason"]) for row in found]
    assert [status for status, _ in outcomes] == ["scored", *["unscored"] * 3, "scored"]
    assert {row["semgrad_guard"]["action"] for row in found[1:4]} == {"abstain"}
    assert outcomes[1][1] == "the row has no usable question"
    assert outcomes[2][1] == "the row has no response to score"
    assert "context window" in outcomes[3][1]


def test_every_sentence_has_a_score_and_an_action(ray: Any, model: LanguageModel, rows: list[dict[str, Any]]) -> None:
    from semgrad_guard.ray import score

    row = rows[0] | {"response": f"{rows[0]['response']}. It is in the north. Many ships come there."}
    given = ray.data.from_items([row, {**row, "question": " "}])
    found, empty = score(given, by="sentence").take_all()
    (expected,) = TextScorer(model, HybridGrad(), by_sentence="stop")([Question.model_validate(row)])
    assert expected.verdict is not None
    assert record_of(found)["sentences"] == expected.verdict.metadata()["sentences"]
    assert len(record_of(found)["sentences"]) == 3
    assert record_of(empty)["sentences"] == []
    whole = calibrate([1.0] * 40, [True] * 40, alpha=0.2, delta=0.1)
    with pytest.raises(InputError, match=r"not the unit of the calibration .*: leave by out"):
        score(given, calibration=whole, by="sentence")


def test_columns(ray: Any) -> None:
    from semgrad_guard.ray import score

    with pytest.raises(InputError, match=r'no column "response" .*rename_columns'):
        score(ray.data.from_items([{"question": "q", "answer": "a"}]))
    with pytest.raises(InputError, match='a column "semgrad_guard" already'):
        score(ray.data.from_items([{"question": "q", "response": "a", "semgrad_guard": "x"}]))


def test_a_dataset_larger_than_the_object_store(ray: Any, rows: list[dict[str, Any]]) -> None:
    """Four times the store passes through it, and less than the store is written to the disk."""
    from semgrad_guard.ray import score

    size, count = 100_000, 4 * OBJECT_STORE // 100_000

    def made(row: dict[str, Any]) -> dict[str, Any]:
        some = rows[int(row["id"]) % len(rows)]
        return {"id": row["id"], "question": some["question"], "response": some["response"], "note": "x" * size}

    given, spilt = ray.data.range(count, override_num_blocks=count // 20).map(made), spilled()
    seen = [int(row["id"]) for row in score(given).iter_rows() if row["semgrad_guard"]["status"] == "scored"]
    assert seen == list(range(count))
    assert spilled() - spilt < OBJECT_STORE


def spilled() -> int:
    """Bytes that this cluster has ever written to the disk, since they did not fit its object store."""
    from ray._private.internal_api import memory_summary

    found = re.search(r"Spilled (\d+) MiB", memory_summary(stats_only=True))
    return 1024**2 * int(found[1]) if found else 0


# `score --ray`: the numbers of the single process, and a cluster that is not there.


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
