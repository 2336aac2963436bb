"""The settings that decide the weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the Llama's training (apart from tokenizer, data files, versions and processor)."""

    steps: int = 1300
    tokens: int = 6144  # a step
    seed: int = 0
    workers: int = 2  # processes of one thread
    rate: float = 1.2e-2
    reader: str = ""  # the first digits of its file's sha256
    start: str = ""  # the same of its initial weights


EXAMPLES_A_STEP = 217.0  # of 6,144 tokens, measured: spreads the rare facts over the training


def rate_at(step: int, steps: int) -> float:
    """Of the full rate: a short rise, level to the middle, then down to almost nothing."""
    progress = step / steps
    return min(1.0, (step + 1) / 30) * (1.0 if progress < 0.5 else max(0.01, 2 * (1 - progress)))
