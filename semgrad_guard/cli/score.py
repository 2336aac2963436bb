"""`semgrad-guard score`: how uncertain a model is of texts that came from anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.command import code_of_run
from semgrad_guard.cli.terminal import OUT, note, progress, say, say_problems
from semgrad_guard.errors import InputError, PromptTooLongError, ReasoningError
from semgrad_guard.files import atomic_write
from semgrad_guard.loading import ModelSource, load_estimator
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.data_files import Output, require_outputs, sole_writer
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.records import Verdict

if TYPE_CHECKING:
    from semgrad_guard.calibration import Drift
    from semgrad_guard.engine.answers.sentences import Segment
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.estimators.gradients import ReplayEstimator
    from semgrad_guard.guard import Policy
    from semgrad_guard.paper.drawing import Claim
    from semgrad_guard.questions.scoring import ScoredText, TextScorer

    Scored = tuple[Question, list[Segment]]


def score(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Annotated[
        Path,
        options.option(
            'Texts to score: a file or folder of JSON Lines, JSON, CSV or Parquet with "question" and "response", and '
            'perhaps "context", the passage that the text was answered from; "-" is stdin.',
            options.DATA,
            "FILE",
            reads=options.stream,
        ),
    ],
    output: Annotated[
        Path | None, options.option("Write the scores there, as JSON Lines.", options.DATA, "FILE", reads=options.path)
    ] = None,
    model: options.Model = POCKET,
    dtype: options.Dtype = None,
    device: options.Device = None,
    template_option: options.Template = None,
    estimator: options.Estimator = None,
    calibration: options.CalibrationFile = None,
    on_no_threshold: options.OnNoThreshold = "abstain",
    by: options.CalibratedBy = None,
    prompt: options.Prompt = "plain",
    system: options.System = None,
    ray: Annotated[
        int | None,
        options.option(
            "Score by so many processes of a Ray cluster: that of RAY_ADDRESS, or one of this machine.",
            options.MODEL,
            "N",
            reads=options.number(int, 1, 1_000_000),
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Score texts from anywhere: another server, a person, a cache.

    The number tells how uncertain this model is of the text as an answer to the question. With a calibration, every
    text also gets an action, and the scores are compared with the calibration's: have they moved? Use the same system
    message, prompt and passages as the calibration.

    With --by sentence, every sentence has a number of its own; all of them come from one replay. With a calibration by
    sentence, every sentence has an action, and is promised or not.
    """
    from semgrad_guard.guard import judged_by
    from semgrad_guard.questions.scoring import TextScorer, no_score, too_long

    in_parts = by == "sentence" and calibration is None
    if ray is not None and in_parts:
        raise typer.BadParameter("--ray is for whole answers: leave --by out, or give a calibration by sentence")
    phrasing, sources = loading.phrasing(prompt, system)
    given = [path for path in (data, calibration, Path(model)) if path is not None]
    written = [] if output is None else [Output(output, "file of scores", are_scores)]
    require_outputs(written, inputs=[*given, *sources])
    options.one_from_stdin(data=data, prompt=prompt, system=system)
    source = loading.source_of(model, dtype=dtype, device=device, template_option=template_option)
    found = loading.read_data(data, needs="response")
    rows, problems = found.rows, found.problems
    phrasing.require(rows)
    with nullcontext() if output is None else sole_writer(output):
        if in_parts:
            chosen = replay_estimator(estimator)
            left_out, unscored = score_parts(
                rows, loading.load(source), chosen, phrasing=phrasing, output=output, as_json=as_json
            )
            raise typer.Exit(code_of_run(unscored=unscored, broken=left_out or problems))
        policy = loading.load_policy(calibration, on_no_threshold)
        estimate = load_estimator(estimator, policy)
        on_doubt = None if policy is None else judged_by(policy.calibration, by, None)
        scorer = TextScorer(loading.load(source), estimate, policy, phrasing, on_doubt)
        texts = score_texts(rows, scorer, source, workers=ray)
        scored = [(row, text.verdict) for row, text in zip(rows, texts, strict=True) if text.verdict is not None]
        left_out = [too_long(row, text.too_long) for row, text in zip(rows, texts, strict=True) if text.too_long]
        say_problems(left_out)
        if not scored:
            raise InputError("none of the texts could be scored")
        moved = drift_of(scored, policy)
        if moved is not None:
            scored = [(row, verdict.revised(drift=moved.moved)) for row, verdict in scored]
        show_texts(scored, moved, output, as_json=as_json, decided=policy is not None)
        unscored = [no_score(row, verdict.reason) for row, verdict in scored if verdict.status != "scored"]
        say_problems(unscored)
        raise typer.Exit(code_of_run(unscored=unscored, broken=left_out or problems))


_ASKED = {"id", "question", "response"}
_CLAIMS = {*_ASKED, "estimator", "by", "segments"}
"""The fields of a line with --by."""


def are_scores(path: Path) -> bool:
    """Whether a file holds only lines of `score`, and nothing that a user has added."""
    whole = {*_ASKED, "schema", "digest", *Verdict.model_fields}
    for line in path.read_bytes().splitlines():
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            return False
        names = set(cast("dict[str, Any]", record)) if isinstance(record, dict) else set[str]()
        if names != _CLAIMS and not {*_ASKED, "digest", "uncertainty", "action"} <= names <= whole:
            return False
    return True


