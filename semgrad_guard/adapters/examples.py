"""From a chain's answers to examples to a calibration: graded, and bound to their model and to their prompts.

Its estimator is the model's own, another one, a learned one, or the best (`auto`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Required, TypedDict, cast

from semgrad_guard.adapters.recorded_runs import AnsweredExample, Runs, collected, read_examples
from semgrad_guard.calibration import Binding, Calibration
from semgrad_guard.calibration.binding import QUESTIONS
from semgrad_guard.calibration.calibration_set import Copies, read_rate
from semgrad_guard.declared import declared, plain, require_known
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.estimators import NEEDS_LABELS, Estimator
from semgrad_guard.estimators.learned import FusedStates
from semgrad_guard.grading import AnswerGrader, AnswerToGrade, Grader
from semgrad_guard.grading.by_name import load_graders, no_verdict
from semgrad_guard.grading.candidates import (
    CANDIDATES,
    LABEL_FREE,
    LearningSet,
    Outcome,
    calibrate_best,
    calibrate_learned,
    calibrate_scored,
)
from semgrad_guard.grading.grader import ABSTAINED, Grade, Verdicts, settling
from semgrad_guard.grading.sheets import HUMAN, SheetAnswer, doubt, labels_for
from semgrad_guard.guard.guard import as_estimator, named_estimator
from semgrad_guard.guard.question import RecordedScore
from semgrad_guard.guard.steps import Steps, Work
from semgrad_guard.questions.run_record import Progress, number_of_try
from semgrad_guard.records import digest_of
from semgrad_guard.settings import OnCut

AnyGrader = str | Grader | AnswerGrader | Callable[[str, Sequence[str]], Grade]
"""A grader, its name (as on the command line), or a function of the delivered text and the right answers."""


class ExampleOptions(TypedDict, total=False):
    """The options of a calibration on examples (see `ExampleCalibration`)."""

    labels: str | Path | None
    estimator: Estimator | str | None
    upstream: str | None
    copies: Copies
    tries: int
    on_cut: OnCut


class RunOptions(ExampleOptions, total=False):
    """The options of a calibration that runs a chain or an engine on its examples (see `collected`)."""

    alpha: Required[float]
    delta: Required[float]
    record: str | Path | None
    max_concurrency: int
    progress: Progress | bool


logger = logging.getLogger("semgrad_guard")


class ExampleCalibration:
    """The calibration of a chain's answers to examples; bad arguments are refused before the chain runs.

    The promise is about prompts of the shape that the chain's own had. An answer without text is wrong, and so is one
    on which the grader came to no verdict. With a file of labels people grade, and answers without a label are left
    out. A warning says where hardly any answer is right, or nearly all are, and where the guard has no effect.

    Args:
        examples: pairs of (input, right answer or answers), or {"input": ..., "answers": [...]}; None or no answer
            where every claim is wrong.
        grader: grades the answers; its name becomes part of the binding.
        alpha: the largest error rate among the answers that are let through, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        **options: `labels` (a CSV file for people's grades, begun or extended by the answers that it lacks, never
            overwritten), `estimator` (its name, an object or "auto", as on the command line, instead of the model's
            own; a learned one is fitted on a part of the examples), `upstream` (the id of the calibration of the stage
            before, where these examples are the questions that it does not let through), `on_cut` (which answers that
            `max_tokens` cut off have no score, as in `Policy`), and `copies` and `tries`, as in
            `calibrate`.

    Raises:
        InputError: bad examples, an unknown grader or an unknown option.
        CalibrationError: a rate outside (0, 1).
    """

    def __init__(
        self, examples: Iterable[Any], grader: AnyGrader, *, alpha: float, delta: float, **options: Any
    ) -> None:
        require_known("calibrating on examples", options, ExampleOptions.__annotations__)
        self._rates = {"alpha": read_rate(alpha, "alpha"), "delta": read_rate(delta, "delta")}
        upstream = options.pop("upstream", None)
        self._upstream: str | None = None if upstream is None else plain("upstream", upstream, str)
        self._labels = _path("labels", options.pop("labels", None))
        self._estimator = _chosen(options.pop("estimator", None))
        self._is_fitted_here = isinstance(self._estimator, FusedStates) and self._estimator.weights is None
        self._on_cut: OnCut = options.pop("on_cut", "unscored")
        declared("on_cut", OnCut).require(self._on_cut)
        self._options = options
        self.grader, self.examples = _grader(grader), read_examples(examples)

    @property
    def needed(self) -> tuple[Estimator, ...]:
        """The estimators whose scores of every example are needed, besides the model's own."""
        if self._estimator is None:
            return ()
        if self._estimator == "auto":
            return CANDIDATES
        return (self._estimator, LABEL_FREE) if self._is_fitted_here else (self._estimator,)

    def __call__(self, answered: Sequence[AnsweredExample], *, record: Path | None = None) -> Calibration:
        """Grade the delivered texts, in the examples' order, and calibrate on them.

        Calibrations on the answers of one `record` share delta, unless the caller numbers them (`tries`).

        Raises:
            CalibrationError: the prompt of an answer is not known, or no answer has a score.
            GradingError: the grader cannot do its work.
        """
        unknown = [number for number, one in enumerate(answered, start=1) if one.binding and one.prompt is None]
        if unknown:
            raise CalibrationError(
                f"The prompt of example {unknown[0]} is not known, so a promise could not say which prompts it is for."
            )
        verdicts, name = self._grades(answered)
        people = self._labels is not None
        graded = [i for i, verdict in enumerate(verdicts) if verdict is not None or not people]
        grades: list[Grade] = [verdicts[i] or False for i in graded]
        kept = [answered[i].judged(self._on_cut) for i in graded]
        binding = self._binding(kept, answered).model_copy(update={"grader": name})
        how = {**self._rates, **self._options}
        if record is not None and "tries" not in how:
            labels = [(one.key, grade) for one, grade in zip(kept, grades, strict=True)]  # a split looks at the order
            chosen = {"estimator": repr(self._estimator), "copies": repr(how.get("copies")), "on_cut": self._on_cut}
            how["tries"] = number_of_try(record, {**chosen, "labels": digest_of(json.dumps(labels)), **self._rates})
        outcome = self._outcome(kept, grades, binding, how)
        if abstained := outcome.calibration.n_abstained:
            logger.info("semgrad-guard: %d of %d answers abstain; they are left out.", abstained, len(graded))
        cut = [grade for one, grade in zip(kept, grades, strict=True) if one.cut_calls is not None]
        choice, effect = outcome.calibration.choice, outcome.effect
        remarks = [
            f"max_tokens cut off {len(cut)} of {len(kept)} answers, {cut.count(False)} of them wrong: raise it."
            if cut
            else None,
            None if people or None not in verdicts else no_verdict(verdicts.count(None), len(verdicts), name),
            doubt([verdicts[i] for i in graded], name),
            choice.reason if choice is not None and choice.asked not in ("auto", choice.estimator) else None,
            None if effect is None else effect.doubt(self._rates["alpha"]),
        ]
        for remark in filter(None, remarks):
            logger.warning("semgrad-guard: %s", remark)
        return outcome.calibration

    def _grades(self, answered: Sequence[AnsweredExample]) -> tuple[Verdicts, str]:
        """The grades in order, None where there is no label or no verdict, and whose they are."""
        pairs = list(zip(self.examples, answered, strict=True))
        if self._labels is not None:
            sheet = [
                SheetAnswer(
                    one.key, one.question, one.answers, own.text, "" if own.prompt is None else own.prompt.user_text
                )
                for one, own in pairs
            ]
            return labels_for(self._labels, sheet), HUMAN
        items = [AnswerToGrade(example.question, answer.text, example.answers) for example, answer in pairs]
        verdicts = iter(self.grader.grade([item for item in items if item.text.strip()]))
        return [next(verdicts) if item.text.strip() else False for item in items], self.grader.name

    def _binding(self, kept: Sequence[AnsweredExample], answered: Sequence[AnsweredExample]) -> Binding:
        """That of the answers; a question that took several is bound as a whole."""
        binding = next((one.binding for one in kept if one.binding is not None), None)
        if binding is None:
            raise CalibrationError(
                "No example made a scored call, so there is no score to calibrate. The model that answers must be one "
                "that semgrad-guard scores, and no helper (and its answers must not come from a cache)."
            )
        limits = [one.cut for one in answered if isinstance(one.cut, int)]
        facts: dict[str, Any] = {
            "upstream": self._upstream,
            "on_cut": self._on_cut,
            "max_tokens": max(limits, default=0),  # 0: none was cut off
            "stop": tuple(sorted({one.cut for one in answered if isinstance(one.cut, str)})),
        }
        if any(one.others for one in answered):
            if self._is_fitted_here:
                raise CalibrationError(
                    "These questions took several answers each, and a learned estimator is fitted on single ones. "
                    "Choose an estimator that needs no labels, such as 'max_probability'."
                )
            facts["settings"] = QUESTIONS.among(binding.settings)
        return binding.model_copy(update=facts)

    def _outcome(
        self, answered: Sequence[AnsweredExample], grades: Sequence[Grade], binding: Binding, how: dict[str, Any]
    ) -> Outcome:
        """The calibration on answered and graded examples; `how` are further options of `calibrate`."""

        def scored(name: str) -> list[RecordedScore | None]:
            return [one.scores.get(name) for one in answered]

        def bind(estimator: Estimator) -> Binding:
            bound = next(score for score in scored(estimator.name) if score is not None)
            settings = {**bound.settings, **estimator.settings()}
            return binding.model_copy(update={"estimator": estimator.name, "settings": settings})

        names = dict.fromkeys(name for one in answered for name in one.scores)
        columns = {name: [score and score.uncertainty for score in scored(name)] for name in names}
        if self._estimator is None:
            columns[binding.estimator] = [one.uncertainty for one in answered]
        every = LearningSet(
            [one.key for one in answered],
            [grade is True for grade in grades],
            {name: [score and score.features for score in scored(name)] for name in names if name in NEEDS_LABELS},
            columns,
            [one.prompt and (one.prompt, *one.others) for one in answered],
        )
        graded = every.claiming(grades)
        if self._estimator is None:
            return calibrate_scored(graded, binding.estimator, binding=binding, **how)
        # Copies would be on both sides of a split; of traffic, every row is a draw by itself.
        apart = graded if how.get("copies") == "keep" else graded.distinct()
        if self._estimator == "auto":
            return calibrate_best(apart, bind=bind, **how)
        if self._is_fitted_here:
            return calibrate_learned(apart, self._estimator, bind=bind, **how)
        return calibrate_scored(graded, self._estimator.name, binding=bind(self._estimator), **how)


