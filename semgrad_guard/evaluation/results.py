"""From answers and grades to what is read: the graded run that the report is made of, and a table of every answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semgrad_guard.errors import GradingError
from semgrad_guard.evaluation.evaluated import EvaluatedAnswer
from semgrad_guard.evaluation.graded import GradedRun
from semgrad_guard.evaluation.graders.base import Verdicts
from semgrad_guard.evaluation.spreadsheet import write_table


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
        return {name: str(each.get("title", name)) for name, each in named.items()}

    @property
    def ungraded(self) -> dict[str, int]:
        """How many answers each grader came to no verdict on, where there are any."""
        missing = {name: verdicts.count(None) for name, verdicts in self.grades.items()}
        return {name: count for name, count in missing.items() if count}

    def graded_run(self, *, extra_settings: Mapping[str, Any] | None = None) -> GradedRun:
        """What tables and figures are made of: the answers that every grader came to a verdict on.

        Raises:
            GradingError: there is no such answer.
        """
        kept = [
            i for i in range(len(self.answers)) if all(verdicts[i] is not None for verdicts in self.grades.values())
        ]
        if not kept:
            raise GradingError(
                "There is no answer that every grader came to a verdict on; grade again, or leave a grader out."
            )
        answers = [self.answers[i] for i in kept]
        correct, *others = ([bool(verdicts[i]) for i in kept] for verdicts in self.grades.values())
        decides, *beside = self.grades
        model = str(self.settings["model"])
        names = self.titles
        return GradedRun(
            title=f"{model} on {self.data}",
            model=model,
            data=self.data,
            scores={title: [a.uncertainty(name) for a in answers] for name, title in names.items()},
            correct=correct,
            milliseconds={title: [a.milliseconds.get(name, 0.0) for a in answers] for name, title in names.items()},
            generation_ms=[a.generation_ms for a in answers],
            mean_entropy=[a.mean_entropy for a in answers],
            kinds=[a.kind for a in answers],
            other_graders=dict(zip(beside, others, strict=True)),
            ablations={name: [a.ablations.get(name) for a in answers] for name in self.settings.get("ablations", ())},
            settings={
                **self.settings,
                "grader": decides,
                "questions": len(self.answers),
                "left out: no verdict": len(self.answers) - len(kept),
                "without an answer": sum(a.text is None for a in answers),
                "answers generated together": sorted({a.rows for a in answers}),
                **(extra_settings or {}),
            },
        )

    def write_csv(self, path: Path) -> Path:
        """One row per question: what was asked and answered, every grader's verdict, every method's score and cost."""
        names = self.titles
        header = ["id", "key", "kind", "question", "references", "answer", *(f"correct: {g}" for g in self.grades)]
        header += [*names.values(), *(f"ms: {title}" for title in names.values()), "ms: generation"]
        rows = [
            [
                answer.id,
                answer.key,
                answer.kind,
                answer.question,
                "\n".join(answer.references),
                answer.text,
                *(_bit(verdicts[i]) for verdicts in self.grades.values()),
                *(answer.uncertainty(name) for name in names),
                *(answer.milliseconds.get(name) for name in names),
                answer.generation_ms,
            ]
            for i, answer in enumerate(self.answers)
        ]
        return write_table(path, header, rows)


def _bit(verdict: bool | None) -> int | None:
    return None if verdict is None else int(verdict)
