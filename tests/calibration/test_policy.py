"""Policies: every combination of score, target and rule, and what a policy refuses to be."""

import math
from typing import Any

import numpy as np
import pytest

from semgrad_guard.calibration import Binding, Calibration, calibrate
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError
from semgrad_guard.guard import Policy, decide
from semgrad_guard.guard.policy import combined_promise
from semgrad_guard.records import Verdict

BINDING = Binding(model="pocket", estimator="hybridgrad", fingerprint="f1", grader="exact-match")


def calibrated(*, correct: bool = True) -> Calibration:
    return calibrate(range(100), [correct] * 100, alpha=0.1, delta=0.1, binding=BINDING)


@pytest.mark.parametrize(
    ("uncertainty", "can_escalate", "action"),
    [
        (0.49, True, "answer"),
        (0.5, False, "answer"),
        (0.5, True, "answer"),
        (-1e9, False, "answer"),
        (math.nextafter(0.5, 1), True, "escalate"),
        (math.nextafter(0.5, 1), False, "abstain"),
        (np.float64(0.6), True, "escalate"),
    ],
)
def test_at_or_below_the_threshold_is_let_through(uncertainty: float, can_escalate: bool, action: str) -> None:
    assert Policy(threshold=0.5).decide(uncertainty, can_escalate=can_escalate) == action


@pytest.mark.parametrize("absent", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("rule", "can_escalate", "action"),
    [
        ("abstain", True, "abstain"),
        ("abstain", False, "abstain"),
        ("answer", True, "answer"),
        ("answer", False, "answer"),
        ("escalate", True, "escalate"),
        ("escalate", False, "abstain"),
    ],
)
def test_without_a_score_the_rule_decides(absent: float | None, rule: Any, can_escalate: bool, action: str) -> None:
    policy = Policy(threshold=0.5, on_unscored=rule)
    assert policy.decide(absent, can_escalate=can_escalate) == action
    assert not policy.lets_through(absent)


def test_a_calibrated_policy_carries_threshold_id_confidence_and_binding() -> None:
    calibration = calibrated()
    policy = Policy.from_calibration(calibration, on_unscored="escalate")
    assert (policy.threshold, policy.calibration_id, policy.binding) == (calibration.threshold, calibration.id, BINDING)
    assert policy.confidence(3.0) == calibration.confidence(3.0) == pytest.approx(101 / 102)
    assert policy.confidence(None) is None
    assert policy.decide(99, can_escalate=True) == "answer"
    assert policy.decide(102, can_escalate=True) == "escalate"
    assert policy.decide(None, can_escalate=True) == "escalate"
    assert Policy(calibration=calibration, on_unscored="escalate") == policy


def test_a_calibration_without_a_threshold_lets_nothing_through() -> None:
    policy = Policy.from_calibration(calibrated(correct=False))
    assert policy.threshold is None
    assert policy.decide(-1e300, can_escalate=False) == "abstain"
    assert policy.decide(-1e300, can_escalate=True) == "escalate"


def test_a_mismatch_is_refused_and_a_match_is_not() -> None:
    policy = Policy.from_calibration(calibrated())
    policy.check(BINDING.model_copy(update={"grader": None}))
    with pytest.raises(BindingMismatchError, match="fingerprint is 'f2' and was 'f1'"):
        policy.check(BINDING.model_copy(update={"fingerprint": "f2"}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "needs a threshold"),
        ({"threshold": math.nan}, "finite number"),
        ({"threshold": math.inf}, "finite number"),
        ({"threshold": "0.5"}, "must be a number"),
        ({"threshold": True}, "must be a number"),
        ({"threshold": 0.5, "on_unscored": "retry"}, "one of 'abstain', 'answer', 'escalate'"),
        ({"threshold": 61.0, "calibration": calibrated()}, "not the calibration's"),
        ({"threshold": 61.0, "calibration": calibrated(correct=False)}, "not the calibration's"),
        ({"threshold": 0.5, "min_confidence": 0.8}, "needs a calibration"),
        ({"min_confidence": 0.8}, "needs a calibration"),
        *(({"calibration": calibrated(), "min_confidence": wrong}, "min_confidence") for wrong in (0, 1.5, -1)),
        ({"calibration": calibrated(), "min_confidence": 0.8, "on_no_threshold": "reachable"}, "leave one out"),
        ({"threshold": 0.5, "on_no_threshold": "reachable"}, "about a calibration"),
    ],
)
def test_what_is_no_policy_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Policy(**fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 9.9},
        {"threshold": 60.5},
        {"alpha": 0.5},
        {"binding": None},
        {"id": "0" * 16},
        {"scores": "x"},
        {"grid": None},
    ],
)
def test_a_calibration_that_was_changed_after_it_was_made_is_refused(changes: dict[str, Any]) -> None:
    changed = calibrated().model_copy(update=changes)
    with pytest.raises(CalibrationError, match="was changed after it was made"):
        Policy.from_calibration(changed)
    assert Policy.from_calibration(calibrated().model_copy()).threshold == calibrated().threshold


@pytest.mark.parametrize("no_number", ["0.1", b"1", [0.1]])
def test_an_uncertainty_that_is_no_number_is_refused_by_type(no_number: Any) -> None:
    for policy in (Policy(threshold=0.5), Policy.from_calibration(calibrated())):
        for ask in (policy.lets_through, policy.confidence, lambda u, p=policy: p.decide(u, can_escalate=True)):
            if policy.calibration is None and ask == policy.confidence:
                continue
            with pytest.raises(InputError, match="a number or None"):
                ask(no_number)


def graded(n: int = 400) -> Calibration:
    """Scores of which the surest are right."""
    rng = np.random.default_rng(0)
    scores = rng.random(n)
    return calibrate(scores, rng.random(n) > scores**2, alpha=0.1, delta=0.1, binding=BINDING)


@pytest.mark.parametrize("least", [0.5, 0.7, 0.9, 0.97])
def test_a_least_confidence_is_a_threshold_without_a_promise(least: float) -> None:
    calibration = graded()
    policy = Policy.from_calibration(calibration, min_confidence=least)
    for score in calibration.scores:
        confidence = calibration.confidence(score)
        assert confidence is not None
        assert policy.lets_through(score) == (confidence >= least)
    draft = Verdict.of(
        status="scored", action="answer", text="a", uncertainty=min(calibration.scores),
        **BINDING.model_dump(include={"model", "estimator", "fingerprint"}),
    )  # fmt: skip
    verdict = decide(draft, policy, can_escalate=False)
    assert (verdict.action, verdict.promised, verdict.details.alpha) == ("answer", False, None)
    assert any("min_confidence" in reason for reason in verdict.details.unfamiliar)
    assert combined_promise([policy]) is None


def test_a_least_confidence_that_no_answer_reaches_delivers_nothing() -> None:
    policy = Policy.from_calibration(calibrated(correct=False), min_confidence=0.9)
    assert not policy.lets_through(0)
