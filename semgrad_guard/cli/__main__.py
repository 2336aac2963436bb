"""`python -m semgrad_guard.cli`: the same as `semgrad-guard`."""

from semgrad_guard.cli import app

app()
