"""`--require`: a skipped test is a failure. A conftest imports both hooks."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require", action="store_true", help="a skipped test is a failure: nothing was left out")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.skipped and item.config.getoption("--require"):
        report.outcome = "failed"
        report.longrepr = f"skipped under --require: {report.longrepr}"
    return report
