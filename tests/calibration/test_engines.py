"""One threshold for several engines: the promise holds for each of them, at the level of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semgrad_guard.calibration import (
    Binding,
    Calibration,
    EngineAnswers,
    EngineIdentity,
    calibrate,
)
from semgrad_guard.errors import BindingMismatchError, CalibrationError

from .test_guarantee import DELTA, REPEATS, Population

BOUND = Binding(model="pocket", estimator="hybridgrad", fingerprint="own", settings={"tau": 1.0})
ALPHA = 0.2


def engine(name: str, population: Population, rng: np.random.Generator, n: int) -> EngineAnswers:
    scores, wrong = population.draw(rng, n)
    return EngineAnswers(
        scores.tolist(), (~wrong).tolist(), list(range(n)), BOUND.model_copy(update={"fingerprint": name})
    )


def together(engines: list[EngineAnswers], **given: Any) -> Calibration:
    own, *also = engines
    columns = {"groups": own.groups, "binding": own.binding, "also": also, "alpha": ALPHA, "delta": DELTA}
    return calibrate(own.uncertainties, own.correct, **{**columns, **given})


@pytest.mark.parametrize("others", [[(0.43, 0.52)], [(0.05, 1.0)]], ids=["equal", "easy"])
def test_the_promise_holds_for_all_of_them_at_once(others: list[tuple[float, float]]) -> None:
    """With an easy engine, the hard one alone decides how often the promise breaks: that is the worst case."""
    hard = Population.with_oracle(0.43, alpha=ALPHA, coverage=0.52)
    populations = [
        hard,
        *(Population.with_oracle(b, alpha=ALPHA, coverage=c) if c < 1 else Population(b, c) for b, c in others),
    ]
    rng = np.random.default_rng(3)
    found = [
        together([engine(str(i), population, rng, 500) for i, population in enumerate(populations)])
        for _ in range(REPEATS)
    ]
    violations = np.mean([max(population.risk(made.threshold) for population in populations) > ALPHA for made in found])
    reached = np.mean([made.threshold or 0.0 for made in found])
    print(f"violations {violations:.3f}, coverage {reached:.3f}")
    assert violations <= DELTA
    assert reached > 0.25


def test_the_smallest_of_their_thresholds_is_delivered() -> None:
    rng = np.random.default_rng(8)
    for _ in range(20):
        engines = [engine(name, Population(0.35, p), rng, 400) for name, p in (("one", 1.0), ("other", 1.5))]
        alone = [together([single]).threshold for single in engines]
        smallest = None if None in alone else min(threshold for threshold in alone if threshold is not None)
        assert together(engines).threshold == smallest


def test_the_harder_engine_decides_and_the_numbers_are_its_own() -> None:
    rng = np.random.default_rng(4)
    easy = engine("easy", Population(0.2, 3.0), rng, 600)
    hard = engine("hard", Population(0.4, 1.0), rng, 600)
    alone = {single.binding.fingerprint: together([single]) for single in (easy, hard)}
    both, turned = together([easy, hard]), together([hard, easy])
    assert both.binding is not None
    assert (both.binding.fingerprint, both.binding.also) == ("hard", (EngineIdentity(fingerprint="easy"),))
    assert turned.binding == both.binding
    assert (turned.threshold, turned.bound_if_fixed, turned.scores) == (
        both.threshold,
        both.bound_if_fixed,
        both.scores,
    )
    assert both.threshold is not None
    assert alone["hard"].threshold is not None
    assert both.threshold < (alone["easy"].threshold or 0)
    assert both.scores == alone["hard"].scores
    assert both.n_answered == (np.array(hard.uncertainties) <= both.threshold).sum()


def test_one_engine_that_keeps_no_promise_says_why() -> None:
    rng = np.random.default_rng(6)
    good = engine("good", Population(0.05, 1.0), rng, 400)
    bad = engine("bad", Population(0.9, 0.0), rng, 400)
    found = together([good, bad])
    assert (found.threshold, found.binding and found.binding.fingerprint) == (None, "bad")
    assert found.reason is not None
    assert "were wrong" in found.reason


def test_it_is_a_file_like_any_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    engines = [engine(name, Population(0.1, 1.0), rng, 300) for name in ("one", "other")]
    found = together(engines)
    assert Calibration.load(found.save(tmp_path / "both.json")) == found
    alone = together(engines[:1])
    assert '"also"' not in alone.save(tmp_path / "one.json").read_text(), "older versions read it as before"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fingerprint": "own"}, "name a fingerprint each.*'own' and 'own'"),
        ({"fingerprint": None}, "name a fingerprint each.*'own' and None"),
        ({"fingerprint": "x", "model": "llama"}, "model is 'llama' and was 'pocket'"),
        ({"fingerprint": "x", "settings": {"tau": 2.0}}, "settings is"),
    ],
)
def test_what_is_no_other_engine_is_refused(changes: dict[str, Any], says: str) -> None:
    own = EngineAnswers([0.1, 0.2], [True, True], [0, 1], BOUND)
    other = EngineAnswers([0.1, 0.2], [True, True], [0, 1], BOUND.model_copy(update=changes))
    with pytest.raises((BindingMismatchError, CalibrationError), match=says):
        together([own, other])


@pytest.mark.parametrize("missing", ["groups", "binding"])
def test_what_is_needed_to_tell_them_apart(missing: str) -> None:
    own = EngineAnswers([0.1, 0.2], [True, True], [0, 1], BOUND)
    other = EngineAnswers([0.1, 0.2], [True, True], [0, 1], BOUND.model_copy(update={"fingerprint": "x"}))
    with pytest.raises(CalibrationError, match="need a binding for each, and groups"):
        together([own, other], **{missing: None})
