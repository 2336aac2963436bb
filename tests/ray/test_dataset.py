"""`semgrad_guard.ray.score`: a verdict for every row of a dataset, whatever its blocks, in bounded memory."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Verdict, calibrate
from semgrad_guard.errors import InputError
from semgrad_guard.paper.experiment import Experiment
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.scoring import TextScorer

from .conftest import OBJECT_STORE
from .processes import killer, own_workers, resident

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
    assert {name: written[name] for name in ("gnll", "action", "model", "fingerprint", "scored_tokens")} == {
        name: getattr(alone[0], name) for name in ("gnll", "action", "model", "fingerprint", "scored_tokens")
    }


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
    """Four times the store passes through it, and less than the store is written to the disk; no process holds it."""
    from semgrad_guard.ray import score

    size, count = 100_000, 4 * OBJECT_STORE // 100_000

    def made(row: dict[str, Any]) -> dict[str, Any]:
        some = rows[int(row["id"]) % len(rows)]
        return {"id": row["id"], "question": some["question"], "response": some["response"], "note": "x" * size}

    given = ray.data.range(count, override_num_blocks=count // 20).map(made)
    before, spilt = resident(os.getpid()), spilled()
    seen, most_here, most_there = list[int](), 0, 0
    for row in score(given).iter_rows():
        if row["semgrad_guard"]["status"] == "scored":
            seen.append(int(row["id"]))
        if row["id"] % 100 == 0:
            most_here = max(most_here, resident(os.getpid()) - before)
            most_there = max([most_there, *map(resident, own_workers("MapWorker"))])
    assert seen == list(range(count))
    assert most_here < OBJECT_STORE, "this process gathers what has passed"
    assert 0 < most_there < WORKER + OBJECT_STORE, "a worker gathers what has passed"
    assert spilled() - spilt < OBJECT_STORE


WORKER = 900_000_000
"""Bytes that are more than a worker takes by itself: torch, Ray, pyarrow and the embedded model."""


def spilled() -> int:
    """Bytes that this cluster has ever written to the disk, since they did not fit its object store."""
    from ray._private.internal_api import memory_summary

    found = re.search(r"Spilled (\d+) MiB", memory_summary(stats_only=True))
    return 1024**2 * int(found[1]) if found else 0


KILLS = 6


def test_killed_workers_of_a_dataset_lose_nothing(ray: Any, rows: list[dict[str, Any]], alone: list[Verdict]) -> None:
    from semgrad_guard.ray import score

    turns = 60
    many = [{**row, "turn": turn} for turn in range(turns) for row in rows[:56]]
    killed: list[int] = []
    with killer("MapWorker", killed, most=KILLS, pauses=(0.2, 3)):
        found = list(score(ray.data.from_items(many, override_num_blocks=turns)).iter_rows())
    assert len(set(killed)) == KILLS
    assert [(row["turn"], row["id"]) for row in found] == [(row["turn"], row["id"]) for row in many]
    assert numbers(found) == [verdict.uncertainty for verdict in alone[:56]] * turns


def test_records_travel(ray: Any, model: LanguageModel, questions: list[Question], tmp_path: Path) -> None:
    """Scores, verdicts, evidence and evaluated answers through pickle, and through an object store."""
    estimator = HybridGrad()
    evidence = model.generate("What is the capital of Japan?", GenerationOptions(max_tokens=4)).evidence
    verdict = TextScorer(model, estimator)([Question(question="What?", response="Tea.")])[0].verdict
    experiment = Experiment(model, [estimator], GenerationOptions(max_tokens=4))
    (evaluated,) = experiment.run(questions[:1], tmp_path / "run.jsonl")
    score = estimator(evidence)
    for record in (score, verdict, evaluated, estimator, evidence.prompt):
        for twin in (pickle.loads(pickle.dumps(record)), ray.get(ray.put(record))):  # noqa: S301 - just written
            assert twin == record
    for twin in (pickle.loads(pickle.dumps(evidence)), ray.get(ray.put(evidence))):  # noqa: S301 - just written
        assert (twin.text, twin.response_ids) == (evidence.text, evidence.response_ids)
        assert estimator(twin).uncertainty == score.uncertainty
