"""semgrad-guard: every answer of a local language model knows how sure it is, and a threshold keeps a promise.

These are the names that most programs need; the others stand in their modules (`semgrad_guard.guard`, `.calibration`,
`.estimators`, `.errors`, `.records`, `.adapters`). Names load lazily: importing this package, or
`semgrad_guard.calibration`, loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semgrad_guard import _moved

_moved.install()

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding, Calibration, DriftMonitor, calibrate
    from semgrad_guard.engine.generation.generation import Generation
    from semgrad_guard.engine.generation.options import GenerationOptions
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.engine.prompts.token_choice import TokenChoice
    from semgrad_guard.engine.replay.memory_budget import Memory
    from semgrad_guard.engine.scoring.gradient_scores import gradient_scores
    from semgrad_guard.engine.scoring.scores import GradientScores
    from semgrad_guard.errors import SemGradGuardError
    from semgrad_guard.estimators import Estimator, FusedGrad, HybridGrad, ParaGrad, SemGrad
    from semgrad_guard.guard import Guard, Policy, Promise, estimator_of
    from semgrad_guard.records import METADATA_KEY, Message, ToolCall, Verdict

_HOMES = {
    "semgrad_guard.calibration": ("Binding", "Calibration", "DriftMonitor", "calibrate"),
    "semgrad_guard.engine.generation.generation": ("Generation",),
    "semgrad_guard.engine.generation.options": ("GenerationOptions",),
    "semgrad_guard.engine.language_model": ("LanguageModel",),
    "semgrad_guard.engine.prompts.token_choice": ("TokenChoice",),
    "semgrad_guard.engine.replay.memory_budget": ("Memory",),
    "semgrad_guard.engine.scoring.gradient_scores": ("gradient_scores",),
    "semgrad_guard.engine.scoring.scores": ("GradientScores",),
    "semgrad_guard.errors": ("SemGradGuardError",),
    "semgrad_guard.estimators": ("Estimator", "FusedGrad", "HybridGrad", "ParaGrad", "SemGrad"),
    "semgrad_guard.guard": ("Guard", "Policy", "Promise", "estimator_of"),
    "semgrad_guard.records": ("METADATA_KEY", "Message", "ToolCall", "Verdict"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.2.0"
__all__ = [
    "METADATA_KEY",
    "Binding",
    "Calibration",
    "DriftMonitor",
    "Estimator",
    "FusedGrad",
    "Generation",
    "GenerationOptions",
    "GradientScores",
    "Guard",
    "HybridGrad",
    "LanguageModel",
    "Memory",
    "Message",
    "ParaGrad",
    "Policy",
    "Promise",
    "SemGrad",
    "SemGradGuardError",
    "TokenChoice",
    "ToolCall",
    "Verdict",
    "calibrate",
    "estimator_of",
    "gradient_scores",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        return _moved.moved_name(__name__, name)
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
