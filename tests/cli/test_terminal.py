"""How far long work is: a bar where someone watches, lines where a log does."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from semgrad_guard.cli import terminal


def watched(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(terminal, "ERR", Console(file=written, force_terminal=is_terminal, width=80, highlight=False))
    return written


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written = watched(monkeypatch, is_terminal=True)
    with terminal.progress("Answering") as tell:
        for done in (20, 30, 40):
            tell(done, 60)
    assert "40/60" in written.getvalue()
    assert "Answering" in written.getvalue()


def test_a_log_sees_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    written = watched(monkeypatch, is_terminal=False)
    clock = iter([0.0, 5.0, 12.0, 13.0, 30.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with terminal.progress("Answering") as tell:
        for done in (20, 30, 44, 45, 50):
            tell(done, 60)
    monkeypatch.undo()
    assert written.getvalue().splitlines() == [
        "Answering: 20 of 60",
        "Answering: 44 of 60, 2/s, 0:00:08 left",
        "Answering: 50 of 60, 1/s, 0:00:10 left",
    ]
