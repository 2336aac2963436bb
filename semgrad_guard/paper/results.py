"""From answers and grades to results: the graded run that the report is made from, a table of every answer, and the
paper's own results and settings, to compare with.

The paper: Li et al., "Gradients with Respect to Semantics Preserving Embeddings Tell the Uncertainty of Large Language
Models", ICML 2026; Tables 1, 3 and 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from semgrad_guard.declared import read_record
from semgrad_guard.errors import GradingError, InputError
from semgrad_guard.estimators.learned import FusedStates
from semgrad_guard.files import atomic_write, table_of
from semgrad_guard.grading.by_name import is_final, right_means
from semgrad_guard.grading.candidates import cross_fitted
from semgrad_guard.grading.grader import ABSTAINED, Verdicts
from semgrad_guard.named import title_of
from semgrad_guard.questions.data_files import write_table
from semgrad_guard.questions.run_record import EvaluatedAnswer, first_line, flat


@dataclass(frozen=True)
class GradedRun:
    """One column of the tables: every method's score for every answer, and whether the answer was right.

    One entry per question everywhere, in the same order. Columns that were not recorded stay empty; the tables and
    figures that need them mention it.

    Args:
        title: the name of the run in the report, for example "Llama-3.1-8B on SciQ"; unique in a report.
        model: the model's name. Runs of one model are side by side.
        data: the name of the questions.
        scores: method (the paper's spelling) -> uncertainty, higher = less certain, None without a score.
        correct: whether the answer is right, by the run's grader.
        milliseconds: method -> run time in addition to plain generation, per question; None where the question was
            not put to the method.
        generation_ms: run time of plain generation, per question.
        mean_entropy: mean token entropy in nats, per question; None where there is none.
        kinds: the kind of each question, for a look at shifts; None where it has none.
        other_graders: grader -> whether the answer is right by that grader instead.
        ablations: variant of SemGrad -> uncertainty, as `scores`.
        clusters: by sentence, the number of the answer that each row is a sentence of; intervals are over answers.
        settings: how the run was made, as plain JSON; shown in the report.

    Raises:
        InputError: no name, no question, no method, or columns of different lengths.
    """

    title: str
    model: str
    data: str
    scores: Mapping[str, Sequence[float | None]]
    correct: Sequence[bool]
    milliseconds: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, Sequence[float | None]])
    generation_ms: Sequence[float] = ()
    mean_entropy: Sequence[float | None] = ()
    kinds: Sequence[str | None] = ()
    other_graders: Mapping[str, Sequence[bool]] = field(default_factory=dict[str, Sequence[bool]])
    ablations: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, Sequence[float | None]])
    clusters: Sequence[int] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not (self.title.strip() and self.model.strip() and self.data.strip()):
            raise InputError("a graded run needs a title, a model and a data set: it is what the report calls them")
        if not len(self.correct) or not self.scores:
            raise InputError(f"{self.title} needs one question and one method at least")
        columns: dict[str, Sequence[Any]] = {}
        for name in ("scores", "ablations", "milliseconds", "other_graders"):
            columns |= {f"{name}[{key!r}]": column for key, column in getattr(self, name).items()}
        recorded = ("generation_ms", "mean_entropy", "kinds", "clusters")
        columns |= {name: column for name in recorded if len(column := getattr(self, name))}
        for name, column in columns.items():
            if len(column) != self.n:
                raise InputError(
                    f"{name} of {self.title} has {len(column)} entries and correct has {self.n}; pass one of each per "
                    "question"
                )

    @property
    def n(self) -> int:
        """How many questions."""
        return len(self.correct)

    def put_to(self, method: str) -> list[int]:
        """The questions that were put to the method: all of them, unless some have no run time."""
        times = self.milliseconds.get(method, [0.0] * self.n)
        return [row for row, time in enumerate(times) if time is not None]

    @property
    def accuracy(self) -> float:
        """The share of right answers, in [0, 1]."""
        return sum(self.correct) / self.n


def require_distinct(runs: Sequence[GradedRun]) -> None:
    """Refuse an empty list of runs, and two runs of one title: their columns could not be told apart."""
    if not runs:
        raise InputError("there is no run to report on; pass at least one")
    titles = [run.title for run in runs]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise InputError(f"two runs are called {twice!r}; give each a title of its own")


def write_graded(path: Path, run: GradedRun) -> Path:
    """Write the run as JSON."""
    return atomic_write(path, json.dumps(asdict(run), ensure_ascii=False))


def read_graded(path: Path) -> GradedRun:
    """Read a run back.

    Raises:
        DataFileError: the file is missing, or is not a graded run.
    """
    advice = "Name the folder of an evaluation that has finished, or evaluate (or --regrade) there again."
    return read_record(GradedRun, path, title="graded run", advice=advice)


_ASKED = ("id", "key", "kind", "question", "references", "answer")


@dataclass(frozen=True)
class Results:
    """A run's answers with the verdicts of its graders, the deciding one first; `settings` are the run's own."""

    answers: Sequence[EvaluatedAnswer]
    grades: Mapping[str, Verdicts]
    settings: Mapping[str, Any]
    data: str

    @property
    def titles(self) -> dict[str, str]:
        """The methods' names and how the paper spells them."""
        named: Mapping[str, Mapping[str, Any]] = self.settings["estimators"]
        return {name: str(estimator.get("title", name)) for name, estimator in named.items()}

    @property
    def ungraded(self) -> dict[str, int]:
        """How many answers each grader came to no verdict on, where there are any."""
        missing = {name: verdicts.count(None) for name, verdicts in self.grades.items()}
        return {name: count for name, count in missing.items() if count}

    @cached_property
    def kept(self) -> list[int]:
        """Which answers count: all but abstentions, and those without a label, or without a model's verdict, which the
        next run repeats.

        No verdict by words is final, and means wrong, as in a calibration.
        """
        needed = [verdicts for name, verdicts in self.grades.items() if not is_final(name)]
        return [i for i in self._claims if all(verdicts[i] is not None for verdicts in needed)]

    @property
    def _claims(self) -> list[int]:
        """The answers that are no abstention by the deciding grader."""
        return [i for i, verdict in enumerate(next(iter(self.grades.values()))) if verdict != ABSTAINED]

    @cached_property
    def graded_run(self) -> GradedRun:
        """The source of tables and figures: the answers that are `kept`.

        Raises:
            GradingError: none is kept.
        """
        if not self.kept:
            raise GradingError(
                "There is no answer that every grader found right or wrong; grade again, or leave a grader out."
            )
        answers = [self.answers[i] for i in self.kept]
        correct, *others = ([verdicts[i] is True for i in self.kept] for verdicts in self.grades.values())
        decides, *beside = self.grades
        model = title_of(str(self.settings["model"]))
        places = {key: place for place, key in enumerate(dict.fromkeys(a.part_of for a in answers))}
        measured = {name: title for name, title in self.titles.items() if title not in self.unfitted}
        costs: dict[str, Any] = {}
        if self.settings.get("by") != "sentence":
            costs = {
                "milliseconds": {  # None where the question was not put to the method, and 0 without an answer
                    title: [a.milliseconds.get(name, 0.0 if a.text is None else None) for a in answers]
                    for name, title in measured.items()
                },
                "generation_ms": [a.generation_ms for a in answers],
                "mean_entropy": [a.mean_entropy for a in answers],
            }
        settings = {
            **self.settings,
            "grader": decides,
            "questions": len(self.answers),
            **({"right means": means} if (means := right_means(decides)) else {}),
            "left out: abstained": len(self.answers) - len(self._claims),
            "left out: no verdict": len(self._claims) - len(answers),
            "no verdict: counted as wrong": self.ungraded.get(decides, 0) if is_final(decides) else 0,
            "without an answer": sum(a.text is None for a in answers),
            "answers generated together": sorted({a.rows for a in answers}),
        }
        if FusedStates.name in self.titles:
            fitted = "five-fold cross-validation on these answers"
            settings[FusedStates.title] = f"left out. {reason}" if (reason := self._learned[1]) else fitted
        return GradedRun(
            title=f"{model} on {self.data}",
            model=model,
            data=self.data,
            scores={title: [self._uncertainty(name, i) for i in self.kept] for name, title in measured.items()},
            correct=correct,
            kinds=[a.kind for a in answers],
            clusters=[places[a.part_of] for a in answers if a.part_of is not None],
            other_graders=dict(zip(beside, others, strict=True)),
            ablations={name: [a.ablations.get(name) for a in answers] for name in self.settings.get("ablations", ())},
            settings=settings,
            **costs,
        )

    @cached_property
    def _learned(self) -> tuple[dict[int, float | None], str | None]:
        """The scores of FusedStates, which needs the labels first, by answer; or why there are none."""
        correct = [next(iter(self.grades.values()))[i] is True for i in self.kept]
        scores, missing = cross_fitted([self.answers[i] for i in self.kept], correct)
        return dict(zip(self.kept, scores, strict=True)), missing

    def _uncertainty(self, name: str, i: int) -> float | None:
        return self._learned[0].get(i) if name == FusedStates.name else self.answers[i].uncertainty(name)

    @property
    def unfitted(self) -> dict[str, str]:
        """Why FusedStates has no scores, by its title: nothing where it has some, or was not requested."""
        reason = self._learned[1] if FusedStates.name in self.titles else None
        return {} if reason is None else {FusedStates.title: reason}

    def write_csv(self, path: Path) -> Path:
        """One row per question: question, answer, every grader's verdict, every method's score and cost."""
        names = self.titles
        header = [*_ASKED, *(f"correct: {g}" for g in self.grades)]
        header += [*names.values(), *(f"ms: {title}" for title in names.values()), "ms: generation"]
        rows = [
            [
                answer.id,
                answer.key,
                answer.kind,
                answer.question,
                "\n".join(answer.references),
                answer.text,
                *(int(grade) if isinstance(grade := verdicts[i], bool) else grade for verdicts in self.grades.values()),
                *(self._uncertainty(name, i) for name in names),
                *(answer.milliseconds.get(name) for name in names),
                answer.generation_ms,
            ]
            for i, answer in enumerate(self.answers)
        ]
        return write_table(path, header, rows)


def is_graded_table(path: Path) -> bool:
    """Whether a file is a table that `Results.write_csv` wrote, by its first columns."""
    return first_line(path).startswith(",".join([*_ASKED, "correct: "]).encode())


Settings = Mapping[str, Any]

OURS = "HybridGrad"
"""The method that everything is compared with."""

_TABLES: Mapping[str, Any] = table_of("semgrad_guard.paper", "published.toml")
_AVERAGES: Mapping[str, tuple[float, float]] = _TABLES["averages"]
METHODS = tuple(_AVERAGES)
"""In the order of the paper's tables: eleven rivals, then its own three."""

SOURCE = "Li et al., ICML 2026, averages over three models and three data sets"

AUROC_AVERAGES = {method: auroc for method, (auroc, _) in _AVERAGES.items()}
AURC_AVERAGES = {method: aurc for method, (_, aurc) in _AVERAGES.items()}

RUN_TIME_SHARES = {
    method: seconds / _TABLES["run_time"]["plain"] for method, seconds in _TABLES["run_time"]["added"].items()
}
"""Table 3: additional run time over that of plain generation."""

SETTINGS: Mapping[str, Settings] = {
    "ln_pe": {"plan.count": 10, "plan.temperature": 1.0},
    "self_consistency": {"plan.count": 10, "plan.temperature": 0.7, "plan.top_p": 1.0},
    "deg": {"plan.count": 10, "plan.temperature": 0.7, "plan.top_p": 1.0},
    "inside": {"plan.count": 10, "plan.temperature": 0.5, "plan.top_p": 0.99, "plan.top_k": 5},
    "semantic_entropy": {"plan.count": 10, "plan.temperature": 1.0},
    "semantic_density": {"plan.count": 10, "plan.penalty": 1.0, "temperature": 0.1},
    "mutual_information": {"plan.count": 10, "plan.temperature": 0.9},
    "sar": {"plan.count": 5, "plan.temperature": 1.0},
    "semgrad": {"variant": "paper", "layers": None, "norm": "l1", "weighted": True},
    "paragrad": {"variant": "paper", "norm": "l1", "weighted": True},
    "hybridgrad": {"variant": "paper", "layers": None, "norm": "l1", "weighted": True, "tau": 1.0, "beta": 1.0},
}
"""Estimator -> the settings that the paper names for it (sections 3.3 and 4.1, appendix C.2)."""

MODELS = {
    "equivalence": ("deberta", "the paper asks DeBERTa trained on MNLI"),
    "similarity": ("stsb-roberta-large", "the paper asks cross-encoder/stsb-roberta-large"),
}
"""Setting of an estimator -> (a part of the name of the paper's model, the paper's choice in words)."""

STANDING = (
    "The end token of an answer is not scored, by G-NLL either: scored are the tokens that a reader sees.",
    "Paraphrases for the Semantic Preservation Score are the data file's; the paper asked a service for them.",
)
"""Where this project differs from the paper whatever the settings."""


def in_order(methods: Iterable[str]) -> list[str]:
    """The paper's methods in its order, then the others as they come."""
    given = list(methods)
    return [m for m in METHODS if m in given] + [m for m in given if m not in METHODS]


def deviations(settings: Settings) -> list[str]:
    """In words, every setting of a run that the paper names and that differs, then the standing differences.

    `settings` has "grader", "prompt", "generation" and "estimators": {name: {"name": ..., **settings}}. Settings that
    are not stated is not compared.
    """
    found: list[str] = []
    grader, prompt = settings.get("grader"), settings.get("prompt")
    if grader is not None and "bem" not in str(grader).lower():
        found.append(f"Answers are graded by {grader}; the paper uses BEM at a score of 0.7.")
    if prompt is not None and str(prompt) != "paper":
        called = "a template of its own" if "{" in str(prompt) else prompt
        found.append(f"The prompt is {called}; the paper asks for a direct answer with one or few words.")
    generation = cast("Settings", settings.get("generation") or {})
    if generation.get("temperature"):
        found.append(f"Answers are sampled at temperature {generation['temperature']}; the paper decodes greedily.")
    for key, stated in cast("Mapping[str, Settings]", settings.get("estimators") or {}).items():
        leaves, name, title = dict(flat(stated)), str(stated.get("name", key)), str(stated.get("title", key))
        for setting, expected in SETTINGS.get(name, {}).items():
            if setting in leaves and leaves[setting] != expected:
                found.append(
                    f"{title}: {setting.removeprefix('plan.')} is {leaves[setting]}, and {expected} in the paper."
                )
        for setting, (part, theirs) in MODELS.items():
            if setting in leaves and part not in str(leaves[setting]).lower():
                found.append(f"{title}: {setting} is judged by {leaves[setting]}; {theirs}.")
        if name == "p_true" and leaves.get("examples") == []:
            found.append(f"{title}: asked without examples; the paper's published code shows six.")
    return [*found, *STANDING]
