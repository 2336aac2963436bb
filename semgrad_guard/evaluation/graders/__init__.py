"""Is an answer correct? By words (here), by a model that reads both (`entailment`, `bem`, `judge`), or by people.

The model graders are imported from their own modules; those here need neither torch nor anything else.
"""

import warnings

from semgrad_guard.engine.texts.words import normalise, token_f1
from semgrad_guard.evaluation.graders.base import AnswerGrader, AnswerToGrade, Grader
from semgrad_guard.evaluation.graders.by_words import GRADERS, default_grader
from semgrad_guard.evaluation.graders.contains import Contains
from semgrad_guard.evaluation.graders.words import ExactMatch, RougeL, TokenF1, rouge_l

__all__ = [
    "GRADERS",
    "AnswerGrader",
    "AnswerToGrade",
    "Contains",
    "ExactMatch",
    "Grader",
    "RougeL",
    "TokenF1",
    "default_grader",
    "normalise",
    "rouge_l",
    "token_f1",
]


def __getattr__(name: str) -> object:
    if name == "Graded":
        warnings.warn(
            f"{__name__}.Graded is now {__name__}.AnswerToGrade; the old name goes away with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return AnswerToGrade
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
