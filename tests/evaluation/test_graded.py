"""A graded run: checked once, so that tables and figures need not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.graded import GradedRun, example_run, require_distinct


def run(**changes: Any) -> GradedRun:
    return replace(example_run(n=3), **changes)


def test_columns_are_kept_in_order_as_plain_values() -> None:
    found = run(scores={"SAR": np.array([0.5, np.nan, np.inf])}, correct=np.array([True, False, True]), mean_entropy=())
    assert found.scores == {"SAR": (0.5, None, None)}
    assert found.correct == (True, False, True)
    assert found.mean_entropy == ()
    assert found.n == 3
    assert math.isclose(found.accuracy, 2 / 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scores": {"SAR": [0.1, 0.2]}}, r"scores\['SAR'\] of example 0 has 2 entries and correct has 3"),
        ({"other_graders": {"judge": [True]}}, "has 1 entries"),
        ({"generation_ms": [1.0]}, "generation_ms of example 0 has 1 entries"),
        ({"ablations": {"l2 norm": []}}, "has 0 entries"),
        ({"correct": [True, 0.5, False]}, "0.5 is neither true nor false"),
        ({"scores": {"SAR": [0.1, "high", 0.2]}}, "could not convert"),
        ({"scores": {}}, "at least one method"),
        ({"correct": []}, "at least one question"),
        ({"scores": {"SAR": [1, 2, 3], "sar ": [1, 2, 3]}}, "name 'sar ' twice"),
        ({"scores": {" ": [1, 2, 3]}}, "without a name"),
        ({"title": " "}, "needs a title"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(**changes)


def test_runs_of_one_report_have_titles_of_their_own() -> None:
    require_distinct([example_run(seed=0), example_run(seed=1)])
    with pytest.raises(InputError, match="twice"):
        require_distinct([example_run(seed=0), example_run(seed=0)])
    with pytest.raises(InputError, match="no run"):
        require_distinct([])
