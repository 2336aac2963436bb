"""Errors of ours travel: one that is raised on another machine arrives as it was."""

from __future__ import annotations

import pickle

import pytest

from semgrad_guard import Verdict
from semgrad_guard.errors import (
    DataFileError,
    LowConfidenceError,
    MissingExtraError,
    QueueFullError,
    SemGradGuardError,
    UpstreamError,
)

VERDICT = Verdict.of(status="scored", action="abstain", text="", estimator="gnll", model="m", reason="why")


@pytest.mark.parametrize(
    "error",
    [
        DataFileError("line 3"),
        MissingExtraError("ray", extra="ray"),
        QueueFullError("full", retry_after=7),
        UpstreamError("down", status=503),
        LowConfidenceError(VERDICT, draft="Vienna", advice="Ask."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_pickles(error: SemGradGuardError) -> None:
    twin = pickle.loads(pickle.dumps(error))  # noqa: S301 - just written
    assert type(twin) is type(error)
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))
