"""Workers are killed at random moments: nothing is lost, nothing is there twice, and no number changes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel
from semgrad_guard.errors import BindingMismatchError, ClusterError, ModelNotFoundError
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.runs.answers import Answer
from semgrad_guard.evaluation.runs.run import Answering, Batch, collect_answers, recipe_of

from .processes import killer, own_workers

pytestmark = pytest.mark.heavy
KILLS = 20
OPTIONS = GenerationOptions(max_tokens=8)
ESTIMATORS = {"hybridgrad": HybridGrad()}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel.from_pretrained("pocket")


def collect(ray: Any, path: Path, model: LanguageModel, questions: list[Question], **changes: Any) -> list[Answer]:
    from semgrad_guard.loading import ModelSource
    from semgrad_guard.ray.cluster import Job, spread

    answering = Answering(model, ESTIMATORS, OPTIONS)
    job = Job(ModelSource.of("pocket", identity=model.identity), recipe_of(answering))
    return collect_answers(
        questions,
        path,
        answering,
        batch_size=2,
        spread=lambda batches: spread(ray, job, batches, workers=2),
        **changes,
    )


def test_twenty_kills(ray: Any, model: LanguageModel, questions: list[Question], tmp_path: Path) -> None:
    whole = collect_answers(questions, tmp_path / "alone.jsonl", Answering(model, ESTIMATORS, OPTIONS), batch_size=2)
    kills: list[int] = []
    path = tmp_path / "spread.jsonl"

    def wait_for_kills(done: int, total: int) -> None:
        """As many kills as the run is far: or it would be over before most of them, on a fast machine."""
        while len(kills) < KILLS * done // total and set(own_workers("Worker")) - set(kills):
            time.sleep(0.1)

    with killer("Worker", kills, most=KILLS, pauses=(0, 8)):
        found = collect(ray, path, model, questions, on_progress=wait_for_kills)
    assert len(set(kills)) == KILLS
    assert found == whole
    lines = path.read_text().splitlines()[1:]
    assert sorted(lines) == sorted((tmp_path / "alone.jsonl").read_text().splitlines()[1:])


class _StoppedError(BaseException):
    """Like Ctrl-C."""


def test_an_interrupted_run_continues(
    ray: Any, model: LanguageModel, questions: list[Question], tmp_path: Path
) -> None:
    path, progress = tmp_path / "run.jsonl", list[int]()

    def stop(done: int, _: int) -> None:
        if done >= 10:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        collect(ray, path, model, questions[:20], on_progress=stop)
    kept = path.read_text()
    assert len(kept.splitlines()) == 11
    found = collect(ray, path, model, questions[:20], on_progress=lambda done, _: progress.append(done))
    assert progress == list(range(10, 21, 2))
    assert path.read_text().startswith(kept)
    assert [result.question for result in found] == [question.question for question in questions[:20]]


def dying(model: LanguageModel) -> Any:
    """A recipe for workers that die over every batch."""
    return lambda rows, start: os.kill(os.getpid(), signal.SIGKILL)


def test_a_batch_that_kills_is_named(ray: Any, questions: list[Question], monkeypatch: pytest.MonkeyPatch) -> None:
    from semgrad_guard.loading import ModelSource
    from semgrad_guard.ray import cluster

    monkeypatch.setattr(cluster, "_DEATHS", 3)
    job = cluster.Job(ModelSource.of("pocket"), dying)
    with pytest.raises(ClusterError, match=r"3 workers died over the batch from row 1 on: .*--workers"):
        list(cluster.spread(ray, job, [Batch(0, questions[:2])], workers=2))


def test_errors_come_as_they_are(ray: Any, model: LanguageModel, questions: list[Question], tmp_path: Path) -> None:
    from semgrad_guard.loading import ModelSource
    from semgrad_guard.ray.cluster import Job, spread

    recipe = recipe_of(Answering(model, ESTIMATORS, OPTIONS))
    for source, error in (
        (ModelSource(model=str(tmp_path / "nowhere")), ModelNotFoundError),
        (ModelSource.of("pocket", dtype="bfloat16", identity=model.identity), BindingMismatchError),
    ):
        with pytest.raises(error):
            list(spread(ray, Job(source, recipe), [Batch(0, questions[:2])], workers=1))
