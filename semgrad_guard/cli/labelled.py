"""The commands over labelled questions: `plan`, `calibrate`, `gate`, `evaluate` and `probe`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from semgrad_guard.cli import from_options, terminal
from semgrad_guard.cli.from_options import Output, one_from_stdin, read_by, require_outputs
from semgrad_guard.cli.terminal import ERR, OUT, ExitCode, code_of_run, note, say, say_unscored, show_line
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.files import beside
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import QuestionFile, with_paraphrases
from semgrad_guard.questions.run_record import EvaluatedAnswer, is_record, read_record, sole_writer
from semgrad_guard.settings import DtypeName, JudgedBy, OnCut, OnDoubt, OnNoThreshold

if TYPE_CHECKING:
    from semgrad_guard.calibration.calibration_set import Copies
    from semgrad_guard.guard import Policy

_SIZES = (50, 100, 300, 1000)
_AUROCS = (0.6, 0.7, 0.8, 0.9)


def plan(
    *,
    error: float,
    auroc: list[float] | None = None,
    labels: list[int] | None = None,
    answers: Path | None = None,
    alpha: float = 0.1,
    delta: float = 0.1,
    by: JudgedBy | None = None,
    on_doubt: OnDoubt | None = None,
    as_json: bool = False,
) -> None:
    """Tell how often so many labels find a threshold, and how much it lets through.

    The least share of answers that any guard has to withhold is (error - alpha) / (1 - alpha). The rest is simulated,
    with normal scores of this AUROC; real sets differ. It is about the first calibration on the labels, which keeps a
    tenth of delta for later tries. By sentence, error rate and AUROC are those of sentences, and every sentence has
    a label; an answer has four.
    """
    from semgrad_guard.calibration import Plan
    from semgrad_guard.calibration import plan as planned
    from semgrad_guard.calibration.gates import share_of
    from semgrad_guard.calibration.sentence_gates import plan_sentences, simulated
    from semgrad_guard.guard.policy import judged_by

    sizes: Sequence[int] = labels or _SIZES
    if answers is not None:
        found = [one.judged("unscored") for one in read_record(answers, EvaluatedAnswer)[1]]
        scored = sum(one.unscored is None for one in found)
        note(f"{answers} holds {len(found)} answers, {scored} of them with a score.")
        if not scored:
            raise InputError(
                f"no answer in {answers} has a score, so labels cannot find a threshold: raise --max-tokens"
            )
        sizes = sizes if labels else sorted({*(size for size in _SIZES if size < scored), scored})
    level, doubtful = share_of(delta, 1), judged_by(None, by, on_doubt)

    def row(quality: float) -> list[Plan]:
        if doubtful is None:
            return [planned(n, error=error, auroc=quality, alpha=alpha, delta=level) for n in sizes]
        made = simulated(error=error, auroc=quality, sentences=4, on_doubt=doubtful, promise="sentence")
        return [plan_sentences(n, made, alpha=alpha, delta=level) for n in sizes]

    rows = [row(quality) for quality in auroc or _AUROCS]
    if as_json:
        plans = [one for own in rows for one in own]
        typer.echo(json.dumps([{**asdict(one), "delta": delta, "withheld": one.withheld} for one in plans]))
        return
    if rows[0][0].unit == "answers":
        typer.echo(f"Any guard has to withhold at least {rows[0][0].withheld:.1%} of the answers.")
    if len(rows) == 1:
        typer.echo("\n".join(f"{one}." for one in rows[0]))
        return
    table = Table("AUROC", *(f"{n} labels" for n in sizes), box=SIMPLE_HEAD, pad_edge=False)
    for own in rows:
        table.add_row(f"{own[0].auroc:.2f}", *(f"{one.found:.0%} / {one.coverage:.0%}" for one in own))
    OUT.print(table)
    typer.echo(
        f"The share of such sets that find a threshold / the share of the {rows[0][0].unit} delivered on average."
    )


def calibrate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Path,
    output: Path,
    column: from_options.Pairs | None = None,
    copies: Literal["keep", "once"] | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    engine: str = "transformers",
    alpha: float = 0.1,
    delta: float = 0.1,
    estimator: str | None = None,
    by: JudgedBy | None = None,
    on_doubt: OnDoubt | None = None,
    prompt: str = "plain",
    system: str | None = None,
    max_tokens: int = 256,
    on_cut: OnCut = "unscored",
    grader: str | None = None,
    labels: Path | None = None,
    by_hand: int | None = None,
    as_json: bool = False,
) -> None:
    """Find the threshold that keeps a promise: among the answers let through, at most alpha are wrong.

    The model answers every question of the file, the estimator scores the answers, the grader compares them with the
    references. The promise holds with probability 1 - delta, for questions drawn like those of the file and put in
    the same way: give the system message, the prompt and the passages that your program sends. If no threshold keeps
    it, the command says so and what would help. An estimator that learns from labels (states, auto) does so on a
    quarter of the answers, and the threshold is chosen on the rest. With --by sentence, every sentence has a score and
    a grade of its own, and the promise is about sentences.
    """
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.cli import grading
    from semgrad_guard.cli.rendering import show_calibration

    one_from_stdin(data=data, prompt=prompt, system=system, labels=labels)
    few = labels is not None and estimator not in ("auto", *NEEDS_LABELS)
    if by_hand is not None and not few:
        raise typer.BadParameter(
            "--by-hand is for grades by people: give --labels too, and an estimator that learns nothing from them"
        )
    if labels is not None and grader is not None:
        raise typer.BadParameter(
            "people grade what --labels holds, and --grader would decide nothing: give one of them"
        )
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option, engine=engine)
    files = grading.Files(output, labels=labels)
    phrasing, sources = from_options.phrasing(prompt, system)
    written = Output(output, "calibration", read_by(Calibration.load))
    files.require(written, inputs=[data, Path(model), *sources])
    questions = _read(data, column, alpha=alpha, delta=delta, copies=copies)
    from semgrad_guard.cli.runs import Run, estimators_for  # torch loads here, when the files are known
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.guard.answering import require_by_sentence
    from semgrad_guard.guard.policy import judged_by

    if copies is None and questions.duplicates:
        copies = _chosen(questions)
    by_sentence = judged_by(None, by, on_doubt)
    count = by_hand or 100
    questions = _drawn_questions(questions, count) if by_sentence and few else questions
    server = from_options.server_of(engine)
    known = estimators_for(estimator) if server is None else ()
    for one in known if by_sentence else ():
        require_by_sentence(one)
    graders = grading.load_graders([] if grader is None else [grader])
    grading.check_labels(labels, begun_at=labels)
    run = Run(
        source=source,
        server=server,
        estimator=estimator,
        phrasing=phrasing,
        decoding=GenerationOptions(max_tokens=max_tokens, seed=0),
        by_hand=count if few and len(questions.rows) > count else None,
        by_sentence=by_sentence,
        on_cut=on_cut,
        graders=graders,
        alpha=alpha,
        delta=delta,
        copies=copies,
    )
    with sole_writer(output):
        outcome = run(questions, files)
        if (choice := outcome.calibration.choice) is not None:
            # An estimator other than the requested one is more than a note.
            tell = note if choice.asked in ("auto", choice.estimator) else say
            tell(choice.reason, label=choice.estimator)
        outcome.calibration.save(output)
    if (effect := outcome.effect) is not None and (doubt := effect.doubt(alpha)) is not None:
        say(doubt, label="Warning")
    show_calibration(outcome, questions, files, as_json=as_json)
    made = outcome.calibration
    kept = ExitCode.OK if made.threshold is not None else ExitCode.NO_THRESHOLD
    raise typer.Exit(code_of_run(unscored=made.n_unscored == made.n, broken=questions.problems, otherwise=kept))


def _chosen(questions: QuestionFile) -> Copies:
    """What the file is, by the person at the terminal."""
    repeated = f"{len(questions.duplicates)} lines of {questions.path} repeat a question"
    if not (ERR.is_terminal and sys.stdin.isatty()):
        raise InputError(
            f"{repeated}. Is the file a sample of traffic, in which popular questions repeat, or a list of questions? "
            "Give --copies keep (the promise is about traffic), or --copies once (about distinct questions)."
        )
    say(f"{repeated}. keep: the file is a sample of traffic. once: it is a list of questions.")
    return typer.prompt("copies", type=click.Choice(["keep", "once"]), err=True)


def _read(
    data: Path, columns: from_options.Pairs | None, *, alpha: float, delta: float, copies: Copies | None
) -> QuestionFile:
    """The questions, with a warning if they are too few for the promise whatever the answers."""
    from semgrad_guard.calibration import gates

    questions = from_options.read_data(data, columns, keeps=copies == "keep")
    fewest = gates.fewest_answers(alpha=alpha, delta=gates.share_of(delta, 1))
    if len(questions.rows) < fewest:
        say(
            f"{len(questions.rows)} questions cannot keep this promise, whatever the answers: it takes at least "
            f"{fewest}.",
            label="Warning",
        )
    return questions


def _drawn_questions(questions: QuestionFile, count: int) -> QuestionFile:
    """A random part of the questions, of traffic with their repetitions; a hash of the questions draws."""
    times = questions.times or [1] * len(questions.rows)
    draws = [(row, number) for row, most in enumerate(times) for number in range(most)]
    if len(draws) <= count:
        return questions
    ranks = {draw: hashlib.sha256(f"{draw[1]} {questions.rows[draw[0]].key}".encode()).digest() for draw in draws}
    drawn = Counter(row for row, _ in sorted(draws, key=ranks.__getitem__)[:count])
    note(
        f"{count} of {len(draws)} questions are put to the model, a random part: people grade every sentence of their "
        "answers. --by-hand takes another number."
    )
    rows = sorted(drawn)
    kept = [questions.rows[row] for row in rows]
    return replace(questions, rows=kept, times=tuple(drawn[row] for row in rows) if questions.times else ())


def gate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Path,
    calibration: Path,
    band: Path,
    record: bool = False,
    column: from_options.Pairs | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    engine: str = "transformers",
    on_no_threshold: OnNoThreshold = "abstain",
    prompt: str = "plain",
    system: str | None = None,
    max_tokens: int = 256,
    grader: str | None = None,
    as_json: bool = False,
) -> None:
    """Fail where the coverage or the error of a calibration on labelled questions leaves a recorded band.

    The model answers the questions, as a guard with the calibration would have it; the grader compares the answers
    with the references. Coverage is the share of the questions whose answers are let through under the promise, the
    error is the share of wrong ones among these. The same answers have the same verdict in every run, whatever the
    number of threads or the batch size.
    """
    from semgrad_guard.cli import grading
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.grading import GRADERS, default_grader
    from semgrad_guard.paper.coverage import Band, digest

    one_from_stdin(data=data, prompt=prompt, system=system)
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option, engine=engine)
    files = grading.Files(band)  # the answers are next to the band until the command ends
    phrasing, sources = from_options.phrasing(prompt, system)
    made = [Output(band, "band", read_by(Band.load))] if record else []
    files.require(*made, inputs=[data, calibration, Path(model), *sources, *([] if record else [band])])
    recorded = None if record else Band.load(band)
    rows = from_options.read_data(data, column, strict=True).rows
    phrasing.require(rows)
    policy = cast("Policy", from_options.load_policy(calibration, on_no_threshold))
    graders = grading.load_graders([] if grader is None else [grader])
    from semgrad_guard.cli.drafting import measure, show, writer_for  # torch loads here, when the files are known

    writer = writer_for(
        policy,
        source,
        from_options.server_of(engine),
        decoding=GenerationOptions(max_tokens=max_tokens, seed=0),
        phrasing=phrasing,
        template=phrasing.name(rows),
    )
    grader_used = next(iter(graders), GRADERS[default_grader(writer.prompt_name(phrasing.name(rows)))])
    if recorded is not None:  # now, and not after the answers
        recorded.require(questions=digest(rows), grader=grader_used.name)
    with sole_writer(band):
        measured = measure(rows, writer, policy, grader_used, files)
        made = recorded or Band.record(measured, coverage_slack=0.05, error_slack=0.02)
        left = made.left_by(measured)
        if record:
            made.save(band)
        files.answers.unlink()
    show(measured, made, left, policy.calibration, band if record else None, as_json=as_json)
    raise typer.Exit(ExitCode.GATE if left else ExitCode.OK)


def evaluate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    output: list[Path],
    data: Path | None = None,
    column: from_options.Pairs | None = None,
    limit: int | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    methods: list[str] | None = None,
    nli: str | None = None,
    seed: int = 0,
    by: JudgedBy | None = None,
    prompt: str = "plain",
    system: str | None = None,
    max_tokens: int = 256,
    grader: list[str] | None = None,
    labels: Path | None = None,
    regrade: bool = False,
    no_report: bool = False,
    as_json: bool = False,
) -> None:
    """Compare all methods on your model and questions: which score best separates wrong answers from right ones,
    and at what cost?

    The model answers every question, every method scores every answer, the graders compare the answers with the
    references. Every answer is kept as it comes, with all that the numbers are made of; grading comes after, and can be
    repeated with other graders.
    """
    from semgrad_guard.cli import grading, runs
    from semgrad_guard.paper.drawing import require_drawable
    from semgrad_guard.paper.results import read_graded

    by = by or "answer"
    one_from_stdin(data=data, prompt=prompt, system=system, labels=labels)
    folder, *others = output
    files, (nli, _, cross_encoder) = runs.EvaluationFolder(folder), (nli or "").partition("+cross-encoder=")
    beside = [read_graded(runs.EvaluationFolder(other).run) for other in others]
    if not no_report:
        require_drawable(files.page.with_suffix(".svg"))
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option)
    phrasing, sources = from_options.phrasing(prompt, system)
    models = [model, *filter(None, (nli, cross_encoder)), *(name.partition("=")[2] or name for name in grader or ())]
    inputs = [*sources, *([labels] if labels else []), *map(Path, [*models, *([data] if data else [])]), *others]
    with files.made():
        files.check(inputs, report=not no_report)
        graders = grading.load_graders(grader or (), nli=nli or None)
        grading.check_labels(labels, begun_at=files.sheet)
        questions = runs.read(data, column, limit=limit, optional=regrade)
        with sole_writer(files.run):
            if regrade:
                run = runs.kept(files, questions)
            else:
                how: Any = {"seed": seed, "max_tokens": max_tokens, "by": by}
                estimators = runs.estimators_of(methods, nli=nli or None, cross_encoder=cross_encoder or None, **how)
                run = runs.answer(questions, files, estimators, source=source, phrasing=phrasing, **how)
            results = runs.grade_run(run, graders, labels, files, questions)
            runs.write(results, files, None if no_report else beside)
        runs.show(results, files, as_json=as_json, reported=not no_report)
        say_unscored(run.answers)
        broken = questions is not None and questions.problems
        unscored = all(answer.unscored is not None for answer in run.answers)
    raise typer.Exit(code_of_run(unscored=unscored, broken=broken))


def probe(  # a command's options are its arguments
    *,
    data: Path,
    output: Path,
    column: from_options.Pairs | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    no_answers: bool = False,
    system: str | None = None,
    paraphrases: str | None = None,
    nli: str | None = None,
    as_json: bool = False,
) -> None:
    """Find where a model keeps the meaning of a prompt, and which prompt token SemGrad should use.

    Questions and their paraphrases give the Semantic Preservation Score of every layer and late token; answers, where
    the file has references, tell where SemGrad works. The record has the token to use and the reason, and
    LanguageModel takes it: semantic_token=TokenChoice.load(FILE).
    """
    from semgrad_guard.paper.drawing import is_drawn, require_drawable
    from semgrad_guard.paper.probe_record import Probe
    from semgrad_guard.paper.probing import KIND, ProbePlan

    # Next to the record the state of an interrupted run, and pictures.
    written, kept, heat_map, scatter = (
        beside(output, suffix) for suffix in (".paraphrases.jsonl", ".answers.jsonl", ".sps.png", ".auroc.png")
    )
    phrasing, sources = from_options.phrasing("plain", system)
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option)
    require_drawable(heat_map)
    outputs = [
        Output(output, "record of a probe", read_by(Probe.load)),
        *([] if paraphrases is None else [Output(written, "record of paraphrases", is_record(KIND))]),
        Output(kept, "record of answers", is_record()),
        *(Output(path, "picture of a probe", is_drawn) for path in (heat_map, scatter)),
    ]
    require_outputs(outputs, inputs=[data, Path(model), *sources])
    questions = from_options.read_data(data, column, needs="question")
    if paraphrases is None:
        with_paraphrases(questions.rows)
    from semgrad_guard.cli import runs

    plan = ProbePlan(batch_size=from_options.BATCH, system=phrasing.system)
    with sole_writer(output):
        language_model = from_options.load(source)
        try:
            if paraphrases is not None:
                rows = runs.paraphrased(questions.rows, written, paraphrases, nli, language_model)
                questions = replace(questions, rows=tuple(rows))
            if left_out := len(questions.rows) - len(with_paraphrases(questions.rows)):
                note(f"{left_out} of {len(questions.rows)} questions have no paraphrases; SPS leaves them out.")
            found = runs.probed(questions, plan, language_model, None if no_answers else kept)
        except KeyboardInterrupt as error:
            message = f"Finished work is kept next to {output}. Run the same command again to continue."
            say(message, label=terminal.in_words(error))
            raise typer.Exit(terminal.exit_code(error)) from error
        found.save(output)
        drawn = runs.drawn(found, heat_map, scatter)
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        from semgrad_guard.cli.rendering import probe_view

        OUT.print(probe_view(found))
        show_line(f"The record is {output}.")
        show_line(f"Pictures: {', '.join(map(str, drawn))}.")
    raise typer.Exit(code_of_run(broken=questions.problems))
