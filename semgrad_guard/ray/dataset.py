"""`score`: the rows of a Ray dataset with a verdict each; `score_texts`: the same for the command.

Ray Data's own pool of workers does it, on the cluster to which Ray is connected: it restarts workers that die.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from socket import create_connection
from typing import Any

from pydantic import ValidationError

from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import ClusterError, InputError, require_installed
from semgrad_guard.estimators import Estimator
from semgrad_guard.files import reason
from semgrad_guard.guard import Policy, estimator_of, judged_by
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.data import Phrasing, Question
from semgrad_guard.questions.run import ScoredText, TextScorer
from semgrad_guard.records import METADATA_KEY
from semgrad_guard.settings import JudgedBy, ModelOptions, OnDoubt

_NUMBERS = dict.fromkeys(("uncertainty", "confidence", "threshold"), "float64")
_FIELDS = dict.fromkeys(("status", "action", "reason"), "string") | _NUMBERS | {"promised": "bool_"}
"""The fields of a row's verdict by Arrow's types, the same in every block. The whole of it is JSON, in `record`."""
_SECONDS = 10  # in which a cluster that is there answers
_BATCHES_A_BLOCK = 8  # Ray's own work is done once a block


def score(
    dataset: Any,
    *,
    model: ModelSource | str = ModelOptions.model,
    estimator: Estimator | None = None,
    calibration: Calibration | Path | str | None = None,
    by: JudgedBy | None = None,
    system: str | None = None,
    batch_size: int = 8,
    workers: int = 1,
    threads: int = 1,
) -> Any:
    """A Ray dataset with the same rows in the same order, and with a verdict each in the column `semgrad_guard`.

    It has `status`, `action`, `reason`, `uncertainty`, `confidence`, `threshold`, `promised`, and all of it as JSON in
    `record`. Nothing is computed before the result is read or written. Batches are as a single process makes them, and
    so are the numbers (with as many threads). A row that cannot be scored is `unscored`, with the reason.

    Args:
        dataset: a `ray.data.Dataset` with the columns `question` and `response`, and perhaps `context` and `id`.
        model: a name, a folder that every machine has, a hub id, or a `ModelSource` with options of loading.
        estimator: the calibration's, or HybridGrad.
        calibration: gives confidence, a threshold and its promise.
        by: `sentence` scores every sentence of a text by itself, and decides about it; default: as the calibration.
        system: a system message before every question.
        batch_size: texts scored at once.
        workers: how many processes, each of which loads the model once; on "cuda" each takes a GPU.
        threads: the CPUs that each of them takes.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: a number or `by` is out of its range, or the dataset lacks a column, or has one of that name.
        CalibrationError: the calibration cannot be used.
    """
    library()
    for name, number in (("batch_size", batch_size), ("workers", workers), ("threads", threads)):
        if number < 1:
            raise InputError(f"{name} must be at least 1, not {number}")
    columns: list[str] = dataset.columns() or []
    if lacking := [name for name in ("question", "response") if name not in columns]:
        has = ", ".join(columns) or "none"
        raise InputError(f'the dataset has no column "{lacking[0]}" (it has {has}): dataset.rename_columns({{...}})')
    if METADATA_KEY in columns:
        raise InputError(f'the dataset has a column "{METADATA_KEY}" already; drop it: dataset.drop_columns([...])')
    held = Calibration.load(calibration) if isinstance(calibration, str | Path) else calibration
    policy = None if held is None else Policy.from_calibration(held)
    source = ModelSource.of(model) if isinstance(model, str) else model
    by_sentence = judged_by(held, by, None)
    if held is not None and by_sentence != judged_by(held, None, None):
        raise InputError(f"by={by!r} is not the unit of the calibration {held.id}: leave by out, or calibrate again")
    scoring = Scoring(source, estimator or estimator_of(held), policy, Phrasing(system), by_sentence, threads)
    return _mapped(dataset, _RowScorer, scoring, batch_size, workers)


@dataclass(frozen=True)
class Scoring:
    """How texts are scored; plain data, which the workers are sent."""

    source: ModelSource
    estimator: Estimator
    policy: Policy | None
    phrasing: Phrasing
    by_sentence: OnDoubt | None
    threads: int = 1


def score_texts(rows: Sequence[Question], scoring: Scoring, *, batch_size: int, workers: int) -> Iterator[ScoredText]:
    """The scored texts in their order, as they come.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: there is no cluster where Ray looks for one, or its workers fail.
    """
    ray = library()
    host, colon, port = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")
    try:
        if colon:  # where nothing listens, Ray would try for ever
            create_connection((host, int(port)), timeout=_SECONDS).close()
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        given = ray.data.from_items([{"text": row.model_dump_json()} for row in rows])
        found = _mapped(given, _JsonScorer, scoring, batch_size, workers)
        for row in found.iter_rows():
            yield ScoredText.model_validate_json(row["text"])
    except (OSError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"Ray could not do this: {reason(error)}. RAY_ADDRESS names the cluster (HOST:PORT, ray://HOST:PORT); "
            "without it Ray takes the one of this machine, or starts one."
        ) from error


def library() -> Any:
    """The package `ray`, with its datasets; `MissingExtraError` where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports its use over the network, unless told not to
    require_installed("ray", extra="ray")
    import_module("ray.data")
    return import_module("ray")


