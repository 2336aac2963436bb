"""`semgrad-guard ask`: one question, one answer, and how sure the model is of it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.estimator_spec import EstimatorSpec
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.cli.terminal import ERR, OUT, say
from semgrad_guard.errors import BindingMismatchError, EmptyPromptError

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding
    from semgrad_guard.engine.generation.options import GenerationOptions
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.guard import Policy
    from semgrad_guard.records import Verdict


def ask(  # noqa: PLR0913  # a command's options are its arguments
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help='What to ask; "-" reads it from stdin.', show_default=False)
    ],
    *,
    model: options.Model = loading.POCKET,
    dtype: options.Dtype = None,
    device: options.Device = None,
    estimator: options.EstimatorOption = None,
    variant: options.Variant = None,
    tau: options.Tau = None,
    beta: options.Beta = None,
    sampled_rows: options.SampledRows = None,
    calibration: options.CalibrationFile = None,
    threshold: options.Threshold = None,
    probe: options.ProbeFile = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    system: options.System = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask a local model, and see how uncertain its answer is.

    With a calibration, or a threshold, answers that are too uncertain are withheld. The embedded model brings its
    calibration along; it is used unless you give another or change what it was made for.
    """
    asked = sys.stdin.read().strip() if question == "-" else question
    if not asked.strip():
        raise EmptyPromptError("The question is empty; ask something.")
    policy, token = loading.load_policy(calibration, threshold), loading.load_token(probe)
    embedded = loading.pocket_policy() if policy is None and model == loading.POCKET else None
    chosen = EstimatorSpec(estimator, variant, tau, beta, sampled_rows).estimator(policy or embedded)
    asker = _Asker(
        loading.load_model(model, dtype, device=device, token=token),
        chosen,
        loading.decoding(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed),
        system,
    )
    if policy is not None:
        policy.check(asker.binding)
    elif embedded is not None:
        policy = _if_it_fits(embedded, asker.binding)
    verdict = asker(asked, policy)
    _show(verdict, asked, as_json=as_json)
    raise typer.Exit(ExitCode.ABSTAINED if verdict.action == "abstain" else ExitCode.OK)


class _Asker:
    """A model, an estimator and the form of prompt: what a calibration must have been made for."""

    def __init__(
        self, model: LanguageModel, estimator: Estimator, decoding: GenerationOptions, system: str | None
    ) -> None:
        from semgrad_guard.evaluation.questions.prompts import prompt_name
        from semgrad_guard.evaluation.runs.run import run_binding

        self._model, self._estimator, self._decoding, self._system = model, estimator, decoding, system
        self._template = prompt_name(system=system)
        self.binding = run_binding(model, estimator, options=decoding, template=self._template)

    def __call__(self, question: str, policy: Policy | None) -> Verdict:
        """Answer; without a policy nothing is withheld."""
        from semgrad_guard.evaluation.questions.prompts import conversation
        from semgrad_guard.guard import ABSTAIN_MESSAGE, abstained, assess, decide

        with ERR.status("Answering …"):
            turns = conversation(question, system=self._system)
            found = self._model.generate(turns, self._decoding, objective=self._estimator.objective)
            draft = assess(
                self._model,
                self._estimator,
                found.evidence,
                text=found.text,
                options=self._decoding,
                prompt_template=self._template,
            )
        if policy is None:
            return draft
        verdict = decide(draft, policy, can_escalate=False)
        return abstained(verdict, ABSTAIN_MESSAGE) if verdict.action == "abstain" else verdict


def _if_it_fits(policy: Policy, binding: Binding) -> Policy | None:
    """The embedded model's own calibration, unless the options leave what it was made for: then it is left out."""
    try:
        policy.check(binding)
    except BindingMismatchError as error:
        say(f"The embedded model's calibration does not fit and is left out. {error}", label="Note")
        return None
    return policy


def _show(verdict: Verdict, question: str, *, as_json: bool) -> None:
    if as_json:
        record = {"question": question, "text": verdict.text, **verdict.metadata(keep_draft=True)}
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    from semgrad_guard.cli.rendering import verdict_view

    OUT.print(verdict_view(verdict))
