"""Every way that the report compares gives finite scores, and a learned score ranks its training answers."""

from __future__ import annotations

import numpy as np
import pytest

from research.fused.fits import FITS, LABEL_FREE, Answers
from semgrad_guard.evaluation.metrics import auroc

NAMES = ("semgrad", "paragrad", "mean_entropy", "gnll", "mean_nll", "length", "first_nll", "first_entropy")


@pytest.fixture
def answers() -> Answers:
    """Answers whose SemGrad tells most of the wrong ones."""
    random = np.random.default_rng(0)
    table = random.random((160, len(NAMES))) + 0.1
    wrong = table[:, 0] + 0.2 * random.random(160) > 0.7
    plain = [dict(zip(NAMES, map(float, row), strict=True)) for row in table]
    rows = [
        {"cheap": row, "full": {**row, "grid/0/-1": row["semgrad"]}, "max_nll": row["gnll"], "max_entropy": 0.1}
        for row in plain
    ]
    return Answers("made", np.arange(160), rows, wrong, {})


@pytest.mark.parametrize("name", FITS)
def test_a_way_scores_answers_that_it_was_not_fitted_on(answers: Answers, name: str) -> None:
    rows = np.arange(100, 160)
    scores = FITS[name](answers, np.arange(100), rows)
    assert scores.shape == rows.shape
    assert np.isfinite(scores).all()
    if name not in LABEL_FREE:
        assert (auroc(scores.tolist(), (~answers.wrong[rows]).tolist()) or 0) > 0.9
