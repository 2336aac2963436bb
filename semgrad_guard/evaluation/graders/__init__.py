"""Is an answer correct? By words (here), by a model that reads both (`entailment`, `bem`, `judge`), or by people.

The model graders are imported from their own modules; those here need neither torch nor anything else.
"""

from semgrad_guard.engine.words import normalise as normalise
from semgrad_guard.engine.words import token_f1 as token_f1
from semgrad_guard.evaluation.graders.base import AnswerGrader as AnswerGrader
from semgrad_guard.evaluation.graders.base import AnswerToGrade as AnswerToGrade
from semgrad_guard.evaluation.graders.base import Grader as Grader
from semgrad_guard.evaluation.graders.contains import Contains as Contains
from semgrad_guard.evaluation.graders.words import GRADERS as GRADERS
from semgrad_guard.evaluation.graders.words import ExactMatch as ExactMatch
from semgrad_guard.evaluation.graders.words import RougeL as RougeL
from semgrad_guard.evaluation.graders.words import TokenF1 as TokenF1
from semgrad_guard.evaluation.graders.words import default_grader as default_grader
from semgrad_guard.evaluation.graders.words import rouge_l as rouge_l
