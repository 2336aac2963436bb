"""Kinds of questions: a promise for each, by the calibration of that kind."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from semgrad_guard.errors import InputError

_kind: ContextVar[str | None] = ContextVar("semgrad_guard_kind", default=None)


@contextmanager
def questions_of_kind(kind: str | None) -> Generator[None]:
    """While this lasts, questions are of this kind, in every front: guards, models of frameworks, chains and agents.

    None changes nothing.

    Raises:
        InputError: the kind is no text.
    """
    token = _kind.set(current_kind() if kind is None else require_kind(kind))
    try:
        yield
    finally:
        _kind.reset(token)


def current_kind() -> str | None:
    """The kind of the questions that are asked now; None where none was given."""
    return _kind.get()


def require_kind(kind: object) -> str:
    """The kind itself.

    Raises:
        InputError: it is no text, or an empty one.
    """
    if not isinstance(kind, str) or not kind.strip():
        raise InputError(f"kind is the name of a kind of questions, a text, not {kind!r:.60}")
    return kind
