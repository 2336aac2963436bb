"""What a router and the model it is attached to share during one run: announced by the one, filled in by the other."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from semgrad_guard import Verdict
from semgrad_guard.errors import UnenforcedPolicyError

if TYPE_CHECKING:
    from langchain_semgrad_guard.callback import UncertaintyRouterCallback

_open: ContextVar[Docket | None] = ContextVar("semgrad_guard_docket", default=None)
_escalating: ContextVar[tuple[UncertaintyRouterCallback, ...]] = ContextVar("semgrad_guard_escalating", default=())


@dataclass
class Docket:
    """The decisions of one router about the runs of one call, by run id.

    A model opens it around runs whose decisions it will carry out. That is how a router knows that it is not ignored:
    nothing in tags, metadata or parameters can claim it by accident.
    """

    router: UncertaintyRouterCallback | None
    verdicts: dict[UUID, Verdict] = field(default_factory=dict[UUID, Verdict])
    errors: dict[UUID, Exception] = field(default_factory=dict[UUID, Exception])

    @contextmanager
    def opened(self) -> Generator[None]:
        """The time of the run, in this context and the threads and tasks that copy it."""
        token = _open.set(self)
        try:
            yield
        finally:
            _open.reset(token)

    def verdict(self, run_id: UUID) -> Verdict:
        """The decision about a run.

        Raises:
            UnenforcedPolicyError: the router recorded none.
        """
        if run_id in self.errors:
            raise self.errors[run_id]
        if run_id not in self.verdicts:
            raise UnenforcedPolicyError(
                f"{type(self.router).__name__} recorded no decision about the run; a subclass that overrides "
                "on_llm_end must call super().on_llm_end(...)"
            )
        return self.verdicts[run_id]


def open_for(router: UncertaintyRouterCallback) -> Docket | None:
    """The docket of the run in progress, if it is this router's."""
    docket = _open.get()
    return docket if docket is not None and docket.router is router else None


def is_guarded() -> bool:
    """Whether the run in progress is one whose answer a router may withhold."""
    docket = _open.get()
    return docket is not None and docket.router is not None


@contextmanager
def escalating(router: UncertaintyRouterCallback) -> Generator[None]:
    """The time during which a router's target answers."""
    token = _escalating.set((*_escalating.get(), router))
    try:
        yield
    finally:
        _escalating.reset(token)


def is_escalating(router: UncertaintyRouterCallback) -> bool:
    """Whether this happens inside the router's own escalation."""
    return any(each is router for each in _escalating.get())


def current_router() -> UncertaintyRouterCallback | None:
    """The router of the run in progress."""
    docket = _open.get()
    return None if docket is None else docket.router
