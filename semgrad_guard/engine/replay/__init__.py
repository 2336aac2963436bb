"""The upper layers again, with a gradient: from states captured while generating, on shared weights."""

from __future__ import annotations

from typing import Any

from semgrad_guard._moved import moved_name


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
