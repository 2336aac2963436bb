"""A guard by one list of options, those of its router among them; and the flow by calls."""

from collections.abc import Callable, Sequence
from typing import Any

from semgrad_guard import Guard, LanguageModel, Policy, Router
from semgrad_guard.guard.flow import answers
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.question import RouterOptions
from semgrad_guard.guard.steps import Work, drive


def routed(model: LanguageModel, policy: Policy, escalate_to: Any = None, **given: Any) -> Guard:
    """A guard whose router gets the options of routers."""
    carried: Any = {name: given.pop(name) for name in tuple(given) if name in RouterOptions.__annotations__}
    return Guard(model, Router(policy, escalate_to, **carried), **given)


def run(
    terms: Terms, draft: Callable[[], Any], ask: Callable[[Sequence[int]], Any] | None = None, *, count: int = 1
) -> list[Any]:
    """The outcomes of drafts, some of which are asked of a target."""
    asking = None if ask is None else lambda places: Work(lambda: ask(places))
    return drive(answers(terms, Work(draft), asking, count=count))
