"""The steps of `evaluate`: read, answer (or take the recorded answers), grade; the rest is in `evaluation_output`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.evaluation_output import Files
from semgrad_guard.cli.grading import recorded_keys
from semgrad_guard.cli.loading import Cluster, spreading
from semgrad_guard.cli.terminal import kept_on_interrupt, note, say, show_grades
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import InputError
from semgrad_guard.loading import ModelSource
from semgrad_guard.settings import AnswerLimit, JudgedBy, Stop, require_name

if TYPE_CHECKING:
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.evaluation.graders import AnswerGrader
    from semgrad_guard.evaluation.probing.probe_record import Probe
    from semgrad_guard.evaluation.questions.data import QuestionFile
    from semgrad_guard.evaluation.questions.prompts import Phrasing
    from semgrad_guard.evaluation.results import Results
    from semgrad_guard.evaluation.runs.answers import EvaluatedAnswer
    from semgrad_guard.evaluation.runs.experiment import Experiment, SampledQuestions
    from semgrad_guard.evaluation.runs.run import AnswerBatch


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(AnswerLimit):
    """How questions are answered."""

    by: JudgedBy | None = None
    stop: Stop = ()
    batch_size: options.BatchSize = 8
    ablations: Annotated[
        bool, Option("Also SemGrad's variants (three more replays an answer).", options.UNCERTAINTY)
    ] = True
    sampled_questions: Annotated[
        int,
        Option(
            "How many questions of each kind the methods that draw samples take part in, a seeded choice; the "
            "others take all. All of them together draw 55 answers a question.",
            options.ANSWERS,
            "N",
            Bounds(1, 2**62),
        ),
    ] = 300
    sample_batch: Annotated[
        int | None,
        Option(
            "How many answers the methods that draw samples take at a time. Default: a batch.",
            options.ANSWERS,
            "N",
            Bounds(1, 1_000_000),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """The methods, and the models that they need."""

    methods: Annotated[
        list[str] | None,
        Option(
            f"A method to compare; repeat the option for several. There are {', '.join(options.METHOD_NAMES)}.",
            options.UNCERTAINTY,
            names=options.METHOD_NAMES,
            shown="all",
        ),
    ] = None
    nli: Annotated[
        str | None,
        Option(
            "An NLI model: what means the same. Else equal words do.", options.UNCERTAINTY, "MODEL", check=require_name
        ),
    ] = None
    cross_encoder: Annotated[
        str | None,
        Option("A cross-encoder: what matters in an answer (SAR).", options.UNCERTAINTY, "MODEL", check=require_name),
    ] = None
    seed: Annotated[
        int, Option("Repeats the samples of methods that sample.", options.ANSWERS, "N", Bounds(0, 2**31 - 1))
    ] = 0

    def estimators(self, max_tokens: int, by: JudgedBy | None) -> Sequence[Estimator]:
        """The paper's methods with the models that the user named, or those among them that were chosen; by sentence
        without those that compare whole answers."""
        from semgrad_guard.engine.texts.text_pairs import CrossEncoder
        from semgrad_guard.estimators.equivalence import NLIEquivalence
        from semgrad_guard.estimators.sampled import AskingEstimator
        from semgrad_guard.estimators.suite import paper_suite
        from semgrad_guard.evaluation.calibrating import LEARNED
        from semgrad_guard.evaluation.graders.naming import entailment_model

        with loading.quietly("Loading what compares answers …"):
            nli = None if self.nli is None else NLIEquivalence(entailment_model(self.nli))
            importance = None if self.cross_encoder is None else CrossEncoder.from_pretrained(self.cross_encoder)
        suite = paper_suite(nli, importance, self.seed, max_tokens=max_tokens)
        known = {estimator.name: estimator for estimator in (*suite, *LEARNED.values())}
        from semgrad_guard.guard.scored_sentences import require_by_sentence

        parts = {name for name, one in known.items() if by != "sentence" or not isinstance(one, AskingEstimator)}
        wanted = list(dict.fromkeys(self.methods or (name for name in known if name in parts)))
        if unknown := [name for name in wanted if name not in known]:
            raise InputError(f"there is no method {unknown[0]!r}; there are {', '.join(known)}")
        for name in wanted if by == "sentence" else ():
            require_by_sentence(known[name])
        return [known[name] for name in wanted]


@dataclass(frozen=True)
class Run:
    """Answers, and the settings of the run that gave them."""

    answers: Sequence[EvaluatedAnswer]
    settings: dict[str, Any]


def load_calibration(path: Path | None) -> Calibration | None:
    """The calibration to hold against the run, before any work."""
    from semgrad_guard.calibration import Calibration

    return None if path is None else Calibration.load(path)


def load_probe(path: Path | None) -> Probe | None:
    """The probe whose t* to use, before any work."""
    from semgrad_guard.evaluation.probing.probe_record import Probe

    return None if path is None else Probe.load(path)


def read(
    data: str | None, columns: options.Columns, *, limit: int | None, strict: bool, optional: bool
) -> QuestionFile | None:
    """The questions, with a note on those that are left out."""
    if data is None:
        if optional:
            return None
        raise typer.BadParameter("give --data SOURCE: the questions to ask (or --regrade the answers there are)")
    questions = loading.read_data(data, columns, strict=strict)
    return replace(questions, rows=questions.rows[:limit])


@dataclass(frozen=True)
class Measuring:
    """Turns a worker's model into a function that answers and measures a batch; plain data."""

    methods: MethodSettings
    settings: AnswerSettings
    phrasing: Phrasing
    sampled: SampledQuestions | None = None

    def __call__(self, model: LanguageModel) -> AnswerBatch[EvaluatedAnswer]:
        """The function of this model."""
        return self.experiment(model, self.methods.estimators(self.settings.max_tokens, self.settings.by)).answering()

    def experiment(self, model: LanguageModel, estimators: Sequence[Estimator]) -> Experiment:
        """The experiment with a model."""
        from semgrad_guard.engine.generation.options import GenerationOptions
        from semgrad_guard.evaluation.runs.experiment import Experiment, semgrad_ablations

        settings = self.settings
        return Experiment(
            model,
            estimators,
            GenerationOptions(max_tokens=settings.max_tokens, stop=settings.stop),
            phrasing=self.phrasing,
            ablations=semgrad_ablations(model.n_layers) if settings.ablations and settings.by != "sentence" else {},
            sampled=self.sampled,
            sample_batch=settings.sample_batch,
            by_sentence=settings.by == "sentence",
        )


