"""A guard by one list of options, those of its router among them."""

from typing import Any

from semgrad_guard import Guard, LanguageModel, Policy, Router
from semgrad_guard.guard import RouterOptions


def routed(model: LanguageModel, policy: Policy, escalate_to: Any = None, **given: Any) -> Guard:
    """A guard whose router gets the options of routers."""
    carried: Any = {name: given.pop(name) for name in tuple(given) if name in RouterOptions.__annotations__}
    return Guard(model, Router(policy, escalate_to, **carried), **given)