def deliver(records: Iterable[Mapping[str, object]], output: Path | None, *, as_json: bool) -> None:
    """Write the lines to the file, if there is one, and to stdout on request."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    text = "".join(lines)
    if output is not None:
        atomic_write(output, text)
        note(f"{len(lines)} scores are in {output}.", label=None, style="green")
    if as_json:
        typer.echo(text, nl=False)


def score_texts(
    rows: Sequence[Question], scorer: TextScorer, source: ModelSource, *, workers: int | None
) -> list[ScoredText]:
    """The scored texts: of this process, or of so many workers of Ray, which load the same model from `source`."""
    texts: list[ScoredText] = []
    with progress("Scoring") as tell:
        tell(0, len(rows))
        if workers is not None:
            from semgrad_guard.ray.dataset import Scoring
            from semgrad_guard.ray.dataset import score_texts as spread

            given = source.for_workers(scorer.model.identity)
            stated = os.environ.get("OMP_NUM_THREADS", "")
            threads = int(stated) if stated.isdigit() else 1
            scoring = Scoring(given, scorer.estimator, scorer.policy, scorer.phrasing, scorer.by_sentence, threads)
            for text in spread(rows, scoring, batch_size=loading.BATCH, workers=workers):
                texts.append(text)
                tell(len(texts), len(rows))
            return texts
        for start in range(0, len(rows), loading.BATCH):
            texts += scorer(rows[start : start + loading.BATCH])
            tell(len(texts), len(rows))
    return texts


def drift_of(scored: Sequence[tuple[Question, Verdict]], policy: Policy | None) -> Drift | None:
    """Whether the scores have moved since the calibration; None without one that has scores."""
    from semgrad_guard.calibration import drift
    from semgrad_guard.guard.sentences import watched_score

    if policy is None or policy.calibration is None or not policy.calibration.scores:
        return None
    return drift([watched_score(verdict) for _, verdict in scored], policy.calibration.scores)


def show_texts(
    scored: Sequence[tuple[Question, Verdict]],
    moved: Drift | None,
    output: Path | None,
    *,
    as_json: bool,
    decided: bool,
) -> None:
    """Write and show the scores."""
    from semgrad_guard.cli.rendering import drift_line, scores_view
    from semgrad_guard.questions.scoring import score_record

    deliver([score_record(row, verdict) for row, verdict in scored], output, as_json=as_json)
    if not as_json:
        rows = [(row.question, verdict) for row, verdict in scored]
        OUT.print(scores_view(rows, decided=decided))
    if moved is not None and (as_json or moved.moved):
        say(drift_line(moved))
    elif moved is not None:
        OUT.print(drift_line(moved))


def replay_estimator(name: str | None) -> ReplayEstimator:
    """The requested estimator, if it reads its number off a replay: only those know parts of an answer."""
    from semgrad_guard.estimators.gradients import ReplayEstimator

    estimator = load_estimator(name)
    if not isinstance(estimator, ReplayEstimator):
        raise typer.BadParameter(
            f"{estimator.name} compares whole answers; --by needs an estimator of one replay, e.g. hybridgrad"
        )
    return estimator


def score_parts(
    rows: Sequence[Question],
    model: LanguageModel,
    estimator: ReplayEstimator,
    *,
    phrasing: Phrasing,
    output: Path | None,
    as_json: bool,
) -> tuple[list[str], list[str]]:
    """Score the sentences of every text, and show them.

    The result are warnings about texts without numbers: those left out, and those without a score for any segment.
    """
    from semgrad_guard.questions.scoring import no_score, too_long

    scored: list[Scored] = []
    left_out: list[str] = []
    with progress("Scoring") as tell:
        tell(0, len(rows))
        for number, row in enumerate(rows, start=1):
            conversation = phrasing.conversation(row)
            try:
                found = model.score(conversation, row.response or "", by="sentence", objective=estimator.objective)
            except (PromptTooLongError, ReasoningError) as error:
                left_out.append(too_long(row, str(error)))
            else:
                scored.append((row, found))
            tell(number, len(rows))
    say_problems(left_out)
    if not scored:
        raise InputError("none of the texts could be scored")
    deliver([_record(text, estimator) for text in scored], output, as_json=as_json)
    if not as_json:
        _show(scored, estimator)
    unscored = [
        no_score(row, next((one.scores.reason for one in segments if one.scores and one.scores.reason), None))
        for row, segments in scored
        if all(uncertainty is None for _, uncertainty in _claims(segments, estimator))
    ]
    say_problems(unscored)
    return left_out, unscored


def _claims(segments: Sequence[Segment], estimator: ReplayEstimator) -> list[Claim]:
    return [(segment.text, None if segment.scores is None else estimator.value(segment.scores)) for segment in segments]


def _record(scored: Scored, estimator: ReplayEstimator) -> dict[str, Any]:
    row, segments = scored
    parts = [
        {"text": text, "start": segment.start, "end": segment.end, "uncertainty": uncertainty}
        for segment, (text, uncertainty) in zip(segments, _claims(segments, estimator), strict=True)
    ]
    text = {"id": row.id, "question": row.question, "response": row.response}
    return {**text, "estimator": estimator.name, "by": "sentence", "segments": parts}


def _show(scored: Sequence[Scored], estimator: ReplayEstimator) -> None:
    from semgrad_guard.cli.rendering import ROWS_SHOWN, claims_view

    for row, segments in scored[:ROWS_SHOWN]:
        OUT.print(claims_view(row.question, _claims(segments, estimator), estimator=estimator.name))
    if len(scored) > ROWS_SHOWN:
        OUT.print(f"… and {len(scored) - ROWS_SHOWN} more: --output FILE or --json gives them all.")
