"""`semgrad-guard ask`: one question, one answer, and how sure the model is of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from semgrad_guard.cli import grading, loading, options, values
from semgrad_guard.cli.estimator_spec import EstimatorSpec
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.cli.spreading import Loading
from semgrad_guard.cli.terminal import OUT, note, say, status
from semgrad_guard.errors import BindingMismatchError, EmptyPromptError
from semgrad_guard.loading import pocket_policy
from semgrad_guard.named import POCKET

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding
    from semgrad_guard.engine.generation.options import GenerationOptions
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.questions.prompts import Phrasing
    from semgrad_guard.guard import OnUnscored, Policy
    from semgrad_guard.records import Message, Verdict


def ask(  # noqa: PLR0913  # a command's options are its arguments
    question: Annotated[
        str,
        typer.Argument(
            metavar="QUESTION",
            parser=values.text,
            help='What to ask; "-" reads it from stdin.',
            show_default=False,
        ),
    ],
    *,
    model: options.Model = POCKET,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantization_config: options.QuantizationConfig = None,
    template_option: options.TemplateOption = None,
    engine: options.Engine = None,
    estimator: options.EstimatorOption = None,
    variant: options.Variant = None,
    tau: options.Tau = None,
    beta: options.Beta = None,
    sampled_rows: options.SampledRows = None,
    calibration: options.CalibrationFile = None,
    threshold: options.Threshold = None,
    on_unscored: options.OnUnscored = "abstain",
    probe: options.ProbeFile = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    system: options.System = None,
    prompt: options.Prompt = "plain",
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            parser=values.text,
            help="The passage to answer from; @FILE reads it from a file.",
            rich_help_panel=options.ANSWERS,
        ),
    ] = None,
    few_shot: options.FewShot = None,
    shots: options.Shots = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask a local model, and see how uncertain its answer is.

    With a calibration, or a threshold, answers that are too uncertain are withheld. Use the
    same system message, prompt, examples, stop strings and longest answer as the calibration, and a passage if its
    questions had one.
    The embedded model brings its calibration along; it is used unless you give another or change what it was made for.
    """
    values.one_from_stdin(question=question, prompt=prompt, system=system, context=context)
    asked = loading.given_text(question)
    if not asked.strip():
        raise EmptyPromptError("The question is empty; ask something.")
    turns = _turns(
        asked,
        system=loading.system_message(system)[0],
        prompt=prompt,
        context=context,
        examples=grading.read_examples(few_shot, shots),
    )
    policy, token = loading.load_policy(calibration, threshold, on_unscored), loading.load_token(probe)
    embedded = pocket_policy(on_unscored) if policy is None and model == POCKET else None
    chosen = EstimatorSpec(estimator, variant, tau, beta, sampled_rows).estimator(policy or embedded)
    asker = _Asker(
        Loading(model, dtype, device, quantization_config, token, engine, dict(template_option or ())).load(),
        chosen,
        loading.decoding(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or ()),
        turns,
    )
    if policy is not None:
        policy.check(asker.binding)
    elif embedded is not None:
        policy = _if_it_fits(embedded, asker.binding)
    verdict = asker(policy, on_unscored)
    _show(verdict, asked, as_json=as_json)
    raise typer.Exit(_code(verdict))


@dataclass(frozen=True)
class _Turns:
    """How the question is put: in the forms of prompt that `calibrate` knows."""

    row: Question
    phrasing: Phrasing

    @property
    def name(self) -> str:
        """What a calibration calls such prompts."""
        return self.phrasing.name(self.row)

    @property
    def conversation(self) -> list[Message]:
        """The messages that the model is asked."""
        return self.phrasing.conversation(self.row)


def _turns(
    question: str, *, system: str | None, prompt: str, context: str | None, examples: Sequence[Question]
) -> _Turns:
    """The question as the options put it; refuses what does not go together."""
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.questions.prompts import Phrasing

    wording, template, _ = loading.worded(prompt)
    passage = None if context is None else loading.text_or_file(context)[0]
    if passage is not None and not passage.strip():
        raise EmptyPromptError("The passage is empty; leave --context out to ask without one.")
    row = Question(question=question, context=passage)
    phrasing = Phrasing(system, wording, template, examples)
    phrasing.require([row])
    return _Turns(row, phrasing)


class _Asker:
    """A model, an estimator and the form of prompt: what a calibration must have been made for."""

    def __init__(self, model: LanguageModel, estimator: Estimator, decoding: GenerationOptions, turns: _Turns) -> None:
        from semgrad_guard.guard import Answerer

        self._conversation = turns.conversation
        self._answerer = Answerer(model, estimator, decoding, prompt_template=turns.name)
        self.binding = self._answerer.binding()

    def __call__(self, policy: Policy | None, on_unscored: OnUnscored) -> Verdict:
        """Answer; without a policy nothing that has a score is withheld."""
        from semgrad_guard.guard import Guard
        from semgrad_guard.guard.policy import lets_every_score_through

        answerer = self._answerer
        with status("Answering …"):
            guard = Guard(
                answerer.model,
                policy or lets_every_score_through(on_unscored),
                estimator=answerer.estimator,
                options=answerer.options,
                prompt_template=answerer.prompt_template,
            )
            verdict = guard(self._conversation)
        return verdict if policy is not None else verdict.model_copy(update={"threshold": None})


def _if_it_fits(policy: Policy, binding: Binding) -> Policy | None:
    """The embedded model's own calibration, unless the options leave what it was made for: then it is left out."""
    try:
        policy.check(binding)
    except BindingMismatchError as error:
        note(f"The embedded model's calibration does not fit and is left out. {error}")
        return None
    return policy


def _code(verdict: Verdict) -> ExitCode:
    """How the command ends; an answer without a score is an error unless it was asked for."""
    if verdict.action == "answer":
        return ExitCode.OK
    if verdict.status == "scored":
        return ExitCode.ABSTAINED
    doubt = " Is the model intact?" if verdict.status == "failed" else ""
    say(f"The answer cannot be scored: {verdict.reason or 'no reason is known'}.{doubt}", label="Warning")
    return ExitCode.UNSCORED


def _show(verdict: Verdict, question: str, *, as_json: bool) -> None:
    if as_json:
        thought = {"reasoning": verdict.reasoning} if verdict.reasoning else {}
        record = {"question": question, "text": verdict.text, **thought, **verdict.metadata(keep_draft=True)}
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    from semgrad_guard.cli.rendering import verdict_view

    OUT.print(verdict_view(verdict))
