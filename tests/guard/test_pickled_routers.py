"""A router goes to another process with its log, which is opened there, and its monitor, which continues there."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from semgrad_guard import Policy, calibrate
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.guard import Router, unscored

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog


def test_a_router_with_a_log_and_a_monitor(tmp_path: Path) -> None:
    calibration = calibrate([i / 99 for i in range(99)], [True] * 99, alpha=0.1, delta=0.1)
    with DecisionLog(tmp_path / "log.db") as log:
        monitor = DriftMonitor(calibration)
        monitor.add(0.5)
        router = Router(Policy.from_calibration(calibration), log=log, monitor=monitor)
        assert copy.deepcopy(router) is router
        other: Router = pickle.loads(pickle.dumps(router))  # noqa: S301 - our own
        assert other == router
        assert other.terms.log is not None
        assert other.terms.log.write(unscored("text", reason="none")) is not None
        assert log.flush()
        assert len(log.database.decisions()) == 1
        assert other.terms.monitor is not None
        assert other.terms.monitor.add(0.5).n == 2
        assert monitor.report().n == 1
        other.terms.log.close()  # type: ignore[attr-defined]
