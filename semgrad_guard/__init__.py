"""semgrad-guard: every answer of a local language model knows how sure it is, and a threshold keeps a promise.

The names load lazily: importing this package, or `semgrad_guard.calibration`, loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semgrad_guard import _moved

_moved.install()

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding, Calibration, Drift, DriftMonitor, calibrate, drift
    from semgrad_guard.engine.generation.evidence import Evidence
    from semgrad_guard.engine.generation.generation import Generation
    from semgrad_guard.engine.generation.options import GenerationOptions
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.engine.objective import Objective
    from semgrad_guard.engine.prompts.token_choice import TokenChoice
    from semgrad_guard.engine.replay.memory import FRUGAL, Memory
    from semgrad_guard.engine.scoring.gradient_scores import gradient_scores
    from semgrad_guard.engine.scoring.scores import GradientScores
    from semgrad_guard.engine.scoring.segments import Segment
    from semgrad_guard.errors import SemGradGuardError
    from semgrad_guard.estimators import (
        Estimator,
        ExGrad,
        FusedGrad,
        GreedyNLL,
        HybridGrad,
        MaxProbability,
        MeanEntropy,
        ParaGrad,
        SemGrad,
    )
    from semgrad_guard.guard import Guard, Policy, Promise, combined_promise, split_delta
    from semgrad_guard.guard.calibrated_estimator import estimator_of
    from semgrad_guard.records import METADATA_KEY, Message, Score, SemanticToken, ToolCall, Verdict

_HOMES = {
    "semgrad_guard.calibration": ("Binding", "Calibration", "Drift", "DriftMonitor", "calibrate", "drift"),
    "semgrad_guard.engine.generation.evidence": ("Evidence",),
    "semgrad_guard.engine.generation.generation": ("Generation",),
    "semgrad_guard.engine.generation.options": ("GenerationOptions",),
    "semgrad_guard.engine.scoring.gradient_scores": ("gradient_scores",),
    "semgrad_guard.engine.language_model": ("LanguageModel",),
    "semgrad_guard.engine.replay.memory": ("FRUGAL", "Memory"),
    "semgrad_guard.engine.objective": ("Objective",),
    "semgrad_guard.engine.scoring.scores": ("GradientScores",),
    "semgrad_guard.engine.scoring.segments": ("Segment",),
    "semgrad_guard.engine.prompts.token_choice": ("TokenChoice",),
    "semgrad_guard.errors": ("SemGradGuardError",),
    "semgrad_guard.estimators": (
        "Estimator",
        "ExGrad",
        "FusedGrad",
        "GreedyNLL",
        "HybridGrad",
        "MaxProbability",
        "MeanEntropy",
        "ParaGrad",
        "SemGrad",
    ),
    "semgrad_guard.guard": ("Guard", "Policy", "Promise", "combined_promise", "estimator_of", "split_delta"),
    "semgrad_guard.records": ("METADATA_KEY", "Message", "Score", "SemanticToken", "ToolCall", "Verdict"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "FRUGAL",
    "METADATA_KEY",
    "Binding",
    "Calibration",
    "Drift",
    "DriftMonitor",
    "Estimator",
    "Evidence",
    "ExGrad",
    "FusedGrad",
    "Generation",
    "GenerationOptions",
    "GradientScores",
    "GreedyNLL",
    "Guard",
    "HybridGrad",
    "LanguageModel",
    "MaxProbability",
    "MeanEntropy",
    "Memory",
    "Message",
    "Objective",
    "ParaGrad",
    "Policy",
    "Promise",
    "Score",
    "Segment",
    "SemGrad",
    "SemGradGuardError",
    "SemanticToken",
    "TokenChoice",
    "ToolCall",
    "Verdict",
    "calibrate",
    "combined_promise",
    "drift",
    "estimator_of",
    "gradient_scores",
    "split_delta",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
