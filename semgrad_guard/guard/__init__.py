"""The guard: policies, verdicts, and the flow from a scored draft to what is delivered.

The names load lazily: a `Policy` needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semgrad_guard.guard.calibrated_estimator import as_estimator, estimator_of
    from semgrad_guard.guard.guard import (
        ABSTAIN_MESSAGE,
        Guard,
        Target,
        assess,
        scoring_settings,
        template_name,
    )
    from semgrad_guard.guard.modes import Mode, require_mode, withholds
    from semgrad_guard.guard.policy import Policy, require_policy
    from semgrad_guard.guard.promise import Promise, combined_promise, split_delta
    from semgrad_guard.guard.verdicts import (
        abstained,
        binding_of,
        decide,
        decide_unscored,
        escalated,
        require_sequel,
    )

_HOMES = {
    "calibrated_estimator": ("as_estimator", "estimator_of"),
    "guard": ("ABSTAIN_MESSAGE", "Guard", "Target", "assess", "scoring_settings", "template_name"),
    "modes": ("Mode", "require_mode", "withholds"),
    "policy": ("Policy", "require_policy"),
    "promise": ("Promise", "combined_promise", "split_delta"),
    "verdicts": ("abstained", "binding_of", "decide", "decide_unscored", "escalated", "require_sequel"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ABSTAIN_MESSAGE",
    "Guard",
    "Mode",
    "Policy",
    "Promise",
    "Target",
    "abstained",
    "as_estimator",
    "assess",
    "binding_of",
    "combined_promise",
    "decide",
    "decide_unscored",
    "escalated",
    "estimator_of",
    "require_mode",
    "require_policy",
    "require_sequel",
    "scoring_settings",
    "split_delta",
    "template_name",
    "withholds",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
