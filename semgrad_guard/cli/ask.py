"""`semgrad-guard ask`: one question, one answer, and how sure the model is of it."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.command import ExitCode
from semgrad_guard.cli.terminal import OUT, note, say, status
from semgrad_guard.errors import BindingMismatchError, EmptyPromptError
from semgrad_guard.loading import load_estimator, pocket_policy
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.data_files import STDIN, read_text
from semgrad_guard.records import Verdict
from semgrad_guard.settings import DtypeName, OnNoThreshold


def ask(  # noqa: PLR0913  # a command's options are its arguments
    question: str,
    *,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: loading.Pairs | None = None,
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
    options.one_from_stdin(question=question, prompt=prompt, system=system, context=context)
    text = read_text(STDIN).strip() if question == str(STDIN) else question
    if not text.strip():
        raise EmptyPromptError("The question is empty; ask something.")
    passage = None if context is None else loading.text_or_file(context)[0]
    if passage is not None and not passage.strip():
        raise EmptyPromptError("The passage is empty; leave --context out to ask without one.")
    row, phrasing = Question(question=text, context=passage), loading.phrasing(prompt, system)[0]
    phrasing.require([row])
    source = loading.source_of(model, dtype=dtype, device=device, template_option=template_option)
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.guard import Answerer, Guard, judged_by
    from semgrad_guard.guard.policy import lets_every_score_through

    policy = loading.load_policy(calibration, on_no_threshold)
    embedded = pocket_policy() if policy is None and model == POCKET else None
    chosen = load_estimator(estimator, policy or embedded)
    by_sentence = judged_by(None if policy is None else policy.calibration, None, None)
    answerer = Answerer(
        loading.load(source),
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
