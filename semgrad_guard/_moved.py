"""Modules under their old names, for one release: importing one works, and warns with the new name."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ENGINE = {
    "models": ("architecture", "checkpoint", "hub"),
    "prompts": ("prompt", "semantic_token", "token_choice", "tool_format", "grammar"),
    "generation": ("decoding", "sampling", "stream", "reading", "evidence"),
    "replay": ("prefix_cache", "attention", "projections", "token_batch", "prompt_store"),
    "scoring": (
        "head",
        "logits",
        "gradients",
        "segments",
        "self_check",
        "scores",
        "gradient_scores",
        "products",
        "distribution",
        "semantic_preservation",
    ),
    "texts": ("text_pairs", "answer_equivalence", "words"),
}
_DECISION = ("binding", "binomial", "calibration_record", "calibration_set", "choice", "confidence", "drift")

MOVED = {
    **{f"engine.{name}": f"engine.{room}.{name}" for room, names in _ENGINE.items() for name in names},
    "engine.memory": "engine.replay.memory_budget",
    "engine.shadow": "engine.replay.weight_sharing_copy",
    "engine.stand_ins": "engine.replay.module_swaps",
    "engine.hidden_states": "engine.replay.input_hooks",
    "engine.trace": "engine.replay.captured_states",
    "engine.few_rows": "engine.replay.skinny_linear",
    "engine.row_sample": "engine.scoring.stratified_rows",
    "engine.pricing": "engine.cost_accounting",
    "engine.settings": "adapters.settings",
    "engine.weights": "adapters.weights",
    "telemetry": "adapters.telemetry",
    "calibrated": "guard.calibrated_estimator",
    **{f"decision.{name}": f"calibration.{name}" for name in (*_DECISION, "fixed_sequence")},
    "decision.calibration": "calibration.calibrating",
    **{f"decision.{name}": f"guard.{name}" for name in ("policy", "promise", "verdicts")},
}
"""Old module -> new module, both below `semgrad_guard`. CHANGELOG.md has the same table."""

TOP = {
    "FRUGAL": "engine.replay.memory_budget",
    "Drift": "calibration",
    "Evidence": "engine.generation.evidence",
    "ExGrad": "estimators",
    "GreedyNLL": "estimators",
    "MaxProbability": "estimators",
    "MeanEntropy": "estimators",
    "Objective": "engine.objective",
    "Score": "records",
    "Segment": "engine.scoring.segments",
    "SemanticToken": "records",
    "combined_promise": "guard",
    "drift": "calibration",
    "split_delta": "guard",
}
"""Names that stood at the top of `semgrad_guard` -> the module that has them."""

NAMES = {
    "decision": ("calibration", "guard"),
    "engine.generation": ("engine.generation.options", "engine.generation.generation"),
    "engine.replay": ("engine.replay.replayer",),
    "engine.scoring": ("engine.scoring.scorer",),
}
"""Modules that are gone or have become packages -> where their names are looked for."""

_ROOT = "semgrad_guard."


def moved_name(module: str, name: str) -> Any:
    """A name that stood in `module`, from where it stands now.

    Raises:
        AttributeError: it never stood there.
    """
    for home in _homes(module, name):
        found = getattr(importlib.import_module(_ROOT + home), name, None)
        if found is not None and not name.startswith("__"):
            _warn(f"{module}.{name}", f"{_ROOT}{home}.{name}", stacklevel=3)
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _homes(module: str, name: str) -> Sequence[str]:
    if module == _ROOT.rstrip("."):
        return (TOP[name],) if name in TOP else ()
    return NAMES[module.removeprefix(_ROOT)]


class _Moved(MetaPathFinder, Loader):
    """Finds what no other finder has found: a module of ours under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        old = fullname.removeprefix(_ROOT)
        known = fullname.startswith(_ROOT) and (old in MOVED or old == "decision")
        return ModuleSpec(fullname, self, is_package=old == "decision") if known else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.removeprefix(_ROOT)
        if old in MOVED:
            _warn(module.__name__, _ROOT + MOVED[old], stacklevel=3)
            sys.modules[module.__name__] = importlib.import_module(_ROOT + MOVED[old])
        else:
            module.__dict__["__getattr__"] = partial(moved_name, module.__name__)  # PEP 562


def _warn(old: str, new: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"{old} is now {new}; the old name goes away with the next release", DeprecationWarning, stacklevel=stacklevel
    )


def install() -> None:
    """Look old names up after everything else has failed."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
