"""`semgrad-guard ask`: one question, one answer, and how sure the model is of it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.command import ExitCode
from semgrad_guard.cli.options import EstimatorSpec
from semgrad_guard.cli.terminal import OUT, note, say, status
from semgrad_guard.declared import Option
from semgrad_guard.errors import BindingMismatchError, EmptyPromptError
from semgrad_guard.loading import ModelSource, pocket_policy
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import Question
from semgrad_guard.records import Verdict
from semgrad_guard.settings import EngineOptions, PolicyOptions, SentenceOptions


def ask(  # a command's options are its arguments
    question: Annotated[
        str,
        typer.Argument(
            metavar="QUESTION", parser=values.text, help='What to ask; "-" reads it from stdin.', show_default=False
        ),
    ],
    *,
    model: EngineOptions,
    estimator: EstimatorSpec,
    calibration: options.CalibrationFile = None,
    decision: PolicyOptions,
    sentences: SentenceOptions,
    probe: options.ProbeFile = None,
    answers: options.Decoding,
    wording: options.Wording,
    context: Annotated[
        str | None, Option("The passage to answer from; @FILE reads it from a file.", options.ANSWERS, "TEXT")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask a local model, and see how uncertain its answer is.

    With a calibration, or a threshold, answers that are too uncertain are withheld. Use the
    same system message, prompt, examples, stop strings and longest answer as the calibration, and a passage if its
    questions had one.
    The embedded model brings its calibration along; it is used unless you give another or use other settings than its
    own.
    """
    values.one_from_stdin(question=question, prompt=wording.prompt, system=wording.system, context=context)
    text = loading.given_text(question)
    if not text.strip():
        raise EmptyPromptError("The question is empty; ask something.")
    passage = None if context is None else loading.text_or_file(context)[0]
    if passage is not None and not passage.strip():
        raise EmptyPromptError("The passage is empty; leave --context out to ask without one.")
    row, phrasing = Question(question=text, context=passage), loading.phrasing(wording)[0]
    phrasing.require([row])
    from semgrad_guard.guard import Answerer, Guard, judged_by

    policy, token = loading.load_policy(calibration, decision), loading.load_token(probe)
    embedded = pocket_policy(decision) if policy is None and model.model == POCKET else None
    chosen = estimator.make(policy or embedded)
    by_sentence = judged_by(None if policy is None else policy.calibration, sentences.by, sentences.on_doubt)
    answerer = Answerer(
        loading.load(ModelSource(**vars(model), semantic_token=token)),
        chosen,
        loading.decoding(answers),
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
    from semgrad_guard.guard.policy import lets_every_score_through

    guard = Guard(
        answerer.model,
        policy or lets_every_score_through(decision.on_unscored),
        estimator=chosen,
        options=answerer.options,
        prompt_template=answerer.prompt_template,
        by="answer" if by_sentence is None else "sentence",
        on_doubt=by_sentence,
        closing_line=sentences.closing_line,
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
        thought = {"reasoning": verdict.reasoning} if verdict.reasoning else {}
        record = {"question": question, "text": verdict.text, **thought, **verdict.metadata(keep_draft=True)}
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    from semgrad_guard.cli.rendering import verdict_view

    OUT.print(verdict_view(verdict))