def _mapped(dataset: Any, worker: type[_Worker], scoring: Scoring, batch_size: int, workers: int) -> Any:
    """The dataset through a pool of workers, in batches that do not depend on its blocks."""
    # Workers that took all CPUs would wait for rows forever: reading rows needs a CPU, too.
    spare = max(library().cluster_resources().get("CPU", 1.0) - 1, 0.5)
    blocks = dataset.repartition(target_num_rows_per_block=batch_size * _BATCHES_A_BLOCK, strict=True)
    blocks.context.execution_options.preserve_order = True
    return blocks.map_batches(
        worker,
        fn_constructor_args=(scoring,),
        batch_size=batch_size,
        batch_format="pyarrow",
        concurrency=workers,
        num_cpus=min(float(scoring.threads), round(spare / workers, 3)),
        num_gpus=1 if scoring.source.on_gpu else 0,
        udf_modifying_row_count=False,
    )


class _Worker:
    """A worker's model."""

    def __init__(self, scoring: Scoring) -> None:
        import torch

        torch.set_num_threads(scoring.threads)
        model = scoring.source.load()
        self._score = TextScorer(model, scoring.estimator, scoring.policy, scoring.phrasing, scoring.by_sentence)


class _JsonScorer(_Worker):
    """Questions as JSON to texts as JSON."""

    def __call__(self, table: Any) -> Mapping[str, Any]:
        rows = [Question.model_validate_json(text) for text in table["text"].to_pylist()]
        return {"text": [found.model_dump_json() for found in self._score(rows)]}


class _RowScorer(_Worker):
    """Rows to rows with a column more."""

    def __call__(self, table: Any) -> Any:
        arrow: Any = import_module("pyarrow")
        questions = [_question(row) for row in table.to_pylist()]
        found = iter(self._score([question for question in questions if isinstance(question, Question)]))
        shown: list[dict[str, Any]] = []
        for question in questions:
            text = next(found) if isinstance(question, Question) else ScoredText(too_long=question)
            response = "" if isinstance(question, str) else question.response or ""
            record = (text.verdict or self._score.unscored(response, text.too_long or "")).metadata()
            shown.append({name: record.get(name) for name in _FIELDS} | {"record": json.dumps(record)})
        kind = arrow.struct([(name, getattr(arrow, of)()) for name, of in (*_FIELDS.items(), ("record", "string"))])
        return table.append_column(METADATA_KEY, arrow.array(shown, type=kind))


def _question(row: Mapping[str, Any]) -> Question | str:
    """The row as it is scored, or why it cannot be."""
    try:
        question = Question(question=row["question"], response=row["response"], context=row.get("context"))
    except ValidationError as error:
        return f"the row has no usable {error.errors()[0]['loc'][0]}"
    return question if (question.response or "").strip() else "the row has no response to score"
