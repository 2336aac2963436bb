"""What a rendered prompt looks like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptForm:
    """One rendered prompt as plain data."""

    roles: tuple[str, ...]
    text: str
    tokens: int
    tools: str | None = None
