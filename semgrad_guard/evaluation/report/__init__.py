"""The report: one HTML file that holds everything, and a CSV file for every table."""

from semgrad_guard.evaluation.report.page import write_report as write_report
