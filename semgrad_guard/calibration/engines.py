"""The answers of one engine, and of several for which a promise is to hold together.

Why: docs/adr/0180-one-threshold-for-several-engines.md
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from semgrad_guard.calibration import hand_grades
from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_set import CalibrationSet, Copies, read_set
from semgrad_guard.errors import CalibrationError


@dataclass(frozen=True)
class EngineAnswers:
    """Answers to the same questions by the same model in another engine, or in another number format.

    `uncertainties`, `correct` and `groups` are columns as in `calibrate`; `groups` names a question as the other
    engine's do. `binding` differs from the other engine's in nothing but the engine (see `EngineIdentity`).
    """

    uncertainties: Iterable[float | None]
    correct: Iterable[Any]
    groups: Iterable[Hashable]
    binding: Binding


@dataclass(frozen=True)
class Engine:
    """The answers of one engine; `questions` names them as the caller's rows are, None where they have no names."""

    answers: CalibrationSet
    questions: Sequence[Hashable] | None
    binding: Binding | None

    @classmethod
    def read(
        cls,
        uncertainties: Iterable[float | None],
        correct: Iterable[Any],
        *,
        groups: Iterable[Hashable] | None,
        binding: Binding | None,
        copies: Copies,
    ) -> Engine:
        """The columns, checked."""
        named = list(groups) if isinstance(groups, Iterable) else groups
        return cls(read_set(uncertainties, correct, groups=named, copies=copies), named, binding)

    @property
    def names(self) -> Sequence[Hashable]:
        """The names of the scored answers' questions, or their rows."""
        rows = self.answers.scored
        return rows if self.questions is None else [self.questions[row] for row in rows]

    def draw(self, *, alpha: float, count: int, machine: bool) -> hand_grades.Part:
        """The surest answers, and the part of them that people grade."""
        return hand_grades.draw(self.answers.scores, self.names, alpha=alpha, count=count, machine=machine)

    def graded(self, part: hand_grades.Part, labels: Sequence[Any]) -> CalibrationSet:
        """The answers that people graded.

        Raises:
            CalibrationError: one has no grade.
        """
        rows = part.rows(self.answers.scored)[: part.record.count]
        if missing := [row for row in rows if labels[row] is None]:
            raise CalibrationError(
                f"{len(missing)} of the {len(rows)} answers that are to be graded by hand have no grade (row "
                f"{missing[0]}, for example). Grade those of `rows_to_grade`, all of them: without the hard ones the "
                "rest is no random sample."
            )
        scores, correct = self.answers.scores[part.by_hand], self.answers.correct[part.by_hand]
        return replace(self.answers, scores=scores, correct=correct, n_unscored=0, n_unscored_wrong=0)


def others_of(own: Engine, also: Sequence[EngineAnswers], *, copies: Copies) -> list[Engine]:
    """The further engines: their bindings are the first one's, except for the engine."""
    others: list[Engine] = []
    for answers in also:
        if own.binding is None or own.questions is None:
            raise CalibrationError(
                "Answers of several engines need a binding for each, and groups: which engine, and which question."
            )
        engine = answers.binding.engine
        taken = [own.binding.engine, *(before.binding.engine for before in also[: len(others)])]
        if engine is None or engine in taken or None in taken:
            raise CalibrationError(
                "The bindings of several engines must name a fingerprint each, by which answers are distinguished; "
                f"{own.binding.fingerprint!r} and {answers.binding.fingerprint!r} do not."
            )
        own.binding.in_engine(engine).require(answers.binding)
        columns = answers.uncertainties, answers.correct
        others.append(Engine.read(*columns, groups=answers.groups, binding=answers.binding, copies=copies))
    return others


def joint_binding(engines: Sequence[Engine], at: int) -> Binding | None:
    """The binding of one engine, which names the others."""
    own = engines[at].binding
    others = tuple(x.binding.engine for i, x in enumerate(engines) if i != at and x.binding is not None)
    return own.model_copy(update={"also": others}) if own is not None and others else own
