"""`semgrad-guard ask` and `score`: how sure a model is of its answer to one question, and of texts from anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from semgrad_guard.cli import from_options
from semgrad_guard.cli.from_options import Output, one_from_stdin, require_outputs
from semgrad_guard.cli.terminal import OUT, ExitCode, code_of_run, note, progress, say, say_problems, status
from semgrad_guard.errors import BindingMismatchError, EmptyPromptError, InputError
from semgrad_guard.files import STDIN, atomic_write
from semgrad_guard.loading import ModelSource, load_estimator, pocket_policy
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.data_files import read_text
from semgrad_guard.questions.run_record import sole_writer
from semgrad_guard.records import Verdict
from semgrad_guard.settings import DtypeName, JudgedBy, OnNoThreshold

if TYPE_CHECKING:
    from semgrad_guard.calibration import Drift
    from semgrad_guard.guard import Policy
    from semgrad_guard.questions.run import ScoredText, TextScorer


def ask(  # noqa: PLR0913  # a command's options are its arguments
    question: str,
    *,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    estimator: str | None = None,
    calibration: Path | None = None,
    on_no_threshold: OnNoThreshold = "abstain",
    prompt: str = "plain",
    system: str | None = None,
    context: str | None = None,
    max_tokens: int = 256,
    as_json: bool = False,
) -> None:
    """Ask a local model, and see how uncertain its answer is.

    With a calibration, answers that are too uncertain are withheld. Use the same system message, prompt and longest
    answer as the calibration, and a passage if its questions had one.
    The embedded model brings its calibration along; it is used unless you give another or use other settings than its
    own.
    """
    one_from_stdin(question=question, prompt=prompt, system=system, context=context)
    text = read_text(STDIN).strip() if question == str(STDIN) else question
    if not text.strip():
        raise EmptyPromptError("The question is empty; ask something.")
    passage = None if context is None else from_options.text_or_file(context)[0]
    if passage is not None and not passage.strip():
        raise EmptyPromptError("The passage is empty; leave --context out to ask without one.")
    row, phrasing = Question(question=text, context=passage), from_options.phrasing(prompt, system)[0]
    phrasing.require([row])
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option)
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.guard import Answerer, Guard, judged_by
    from semgrad_guard.guard.policy import lets_every_score_through

    policy = from_options.load_policy(calibration, on_no_threshold)
    embedded = pocket_policy() if policy is None and model == POCKET else None
    chosen = load_estimator(estimator, policy or embedded)
    by_sentence = judged_by(None if policy is None else policy.calibration, None, None)
    answerer = Answerer(
        from_options.load(source),
        chosen,
        GenerationOptions(max_tokens=max_tokens, seed=0),
        prompt_template=phrasing.name([row]),
        by_sentence=by_sentence,
    )
    if policy is not None:
        policy.check(answerer.binding())
    elif embedded is not None:
        try:
            embedded.check(answerer.binding())
            policy = embedded
        except BindingMismatchError as error:
            note(f"The embedded model's calibration does not fit and is left out. {error}")
    guard = Guard(
        answerer.model,
        policy or lets_every_score_through("abstain"),
        estimator=chosen,
        options=answerer.options,
        prompt_template=answerer.prompt_template,
    )
    with status("Answering …"):
        verdict = guard(phrasing.conversation(row))
    _show(verdict, text, as_json=as_json)
    if verdict.action == "answer":
        raise typer.Exit(ExitCode.OK)
    if verdict.status == "scored":
        raise typer.Exit(ExitCode.ABSTAINED)
    # An answer without a score is an error unless an option allows it.
    doubt = " Is the model intact?" if verdict.status == "failed" else ""
    say(f"The answer cannot be scored: {verdict.reason or 'no reason is known'}.{doubt}", label="Warning")
    raise typer.Exit(ExitCode.UNSCORED)


def _show(verdict: Verdict, question: str, *, as_json: bool) -> None:
    if as_json:
        thought = {"reasoning": verdict.details.reasoning} if verdict.details.reasoning else {}
        record = {"question": question, "text": verdict.text, **thought, **verdict.metadata(keep_draft=True)}
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    from semgrad_guard.cli.rendering import verdict_view

    OUT.print(verdict_view(verdict))


def score(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Path,
    output: Path | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    estimator: str | None = None,
    calibration: Path | None = None,
    on_no_threshold: OnNoThreshold = "abstain",
    by: JudgedBy | None = None,
    prompt: str = "plain",
    system: str | None = None,
    ray: int | None = None,
    as_json: bool = False,
) -> None:
    """Score texts from anywhere: another server, a person, a cache.

    The number tells how uncertain this model is of the text as an answer to the question. With a calibration, every
    text also gets an action, and the scores are compared with the calibration's: have they moved? Use the same system
    message, prompt and passages as the calibration.

    With --by sentence, every sentence has a number of its own; all of them come from one replay. With a calibration by
    sentence, every sentence has an action, and is promised or not.
    """
    from semgrad_guard.cli.rendering import drift_line, scores_view
    from semgrad_guard.guard import judged_by
    from semgrad_guard.questions.run import TextScorer

    phrasing, sources = from_options.phrasing(prompt, system)
    given = [path for path in (data, calibration, Path(model)) if path is not None]
    written = [] if output is None else [Output(output, "file of scores", are_scores)]
    require_outputs(written, inputs=[*given, *sources])
    one_from_stdin(data=data, prompt=prompt, system=system)
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option)
    found = from_options.read_data(data, needs="response")
    phrasing.require(found.rows)
    with nullcontext() if output is None else sole_writer(output):
        policy = from_options.load_policy(calibration, on_no_threshold)
        on_doubt = judged_by(None if policy is None else policy.calibration, by, None)
        scorer = TextScorer(from_options.load(source), load_estimator(estimator, policy), policy, phrasing, on_doubt)
        texts = list(zip(found.rows, _scored(found.rows, scorer, source, workers=ray), strict=True))
        left_out = [f"{_name(row)} is left out: {text.too_long}" for row, text in texts if text.too_long]
        say_problems(left_out)
        scored = [(row, text.verdict) for row, text in texts if text.verdict is not None]
        if not scored:
            raise InputError("none of the texts could be scored")
        if (moved := _drift(scored, policy)) is not None:
            scored = [(row, verdict.revised(drift=moved.moved)) for row, verdict in scored]
        records = [
            {"id": row.id, "question": row.question, "response": row.response, **verdict.metadata()}
            for row, verdict in scored
        ]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        if output is not None:
            atomic_write(output, "".join(lines))
            note(f"{len(lines)} scores are in {output}.", label=None, style="green")
    if as_json:
        typer.echo("".join(lines), nl=False)
    else:
        rows = [(row.question, verdict) for row, verdict in scored]
        OUT.print(scores_view(rows, decided=policy is not None))
    if moved is not None:
        tell = say if as_json or moved.moved else OUT.print
        tell(drift_line(moved))
    unscored = [
        f"{_name(row)} has no score: {verdict.reason or 'no reason is known'}."
        for row, verdict in scored
        if verdict.status != "scored"
    ]
    say_problems(unscored)
    raise typer.Exit(code_of_run(unscored=unscored, broken=left_out or found.problems))


def _name(row: Question) -> str:
    return repr(row.id or row.question[:60])


def are_scores(path: Path) -> bool:
    """Whether a file holds only lines of `score`, and nothing that a user has added."""
    least = {"id", "question", "response", "digest", "uncertainty", "action"}
    for line in path.read_bytes().splitlines():
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            return False
        names = set(cast("dict[str, Any]", record)) if isinstance(record, dict) else set[str]()
        if not least <= names <= {*least, "schema", *Verdict.model_fields}:
            return False
    return True


def _scored(
    rows: Sequence[Question], scorer: TextScorer, source: ModelSource, *, workers: int | None
) -> list[ScoredText]:
    """The scored texts: of this process, or of so many workers of Ray, which load the same model from `source`."""
    texts: list[ScoredText] = []
    size = from_options.BATCH
    here = (text for start in range(0, len(rows), size) for text in scorer(rows[start : start + size]))
    with progress("Scoring") as tell:
        tell(0, len(rows))
        for text in here if workers is None else _spread(rows, scorer, source, workers):
            texts.append(text)
            tell(len(texts), len(rows))
    return texts


def _spread(rows: Sequence[Question], scorer: TextScorer, source: ModelSource, workers: int) -> Iterator[ScoredText]:
    from semgrad_guard.ray.dataset import Scoring, score_texts

    stated = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(stated) if stated.isdigit() else 1
    given = source.for_workers(scorer.model.identity)
    scoring = Scoring(given, scorer.estimator, scorer.policy, scorer.phrasing, scorer.by_sentence, threads)
    yield from score_texts(rows, scoring, batch_size=from_options.BATCH, workers=workers)


def _drift(scored: Sequence[tuple[Question, Verdict]], policy: Policy | None) -> Drift | None:
    """Whether the scores have moved since the calibration; None without one that has scores."""
    from semgrad_guard.calibration import DriftMonitor
    from semgrad_guard.guard.decision import watched_score

    if policy is None or policy.calibration is None or not policy.calibration.scores:
        return None
    monitor = DriftMonitor(policy.calibration)
    for _, verdict in scored:
        monitor.add(watched_score(verdict))
    return monitor.report()
