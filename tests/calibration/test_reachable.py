"""The promise that labels support where no threshold keeps the one that was asked for."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.calibration import AnswerSentences, Calibration, calibrate, calibrate_sentences, gates
from semgrad_guard.calibration.calibrating import recalibrate
from semgrad_guard.calibration.calibration_record import promise, report, shortfall
from semgrad_guard.errors import CalibrationError
from semgrad_guard.guard import Guard, Policy, combined_promise
from semgrad_guard.loading import load_policy
from semgrad_guard.records import Verdict
from semgrad_guard.settings import PolicyOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import check_reachable

RATES: dict[str, Any] = {"alpha": 0.1, "delta": 0.1}


def weak(n: int = 80, seed: int = 3) -> tuple[list[float], list[bool]]:
    """Scores and grades of a model that is wrong in more than half of the answers."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(n) < 0.57
    return (rng.normal(size=n) + 1.2 * wrong).tolist(), (~wrong).tolist()


@pytest.mark.parametrize("n", [80, 149, 150, 400])
def test_the_first_gate_is_promised_at_the_bound_of_its_errors(n: int) -> None:
    scores, correct = weak(n)
    made = calibrate(scores, correct, **RATES)
    found = made.reachable
    assert made.threshold is None
    assert found is not None
    assert not made.lets_through(min(scores))
    delivered = [right for score, right in zip(scores, correct, strict=True) if score <= found.threshold]
    assert (found.threshold, found.n_answered, found.n_wrong) == (made.grid[0], len(delivered), delivered.count(False))
    level = stats.binom.cdf(found.n_wrong, found.n_answered, found.alpha)
    if n < gates.ENOUGH_TO_LOOK_AHEAD:
        assert level == pytest.approx(0.1)
    else:
        assert 0.06 < level < 0.09  # what looking ahead leaves


def test_the_bound_that_looking_ahead_leaves_adds_up_to_delta() -> None:
    """Errors at the rate alpha: the first gate is passed by itself or by later ones, or its bound is below the rate."""
    rng, broken = np.random.default_rng(1), 0
    for _ in range(3000):
        wrong = rng.random(200) < 0.3001
        walk = gates.walk(np.arange(200.0), wrong, alpha=0.3, delta=0.1)
        broken += walk.accepted is not None or gates.upper_bound(walk.wrong, walk.answered, delta=walk.spare) < 0.3001
    assert broken / 3000 <= 0.1 + 3 * math.sqrt(0.09 / 3000)


@given(st.integers(0, 10_000), st.integers(30, 200), st.sampled_from([0.05, 0.1, 0.3]))
def test_it_is_offered_only_where_it_is_of_use(seed: int, n: int, alpha: float) -> None:
    scores, correct = weak(n, seed)
    made = calibrate(scores, correct, alpha=alpha, delta=0.1)
    if made.reachable is not None:
        assert made.threshold is None
        assert alpha <= made.reachable.alpha < 1 - sum(correct) / n


def test_only_a_policy_that_asks_for_it_delivers() -> None:
    scores, correct = weak()
    made = calibrate(scores, correct, **RATES)
    found = made.reachable
    assert found is not None
    assert Policy.from_calibration(made).decide(min(scores), can_escalate=False) == "abstain"
    policy = Policy.from_calibration(made, on_no_threshold="reachable")
    assert policy.calibration is not None
    assert [policy.lets_through(score) for score in scores] == [score <= found.threshold for score in scores]
    assert (policy.calibration.alpha, policy.calibration.requested, policy.threshold) == (
        found.alpha,
        0.1,
        found.threshold,
    )
    assert policy == Policy(calibration=made, on_no_threshold="reachable")
    assert policy.calibration == policy.calibration.reached() == made.reached()
    good = calibrate(range(100), [True] * 100, **RATES)
    assert Policy.from_calibration(good, on_no_threshold="reachable").calibration == good


def test_every_surface_has_the_promised_number_beside_the_one_that_was_asked_for(language_model: LanguageModel) -> None:
    model, options = language_model, GenerationOptions(max_tokens=8)
    bare = Guard(model, Policy(threshold=0.0, on_cut="score"), options=options)
    draft = bare.drafts(["Who?"])[0]
    scores, correct = weak()
    shift = (draft.uncertainty or 0.0) - min(scores)
    forms = [model.render("Who?").form] * len(scores)
    made = calibrate([score + shift for score in scores], correct, **RATES, prompts=forms, binding=bare.binding)
    found = made.reachable
    assert found is not None
    policy = Policy.from_calibration(made, on_no_threshold="reachable")
    verdict = Guard(model, policy, options=options)("Who?")
    assert (verdict.action, verdict.promised, verdict.details.alpha, verdict.details.requested_alpha) == (
        "answer",
        True,
        found.alpha,
        0.1,
    )
    assert {"alpha": found.alpha, "requested_alpha": 0.1}.items() <= verdict.metadata()["details"].items()
    plain = Guard(model, Policy.from_calibration(made), options=options)("Who?")
    assert (plain.action, plain.details.alpha, plain.details.requested_alpha) == ("abstain", None, None)
    together = combined_promise([policy])
    assert together is not None
    assert together.alpha == found.alpha
    assert policy.calibration is not None
    assert "at most 32% are wrong" in promise(policy.calibration)
    assert "10% was asked for" in report(policy.calibration)["promise"]
    assert "never falls" in policy.calibration.assumption


