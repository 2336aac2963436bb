"""`score`: the rows of a Ray dataset with a verdict each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.evaluation.runs.scoring import TextScorer
from semgrad_guard.guard import Policy, estimator_of, judged_by
from semgrad_guard.loading import ModelSource
from semgrad_guard.ray.cluster import library
from semgrad_guard.records import METADATA_KEY, Verdict
from semgrad_guard.settings import DtypeName, JudgedBy, ModelOptions, OnDoubt, Thinking

_TEXTS = ("status", "action", "estimator", "model", "fingerprint", "calibration_id", "prompt_template", "tier")
_NUMBERS = ("uncertainty", "confidence", "threshold", "semgrad", "paragrad", "mean_entropy")
_MORE_NUMBERS = ("gnll", "max_probability", "deviation", "scoring_ms")
_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(_TEXTS, "string"),
    **dict.fromkeys((*_NUMBERS, *_MORE_NUMBERS), "float64"),
    **dict.fromkeys(("promised", "familiar"), "bool_"),
    "scored_tokens": "int64",
    "reason": "string",
    "digest": "string",
}
"""The fields of a row's verdict, by Arrow's types: the same in every block, even where values are missing."""
_SENTENCE: Mapping[str, str] = {
    **dict.fromkeys(("start", "end", "tokens", "leans_on"), "int64"),
    **dict.fromkeys(("action", "reason"), "string"),
    **dict.fromkeys(("uncertainty", "compared", "confidence"), "float64"),
    "promised": "bool_",
}
"""Those of a sentence of it."""
_BATCHES_A_BLOCK = 8
"""Ray's own work is done once a block."""


def score(  # noqa: PLR0913 - every option of loading a model
    dataset: Any,
    *,
    model: str = ModelOptions.model,
    estimator: Estimator | None = None,
    calibration: Calibration | Path | str | None = None,
    by: JudgedBy | None = None,
    system: str | None = None,
    dtype: DtypeName | None = None,
    device: str | None = None,
    quantization_config: dict[str, Any] | None = None,
    template_options: dict[str, Any] | None = None,
    thinking: Thinking = ModelOptions.thinking,
    batch_size: int = 8,
    workers: int = 1,
    threads: int = 1,
) -> Any:
    """A Ray dataset with the same rows in the same order, and with a verdict each in the column `semgrad_guard`.

    Nothing is computed before the result is read or written (`iter_rows()`, `write_parquet(...)`). Each
    worker is a process that loads the model once. Batches are as a single process makes them, whatever the blocks of
    the dataset are, and so are the numbers (with as many threads).

    Args:
        dataset: a `ray.data.Dataset` with the columns `question` and `response`, and perhaps `context` and `id`.
        model: a name, a folder that every machine has, or a hub id.
        estimator: the calibration's, or HybridGrad.
        calibration: gives confidence, a threshold and its promise.
        by: `sentence` scores every sentence of a text by itself, and decides about it; default: as the calibration.
        system: a system message before every question.
        dtype, device, quantization_config, template_options: as in `LanguageModel.from_pretrained`; on "cuda" each
            worker takes a GPU.
        thinking: `on` or `off` by the chat template's own switch; `auto` leaves it to the template.
        batch_size: texts scored at once.
        workers: how many processes.
        threads: the CPUs that each of them takes.

    A row without a question or a response, or one that does not fit the context window, is `unscored`, with the reason.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: a number is out of its range, `by` is not the calibration's unit, or the dataset lacks a column, or
            has one of that name.
        CalibrationError: the calibration cannot be used.
    """
    ray = library()
    for name, number in (("batch_size", batch_size), ("workers", workers), ("threads", threads)):
        if number < 1:
            raise InputError(f"{name} must be at least 1, not {number}")
    columns: list[str] = dataset.columns() or []
    if lacking := [name for name in ("question", "response") if name not in columns]:
        raise InputError(
            f'the dataset has no column "{lacking[0]}" (it has {", ".join(columns) or "none"}); rename one: '
            "dataset.rename_columns({...})"
        )
    if METADATA_KEY in columns:
        raise InputError(f'the dataset has a column "{METADATA_KEY}" already; drop it: dataset.drop_columns([...])')
    held = Calibration.load(calibration) if isinstance(calibration, str | Path) else calibration
    policy = None if held is None else Policy.from_calibration(held)
    source = ModelSource.of(
        model,
        dtype=dtype,
        device=device,
        quantization_config=quantization_config,
        template_option=template_options,
        thinking=thinking,
    )
    by_sentence = judged_by(held, by, None)
    if held is not None and by_sentence != judged_by(held, None, None):
        raise InputError(f"by={by!r} is not the unit of the calibration {held.id}: leave by out, or calibrate again")
    scoring = _Scoring(source, estimator or estimator_of(held), policy, system, threads, by_sentence)
    # Workers that took all CPUs would wait for rows forever: reading rows needs a CPU, too.
    spare = max(ray.cluster_resources().get("CPU", 1.0) - 1, 0.5)
    blocks = dataset.repartition(target_num_rows_per_block=batch_size * _BATCHES_A_BLOCK, strict=True)
    blocks.context.execution_options.preserve_order = True
    return blocks.map_batches(
        _RowScorer,
        fn_constructor_args=(scoring,),
        batch_size=batch_size,
        batch_format="pyarrow",
        concurrency=workers,
        num_cpus=min(float(threads), round(spare / workers, 3)),
        num_gpus=1 if source.on_gpu else 0,
        udf_modifying_row_count=False,
    )


@dataclass(frozen=True)
class _Scoring:
    """How rows are scored; plain data, which the workers are sent."""

    source: ModelSource
    estimator: Estimator
    policy: Policy | None
    system: str | None
    threads: int
    by_sentence: OnDoubt | None


class _RowScorer:
    """A worker's model, which scores a block's rows."""

    def __init__(self, scoring: _Scoring) -> None:
        import torch

        torch.set_num_threads(scoring.threads)
        model, phrasing = scoring.source.load(), Phrasing(scoring.system)
        self._score = TextScorer(model, scoring.estimator, scoring.policy, phrasing, scoring.by_sentence)

    def __call__(self, table: Any) -> Any:
        """The table with a column more."""
        import pyarrow  # pyright: ignore[reportMissingImports]

        arrow: Any = pyarrow

        def struct(fields: Mapping[str, str], *more: Any) -> Any:
            return arrow.struct([*((name, getattr(arrow, of)()) for name, of in fields.items()), *more])

        kind = struct(_FIELDS, ("sentences", arrow.list_(struct(_SENTENCE))))
        questions = [_question(row) for row in table.to_pylist()]
        found = iter(self._score([question for question in questions if isinstance(question, Question)]))
        verdicts: list[Verdict] = []
        for question in questions:
            if isinstance(question, str):
                verdicts.append(self._score.unscored("", question))
                continue
            text = next(found)
            verdicts.append(text.verdict or self._score.unscored(question.response or "", text.too_long or ""))
        records = [verdict.metadata() for verdict in verdicts]
        shown = [{name: record.get(name) for name in (*_FIELDS, "sentences")} for record in records]
        return table.append_column(METADATA_KEY, arrow.array(shown, type=kind))


def _question(row: Mapping[str, Any]) -> Question | str:
    """The row as it is scored, or why it cannot be."""
    try:
        question = Question(question=row["question"], response=row["response"], context=row.get("context"))
    except ValidationError as error:
        return f"the row has no usable {error.errors()[0]['loc'][0]}"
    return question if (question.response or "").strip() else "the row has no response to score"
