"""A graded run: checked once, so that tables and figures need not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from semgrad_guard.errors import InputError
from semgrad_guard.paper.graded import GradedRun, require_distinct
from semgrad_guard.paper.summary import summarize
from tests.made_answers import example_run


def run(**changes: Any) -> GradedRun:
    return replace(example_run(n=3), **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": {"SAR": [0.1, 0.2]}}, r"scores\['SAR'\] of example 0 has 2 entries and correct has 3"),
        ({"other_graders": {"judge": [True]}}, "has 1 entries"),
        ({"generation_ms": [1.0]}, "generation_ms of example 0 has 1 entries"),
        ({"ablations": {"l2 norm": []}}, "has 0 entries"),
        ({"scores": {}}, "needs one question and one method"),
        ({"correct": []}, "needs one question and one method"),
        ({"title": " "}, "needs a title"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        run(**changes)


def test_runs_of_one_report_have_titles_of_their_own() -> None:
    require_distinct([example_run(seed=0), example_run(seed=1)])
    with pytest.raises(InputError, match="two runs are called"):
        require_distinct([example_run(seed=0), example_run(seed=0)])
    with pytest.raises(InputError, match="no run"):
        require_distinct([])


def test_shares_and_run_times_are_of_the_questions_that_were_put_to_a_method() -> None:
    whole = example_run(n=60)
    rows = range(0, 60, 2)
    scores = {name: [value if i in rows else None for i, value in enumerate(s)] for name, s in whole.scores.items()}
    times = {
        name: [value if i in rows else None for i, value in enumerate(s)] for name, s in whole.milliseconds.items()
    }
    half = replace(
        whole,
        scores={k: v[::2] for k, v in whole.scores.items()},
        correct=whole.correct[::2],
        milliseconds={k: v[::2] for k, v in whole.milliseconds.items()},
        generation_ms=(), mean_entropy=(), kinds=(), other_graders={}, ablations={},
    )  # fmt: skip
    some = summarize(replace(whole, scores=scores, milliseconds=times), count=50, splits=5)
    alone = summarize(half, count=50, splits=5)
    assert some.methods["G-NLL"].unscored == 30
    for name, found in some.methods.items():
        expected = alone.methods[name]
        assert {k: e.value for k, e in found.quality.items()} == {k: e.value for k, e in expected.quality.items()}
        assert found.quality["accuracy at 0.9"].value is not None
        for alpha, covered in found.guaranteed.items():
            other = expected.guaranteed[alpha]
            assert covered.coverage.tolist() == other.coverage.tolist()
        assert some.run_time[name].value == pytest.approx(alone.run_time[name].value)
