"""Graded answers: the run that reports are made of (here), its file, its numbers, and a calibration held against it."""

from semgrad_guard.evaluation.graded.graded_run import GradedRun as GradedRun
from semgrad_guard.evaluation.graded.graded_run import example_run as example_run
from semgrad_guard.evaluation.graded.graded_run import require_distinct as require_distinct
