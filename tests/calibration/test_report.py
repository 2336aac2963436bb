"""The report: what a calibration tells about itself, from its record alone."""

from __future__ import annotations

import numpy as np
import pytest

from semgrad_guard.calibration import Calibration, calibrate
from semgrad_guard.calibration.planning import plan
from semgrad_guard.calibration.promise import report
from semgrad_guard.pocket import CALIBRATION_PATH

from .made_prompts import closed_book, drawn


def test_the_report_tells_what_the_record_knows() -> None:
    rng = np.random.default_rng(0)
    wrong = rng.random(400) < 0.2
    scores = rng.normal(size=400) + 1.2 * wrong
    prompts = drawn(closed_book, 400, 0)
    made = calibrate(scores, ~wrong, alpha=0.2, delta=0.1, prompts=prompts, copies="keep", tries=2)
    made = made.with_content(aurocs={"gnll": 0.9, "b": None})
    sentences = report(made)
    assert made.auroc == pytest.approx(0.8, abs=0.05)
    chance = plan(400, error=made.n_wrong / 400, auroc=made.auroc, alpha=0.2, delta=made.level)
    assert sentences["chance"].endswith(str(chance))
    assert "to traffic like this, at most 20% are wrong, with 90% probability for all 2 tries" in sentences["promise"]
    assert sentences["effect"] == str(made.effect)
    assert sentences["prompts"].startswith("one turn, texts of ")
    assert sentences["prompts"].endswith("; a second turn is not promised")
    assert sentences["scores"] == "AUROC gnll 0.900"
    assert sentences["assumption"] == made.assumption


@pytest.mark.parametrize(
    "made",
    [
        Calibration.load(CALIBRATION_PATH),
        calibrate([0.1], [True], alpha=0.1, delta=0.1),
        calibrate([0.1, 0.1], [True, False], alpha=0.1, delta=0.1),
        calibrate([None], [False], alpha=0.1, delta=0.1),
        calibrate([0.1] * 40, [True] * 40, alpha=0.1, delta=0.1),
        calibrate(range(40), [False] * 40, alpha=0.1, delta=0.1),
    ],
    ids=["the embedded one", "one label", "two labels", "no score", "all right", "all wrong"],
)
def test_odd_records_have_a_report_too(made: Calibration) -> None:
    sentences = report(made)
    assert {"promise", "assumption"} <= sentences.keys()
    assert ("effect" in sentences) == (made.threshold is not None and made.n_tested == made.n)
    assert ("chance" in sentences) == (made.auroc is not None)
    assert made.threshold is not None or made.reason
