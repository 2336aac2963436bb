"""From a replay to numbers: the output head, gradients, segments, and the check that they are exact."""

from __future__ import annotations

from typing import Any

from semgrad_guard._moved import moved_name


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
