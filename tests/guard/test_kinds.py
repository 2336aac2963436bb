"""A promise for each kind of question: at calibration, at the call, in the record and in words."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from semgrad_guard import Calibration, Guard, LanguageModel, Policy
from semgrad_guard.calibration import Binding, calibrate
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError
from semgrad_guard.guard.policy import decide
from semgrad_guard.guard.promise import combined_promise
from semgrad_guard.guard.verdicts import questions_of_kind
from semgrad_guard.records import PromptForm, Verdict

SHIFT = NormalDist().inv_cdf(0.8) * math.sqrt(2)
FORM = PromptForm(text="Q: item A: ", tokens=5, roles=("user",), user_text="item")


def set_of(sizes: dict[str, int], seed: int = 0) -> dict[str, Any]:
    """Answers of kinds, a fifth of them wrong; "hard" ones are scored higher."""
    rng = np.random.default_rng(seed)
    kinds = [kind for kind, n in sizes.items() for _ in range(n)]
    wrong = rng.random(len(kinds)) < 0.2
    scores = rng.normal(size=len(kinds)) + SHIFT * wrong + np.array([2.0 * (kind == "hard") for kind in kinds])
    return {
        "uncertainties": scores.tolist(),
        "correct": (~wrong).tolist(),
        "kind": kinds,
        "prompts": [FORM] * len(kinds),
    }


def made(columns: dict[str, Any], **how: Any) -> Calibration:
    return calibrate(**columns, alpha=0.1, delta=0.1, **how)


@pytest.fixture(scope="module")
def by_kind() -> Calibration:
    return made(set_of({"easy": 300, "hard": 300, "rare": 15}))


def draft(uncertainty: float) -> Verdict:
    return Verdict(status="scored", action="answer", text="Paris", estimator="x", uncertainty=uncertainty, model="m")


def test_each_kind_is_calibrated_by_itself(by_kind: Calibration, tmp_path: Path) -> None:
    columns = set_of({"easy": 300, "hard": 300, "rare": 15})
    for kind in ("easy", "hard"):
        rows = [row for row, own in enumerate(columns["kind"]) if own == kind]
        alone = made({name: [column[row] for row in rows] for name, column in columns.items() if name != "kind"})
        own = by_kind.kinds[kind]
        assert (own.threshold, own.scores, own.delta, own.kind) == (alone.threshold, alone.scores, 0.1, kind)
    assert by_kind.kinds["easy"].threshold != by_kind.kinds["hard"].threshold
    assert by_kind.kinds["rare"].threshold is None
    assert "Too few answers (15 answers" in str(by_kind.kinds["rare"].reason)
    assert Calibration.load(by_kind.save(tmp_path / "c.json")) == by_kind
    assert len({by_kind.id, *(one.id for one in by_kind.kinds.values())}) == 4


def test_the_kind_at_the_call_chooses_the_promise(by_kind: Calibration) -> None:
    policy = Policy.from_calibration(by_kind)
    easy, hard = (by_kind.kinds[kind].threshold for kind in ("easy", "hard"))
    assert easy is not None
    assert hard is not None
    between = (easy + hard) / 2
    for kind, action in (("easy", "abstain"), ("hard", "answer"), ("rare", "abstain")):
        verdict = decide(draft(between), policy.of_kind(kind), can_escalate=False, prompt=FORM)
        with questions_of_kind(kind):
            assert decide(draft(between), policy, can_escalate=False, prompt=FORM) == verdict
        assert (verdict.action, verdict.kind, verdict.promised) == (action, kind, action == "answer")
        assert verdict.calibration_id == by_kind.kinds[kind].id
        assert verdict.metadata()["kind"] == kind


@pytest.mark.parametrize(
    ("kind", "words"),
    [("other", "questions of the kind 'other'; it knows 'easy', 'hard', 'rare'"), (None, "was not given")],
)
def test_without_a_known_kind_nothing_is_promised(by_kind: Calibration, kind: str | None, words: str) -> None:
    verdict = decide(draft(-5.0), Policy.from_calibration(by_kind).of_kind(kind), can_escalate=False, prompt=FORM)
    assert (verdict.action, verdict.promised, verdict.familiar) == ("answer", False, False)
    assert words in verdict.unfamiliar[0]


def test_a_calibration_without_kinds_promises_nothing_about_one(by_kind: Calibration) -> None:
    columns = set_of({"easy": 300})
    plain = made({name: column for name, column in columns.items() if name != "kind"})
    policy = Policy.from_calibration(plain)
    assert decide(draft(-5.0), policy, can_escalate=False, prompt=FORM).promised
    verdict = decide(draft(-5.0), policy.of_kind("easy"), can_escalate=False, prompt=FORM)
    assert not verdict.promised
    assert "it knows no kinds" in verdict.unfamiliar[0]
    alone = Policy.from_calibration(by_kind.kinds["easy"])
    assert decide(draft(-5.0), alone.of_kind("easy"), can_escalate=False, prompt=FORM).promised
    assert not decide(draft(-5.0), alone, can_escalate=False, prompt=FORM).promised


def test_a_threshold_for_answers_of_a_kind_decides_about_no_sentence(by_kind: Calibration) -> None:
    whole = Binding(model="m", estimator="x")
    for policy in map(Policy.from_calibration(by_kind).of_kind, (None, "easy", "unknown")):
        policy.check(whole)
        with pytest.raises(BindingMismatchError, match="about whole answers"):
            policy.check(whole.model_copy(update={"settings": {"by": "sentence", "on_doubt": "drop"}}))


def test_kinds_share_a_promise_by_the_sum_of_their_deltas(by_kind: Calibration) -> None:
    promise = combined_promise([Policy.from_calibration(by_kind, on_unfamiliar="abstain")])
    assert promise is not None
    assert (promise.alpha, promise.delta, promise.covers) == (0.1, pytest.approx(0.2), "answers with promised=True")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": ["a", ""]}, "a text"),
        ({"kind": ["a"]}, "one for each"),
        ({"kind": [None, "a"]}, "a text"),
        ({"by_hand": 1}, "takes no `grid`, `by_hand`"),
        ({"grid": [0.5]}, "takes no `grid`"),
    ],
)
def test_kinds_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    columns = {"uncertainties": [0.1, 0.2], "correct": [True, False], "kind": ["a", "b"]}
    with pytest.raises(CalibrationError, match=message):
        made({**columns, **change})


@pytest.mark.parametrize("kind", ["", " ", 3])
def test_a_kind_is_a_text(by_kind: Calibration, kind: Any) -> None:
    with pytest.raises(InputError, match="kind is the name"):
        Policy.from_calibration(by_kind).of_kind(kind)
    with pytest.raises(InputError, match="kind is the name"), questions_of_kind(kind):
        pass


def test_two_kinds_of_300_labels_deliver_seven_tenths_of_600_pooled() -> None:
    own, pooled = 0.0, 0.0
    for seed in range(25):
        both = made(set_of({"a": 300, "b": 300}, seed))
        own += sum(part.coverage for part in both.kinds.values()) / 2
        pooled += both.coverage
    assert own >= 0.7 * pooled


async def test_a_guard_takes_the_kind_of_a_call(language_model: LanguageModel) -> None:
    guard = Guard(language_model, Policy.from_calibration(made(set_of({"easy": 60}))))
    kinds = [guard("What is item 1?", kind="easy").kind, (await guard.acall("What is item 1?", kind="easy")).kind]
    kinds += [guard.stream("What is item 1?", kind="easy").verdict.kind]
    kinds += [(await guard.astream("What is item 1?", kind="easy").verdict()).kind]
    assert kinds == ["easy"] * 4
    assert guard("What is item 1?").kind is None
