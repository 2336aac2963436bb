"""The report: one HTML file that holds everything, and a CSV file for every table."""

from __future__ import annotations

from semgrad_guard.evaluation.report.page import write_report

__all__ = ["write_report"]
