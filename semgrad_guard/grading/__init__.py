"""Is an answer correct? By words, by a model that reads both (`nli`, `bem`, `judge`), or by people.

The graders by words and their names are here; the others, which need more than this package, are in `by_name`.
"""

from semgrad_guard.engine.text_units import normalise as normalise
from semgrad_guard.engine.text_units import token_f1 as token_f1
from semgrad_guard.grading.by_name import GRADERS as GRADERS
from semgrad_guard.grading.by_name import ExactMatch as ExactMatch
from semgrad_guard.grading.by_name import SharedWords as SharedWords
from semgrad_guard.grading.by_name import default_grader as default_grader
from semgrad_guard.grading.by_name import rouge_l as rouge_l
from semgrad_guard.grading.contains import Contains as Contains
from semgrad_guard.grading.grader import AnswerGrader as AnswerGrader
from semgrad_guard.grading.grader import AnswerToGrade as AnswerToGrade
from semgrad_guard.grading.grader import Grader as Grader