def calibrated(
    runs: Runs,
    examples: Iterable[Any],
    grader: AnyGrader,
    *,
    alpha: float,
    delta: float,
    record: str | Path | None = None,
    max_concurrency: int = 1,
    progress: Progress | bool = True,
    **options: Any,
) -> Steps[Calibration]:
    """Run a chain or an engine on examples, and calibrate on its questions."""
    job = ExampleCalibration(examples, grader, alpha=alpha, delta=delta, **options)
    path = _path("record", record)
    answered = yield from collected(
        job.examples, runs, needed=job.needed, record=path, max_concurrency=max_concurrency, progress=progress
    )
    return (yield Work(lambda: job(answered, record=path)))


def _path(option: str, given: Any) -> Path | None:
    """The path of an option, refused by an `InputError` where it is none."""
    if given is None or isinstance(given, str | Path):
        return None if given is None else Path(given)
    raise InputError(f"{option} is the path of a file, not {given!r:.60}")


def _chosen(request: Any) -> Any:
    """None for the model's own estimator, "auto" for the best, or an estimator, by its name or as it is.

    Raises:
        InputError: no such name, or not an estimator.
    """
    if request is None or request == "auto":
        return request
    if isinstance(request, str):
        return named_estimator(request)
    return request if isinstance(request, FusedStates) else as_estimator(request)


