"""Estimators: frozen dataclasses whose fields are their configuration, called with the evidence about an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.records import Score


class Estimator(Protocol):
    """One number per answer, higher = less certain.

    `name` is used in verdicts and calibrations, `title` in tables and figures (the paper's spelling); `objective` tells
    the generator which states to keep for scoring.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """The quantity that is differentiated."""
        ...

    def settings(self) -> dict[str, Any]:
        """The configuration as plain JSON: part of a calibration's binding."""
        ...

    def __call__(self, evidence: Evidence) -> Score:
        """The answer's score; `uncertainty` is None, with a reason, where there is none."""
        ...


T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work`, and the milliseconds that it took."""
    began = time.perf_counter()
    return work(), (time.perf_counter() - began) * 1000
