"""`semgrad-guard calibrate --by sentence`: its options, and the questions whose sentences people grade."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from semgrad_guard.cli.terminal import note
from semgrad_guard.declared import Option
from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.questions.data import QuestionFile
from semgrad_guard.settings import DECISION, OnDoubt, SentenceForm

if TYPE_CHECKING:
    from semgrad_guard.estimators import Estimator

Promise = Literal["sentence", "answer"]


@dataclass(frozen=True)
class Sentences:
    """The promise by sentence: the action at a doubtful one, and what is promised."""

    on_doubt: OnDoubt
    promise: Promise


@dataclass(frozen=True, kw_only=True)
class PromisedSentences(SentenceForm):
    """How answers are judged, and what is promised about their sentences."""

    promise: Annotated[
        Promise | None,
        Option(
            "By sentence: at most alpha of the cases in which one delivered sentence of an answer, drawn at random, is "
            "wrong (sentence), or of the answers that deliver a wrong one (answer).",
            DECISION,
            "sentence|answer",
            shown="sentence",
        ),
    ] = None

    def form(self, others: Mapping[str, object]) -> Sentences | None:
        """The promise; None: whole answers are judged. `others` are options that do not go with sentences.

        Raises:
            InputError: an option is about the other unit.
        """
        from semgrad_guard.guard.familiarity import judged_by

        on_doubt = judged_by(None, self.by, self.on_doubt)
        if on_doubt is None:
            if self.promise is not None:
                raise InputError("--promise is about sentences: give --by sentence, or leave it out")
            return None
        if given := [name for name, value in others.items() if value]:
            raise InputError(f"{given[0]} is for whole answers: leave it out, or leave --by sentence out")
        return Sentences(on_doubt, self.promise or "sentence")


def require_known(estimators: Sequence[Estimator], sentences: Sentences | None) -> None:
    """Refuse an estimator that compares whole answers, by sentence."""
    from semgrad_guard.guard.calibrated_estimator import require_by_sentence

    if sentences is not None:
        for one in estimators:
            require_by_sentence(one)


def drawn_questions(questions: QuestionFile, count: int) -> QuestionFile:
    """A random part of the questions, of traffic with their repetitions; a hash of the questions draws."""
    times = questions.times or [1] * len(questions.rows)
    draws = [(row, number) for row, most in enumerate(times) for number in range(most)]
    if len(draws) <= count:
        return questions
    ranks = {draw: hashlib.sha256(f"{draw[1]} {questions.rows[draw[0]].key}".encode()).digest() for draw in draws}
    drawn = Counter(row for row, _ in sorted(draws, key=ranks.__getitem__)[:count])
    note(
        f"{count} of {len(draws)} questions are put to the model, a random part: people grade every sentence of their "
        "answers. --by-hand takes another number."
    )
    rows = sorted(drawn)
    kept = [questions.rows[row] for row in rows]
    return replace(questions, rows=kept, times=tuple(drawn[row] for row in rows) if questions.times else ())