def _grader(given: AnyGrader) -> AnswerGrader:
    """The grader itself, or the one of this name or function.

    Raises:
        InputError: no such name, or neither a grader nor a function.
    """
    if isinstance(given, str):
        return load_graders([given])[0]
    if isinstance(getattr(given, "name", None), str) and hasattr(given, "grade"):
        return cast("AnswerGrader", given)
    if callable(given):
        return _Function(cast("Callable[[str, Sequence[str]], Grade]", given))
    raise InputError(f"a grader is a name, a grader object or a function, not a {type(given).__name__}")


class _Function:
    """A grader made of a function."""

    def __init__(self, judge: Callable[[str, Sequence[str]], Grade]) -> None:
        self._judge = judge
        named = getattr(judge, "name", None)
        where = (getattr(judge, "__module__", ""), getattr(judge, "__qualname__", type(judge).__qualname__))
        self.name: str = named if isinstance(named, str) else ".".join(filter(None, where))

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""
        return settling(answers, lambda unsettled: [self._graded(answer) for answer in unsettled])

    def _graded(self, answer: AnswerToGrade) -> Grade:
        found = self._judge(answer.text, answer.references)
        if isinstance(found, str) and found != ABSTAINED:
            raise InputError(f'a grader gives True, False or "abstained", and {self.name} gave {found!r}')
        return found if isinstance(found, str) else bool(found)
