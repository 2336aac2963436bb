"""How a long step tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with how many are done, and how many there are in all."""


def unwatched(done: int, total: int) -> None:
    """Progress that nobody watches."""