def test_a_calibration_says_it_in_one_sentence_with_the_option() -> None:
    made = calibrate(*weak(), **RATES)
    assert shortfall(made, cut="Some were cut.").startswith(
        "At u <= 0.6426, 38 of 80 delivered, 8 wrong: 21% (95% interval 10-37%). You asked for at most 10%; these "
        "labels support at most 32%. To deliver these: --on-no-threshold reachable. Some were cut. Of the "
    )
    low, high = stats.beta.ppf(0.025, 8, 31), stats.beta.ppf(0.975, 9, 30)
    assert (round(100 * low), round(100 * high)) == (10, 37)


def test_it_is_kept_in_the_file_and_other_files_keep_their_ids(tmp_path: Path) -> None:
    made = calibrate(*weak(), **RATES)
    path = made.save(tmp_path / "c.json")
    assert Calibration.load(path) == made
    policy = load_policy(path, PolicyOptions(on_no_threshold="reachable"))
    assert policy is not None
    assert policy.calibration == made.reached()
    good = calibrate(range(100), [True] * 100, **RATES).save(tmp_path / "good.json").read_text()
    assert not {"reachable", "requested"} & {line.split('"')[1] for line in good.splitlines() if '"' in line}
    edited = path.read_text().replace(
        f'"n_wrong": {made.reachable.n_wrong if made.reachable else 0}}}', '"n_wrong": 0}'
    )
    assert edited != path.read_text()
    path.write_text(edited)
    with pytest.raises(CalibrationError, match="not an intact calibration"):
        Calibration.load(path)


def test_where_it_is_no_better_than_no_guard_it_is_refused_in_words() -> None:
    rng = np.random.default_rng(0)
    made = calibrate(rng.normal(size=60), rng.random(60) > 0.5, **RATES)
    assert made.reachable is None
    assert "no better than without a guard" in (made.reason or "")
    with pytest.raises(CalibrationError, match="no better than without a guard"):
        Policy.from_calibration(made, on_no_threshold="reachable")


def test_it_is_offered_only_where_it_is_proved() -> None:
    scores, correct = weak()
    rows = [
        AnswerSentences(str(i), "a", [s], [c], [None]) for i, (s, c) in enumerate(zip(scores, correct, strict=True))
    ]
    by_sentence = calibrate_sentences(rows, on_doubt="drop", **RATES)
    assert (by_sentence.threshold, by_sentence.reachable) == (None, None)
    with pytest.raises(CalibrationError, match="support no promise"):
        by_sentence.reached()
    by_hand = calibrate(*weak(200), by_hand=60, **RATES).reachable
    assert by_hand is not None
    assert by_hand.n_answered <= 60


def test_a_proposal_keeps_the_promise_that_was_reached() -> None:
    old = calibrate(*weak(), **RATES).reached()
    new = recalibrate(old, [-1.0] * 60, [(-1.0 - 1e-3 * i, True) for i in range(60)]).new
    assert (new.alpha, new.requested, new.threshold) == (old.alpha, 0.1, old.threshold)


@pytest.mark.parametrize("rule", check_reachable.OFFERED)
def test_rules_that_are_offered_hold_in_simulation(rule: str) -> None:
    """400 calibrations of 100 answers: three standard errors above delta are .145."""
    for design in check_reachable.POPULATIONS[::3]:
        broken, _ = check_reachable.simulated(design, 100, 400, rules=[rule])[rule]
        assert broken <= 0.145, design


def test_a_plain_threshold_breaks_its_number() -> None:
    broken = check_reachable.simulated(check_reachable.POPULATIONS[0], 100, 200)
    assert broken["a plain threshold by the errors among the labels"][0] > 0.3


def test_nothing_delivered_has_no_error_rate() -> None:
    verdict = Verdict.of(status="scored", action="answer", text="", estimator="e", model="m")
    assert (verdict.details.alpha, verdict.details.requested_alpha) == (None, None)
    effect = calibrate(*weak(), **RATES).effect
    assert effect is not None
    assert "nothing delivered with it" in str(effect)
    assert "0.0%" not in str(effect)
