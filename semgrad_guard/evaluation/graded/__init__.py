"""Graded answers: the run that reports are made of (here), its file, its numbers, and a calibration held against it."""

from __future__ import annotations

from semgrad_guard.evaluation.graded.graded_run import GradedRun, example_run, require_distinct

__all__ = ["GradedRun", "example_run", "require_distinct"]
