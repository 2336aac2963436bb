"""From a prompt to an answer: decoding, sampling, streams, and the evidence an answer leaves."""

from __future__ import annotations

from typing import Any

from semgrad_guard._moved import moved_name


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
