"""semgrad-guard: every answer of a local language model knows how sure it is, and a threshold keeps a promise.

These are the names that most programs need; the others are in their modules (`semgrad_guard.guard`, `.calibration`,
`.estimators`, `.errors`, `.records`, `.adapters`). Names load at their first use: importing this package, or
`semgrad_guard.calibration`, loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semgrad_guard.lazy import lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding as Binding
    from semgrad_guard.calibration import Calibration as Calibration
    from semgrad_guard.calibration import DriftMonitor as DriftMonitor
    from semgrad_guard.calibration import calibrate as calibrate
    from semgrad_guard.engine.answers.answer import Generation as Generation
    from semgrad_guard.engine.answers.options import GenerationOptions as GenerationOptions
    from semgrad_guard.engine.language_model import LanguageModel as LanguageModel
    from semgrad_guard.engine.objective import TokenChoice as TokenChoice
    from semgrad_guard.engine.scores.gradient_scores import gradient_scores as gradient_scores
    from semgrad_guard.engine.scores.gradients import GradientScores as GradientScores
    from semgrad_guard.engine.scores.tape import Memory as Memory
    from semgrad_guard.errors import SemGradGuardError as SemGradGuardError
    from semgrad_guard.estimators import Estimator as Estimator
    from semgrad_guard.estimators import HybridGrad as HybridGrad
    from semgrad_guard.estimators import ParaGrad as ParaGrad
    from semgrad_guard.estimators import SemGrad as SemGrad
    from semgrad_guard.guard import Guard as Guard
    from semgrad_guard.guard import Policy as Policy
    from semgrad_guard.guard import Promise as Promise
    from semgrad_guard.guard import Router as Router
    from semgrad_guard.guard import estimator_of as estimator_of
    from semgrad_guard.records import METADATA_KEY as METADATA_KEY
    from semgrad_guard.records import Message as Message
    from semgrad_guard.records import ToolCall as ToolCall
    from semgrad_guard.records import Verdict as Verdict
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
