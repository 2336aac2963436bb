"""Is an answer correct? By words (here), by a model that reads both (`entailment`, `bem`, `judge`), or by people.

The model graders are imported from their own modules; those here need neither torch nor anything else.
"""

from semgrad_guard.engine.texts.words import normalise, token_f1
from semgrad_guard.evaluation.graders.base import AnswerGrader, Graded, Grader
from semgrad_guard.evaluation.graders.words import GRADERS, ExactMatch, RougeL, TokenF1, rouge_l

__all__ = [
    "GRADERS",
    "AnswerGrader",
    "ExactMatch",
    "Graded",
    "Grader",
    "RougeL",
    "TokenF1",
    "normalise",
    "rouge_l",
    "token_f1",
]