def answer(
    questions: QuestionFile | None,
    files: Files,
    settings: AnswerSettings,
    methods: MethodSettings,
    *,
    phrasing: Phrasing,
    source: ModelSource,
    cluster: Cluster,
) -> Run:
    """Answer and measure the missing questions; Ctrl-C tells how many are kept."""
    from semgrad_guard.evaluation.runs.experiment import SampledQuestions
    from semgrad_guard.evaluation.runs.measuring import price_of_samples

    rows = () if questions is None else questions.rows
    phrasing.require(rows)
    sampled = SampledQuestions.of(rows, count=settings.sampled_questions, seed=methods.seed)
    measuring = Measuring(methods, settings, phrasing, sampled)
    estimators = methods.estimators(settings.max_tokens, settings.by)
    model = loading.load(source)
    experiment = measuring.experiment(model, estimators)
    drawn_for = len(rows) if sampled is None else len(sampled.keys)
    if (price := price_of_samples(estimators, sampled=drawn_for, questions=len(rows))) is not None:
        say(price, label="Warning")
    with (
        kept_on_interrupt("Answering", f"answers are kept in {files.answers}") as tell,
        spreading(cluster, model, source, measuring) as spread,
    ):
        answers = experiment.run(
            rows, files.answers, batch_size=settings.batch_size, spread=spread, on_progress=tell, on_step=tell.step
        )
    return Run([row for one in answers for row in one.rows_by_sentence], experiment.settings(rows))


def kept(files: Files, questions: QuestionFile | None) -> Run:
    """The answers there are, with the references of the questions, if those are given."""
    from semgrad_guard.evaluation.job_record import read_record
    from semgrad_guard.evaluation.runs.answers import EvaluatedAnswer

    settings, answers = read_record(files.answers, EvaluatedAnswer)
    if questions is not None:
        known = {answer.key: answer for answer in answers}
        answers = [known[row.key] for row in questions.rows if row.key in known]
        if missing := len(questions.rows) - len(answers):
            note(f"{missing} of {len(questions.rows)} questions have no answer yet; without --regrade they get one.")
    if not answers:
        raise InputError(f"{files.answers} holds no answer to grade; run the command without --regrade.")
    return Run([row for one in answers for row in one.rows_by_sentence], settings)


def grade(
    run: Run, graders: Sequence[AnswerGrader], labels: Path | None, files: Files, questions: QuestionFile | None
) -> Results:
    """Every grader's verdicts; people, where there are labels, decide."""
    from semgrad_guard.evaluation.graders import GRADERS, default_grader
    from semgrad_guard.evaluation.graders.base import WordGrader
    from semgrad_guard.evaluation.graders.grading import GradedAnswer, grade, with_references
    from semgrad_guard.evaluation.graders.labels import NAME, labels_for
    from semgrad_guard.evaluation.graders.words import BY_WORDS, no_verdict
    from semgrad_guard.evaluation.results import Results

    answers = run.answers if questions is None else with_references(run.answers, questions.rows)
    grades = {} if labels is None else {NAME: labels_for(labels, answers, others=recorded_keys(files.answers))}
    graders = graders or [GRADERS[default_grader(run.settings["prompt_template"])]]
    for grader in graders:
        if isinstance(grader, WordGrader):
            grades[grader.name] = grade(answers, grader)
            continue
        with kept_on_interrupt(f"Grading by {grader.name}", f"grades are kept in {files.grades}") as tell:
            grades[grader.name] = grade(answers, grader, files.grades, on_progress=tell)
    decides, verdicts = next(iter(grades.items()))
    shown = [
        GradedAnswer(answer.question, answer.text or "", answer.references, verdict)
        for answer, verdict in zip(answers, verdicts, strict=True)
        if verdict is not None or decides in BY_WORDS
    ]
    show_grades(shown, decides)
    results = Results(answers, grades, run.settings, _name(questions, files))
    for name, count in results.ungraded.items():
        left_out = f"{count} of {len(answers)} answers have no verdict by {name}; they are left out of the results."
        say(no_verdict(count, len(answers), name) if name in BY_WORDS else left_out, label="Warning")
    for title, reason in results.unfitted.items():
        note(f"{title} is left out. {reason}")
    return results


def _name(questions: QuestionFile | None, files: Files) -> str:
    """The name of the questions in the results: that of their file or dataset, or the one of last time."""
    from semgrad_guard.evaluation.graded import read_graded
    from semgrad_guard.evaluation.questions.sources import HUB

    if questions is None:
        return read_graded(files.run).data if files.run.exists() else files.folder.name
    source = str(questions.path)
    return source.removeprefix(HUB) if source.startswith(HUB) else questions.path.stem
