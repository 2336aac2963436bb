"""From answers and grades to results: the graded run behind the report, and a table of every answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from semgrad_guard.errors import GradingError
from semgrad_guard.estimators.learned import FusedStates
from semgrad_guard.grading.by_name import is_final, right_means
from semgrad_guard.grading.candidates import cross_fitted
from semgrad_guard.grading.grader import ABSTAINED, Verdicts
from semgrad_guard.named import title_of
from semgrad_guard.paper.graded import GradedRun
from semgrad_guard.questions.data_files import first_line, write_table
from semgrad_guard.questions.run_record import EvaluatedAnswer

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
