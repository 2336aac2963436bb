"""What a policy makes of prompts unlike those of its calibration: decided by its rule, and never promised."""

from __future__ import annotations

from typing import Any

import pytest

from semgrad_guard.calibration import Binding, Calibration, DriftMonitor, calibrate
from semgrad_guard.errors import AnswerFailedError, BindingMismatchError, InputError
from semgrad_guard.guard.decision import decide
from semgrad_guard.guard.flow import Draft, Paused, Reply, one
from semgrad_guard.guard.policy import Policy, Terms
from semgrad_guard.guard.verdicts import escalated, undecided, unscored
from semgrad_guard.records import PromptForm, Verdict
from tests.guard.routed import run


def prompt(*turns: str, roles: tuple[str, ...] = ("user",)) -> PromptForm:
    text = "".join(f"<{role}>{turn}</{role}>" for role, turn in zip(roles, turns, strict=True)) + "<assistant>"
    return PromptForm(text=text, tokens=len(text.split()), roles=roles, user_text=turns[-1])


USUAL = prompt("What is it?")
STRANGE = prompt("Be brief.", "What is it?", roles=("system", "user"))


def calibrated(binding: Binding | None = None, *, shape: bool = True) -> Calibration:
    prompts = [prompt(f"What is {word}?") for word in ["it"] * 60 + ["this"] * 40]
    shaped = prompts if shape else None
    return calibrate(range(100), [True] * 100, alpha=0.1, delta=0.1, prompts=shaped, binding=binding)


def draft(uncertainty: float | None = 1.0) -> Verdict:
    status: Any = "unscored" if uncertainty is None else "scored"
    return Verdict.of(status=status, action="answer", text="a", estimator="e", model="m", uncertainty=uncertainty)


def decided(policy: Policy, at: PromptForm | None, *, uncertainty: float | None = 1.0, target: bool = False) -> Verdict:
    return decide(draft(uncertainty), policy, can_escalate=target, prompt=at)


@pytest.mark.parametrize("rule", ["threshold", "abstain"])
@pytest.mark.parametrize("on_unscored", ["abstain", "answer"])
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("at", [USUAL, STRANGE, None], ids=["usual", "strange", "unknown"])
def test_the_rule_decides_and_only_a_familiar_prompt_is_promised(
    rule: Any, on_unscored: Any, target: bool, at: PromptForm | None
) -> None:
    policy = Policy.from_calibration(calibrated(), on_unfamiliar=rule, on_unscored=on_unscored)
    by_score = {1.0: "answer", 200.0: "escalate" if target else "abstain", None: on_unscored}
    for uncertainty, action in by_score.items():
        found = decided(policy, at, uncertainty=uncertainty, target=target)
        assert found.action == (action if at is USUAL or rule == "threshold" else "abstain")
        assert found.promised is (at is USUAL and uncertainty == 1.0)
        assert found.details.familiar is (at is USUAL)
        assert (found.reason is None) is (found.action == "answer")


def test_it_is_said_what_is_unfamiliar() -> None:
    policy = Policy.from_calibration(calibrated(), on_unfamiliar="abstain")
    assert decided(policy, USUAL).details.unfamiliar == ()
    assert "begins with a turn of the role system" in decided(policy, STRANGE).details.unfamiliar[0]
    assert decided(policy, None).details.unfamiliar == ("the prompt is not known",)
    assert decided(policy, None).reason == "the prompt is unlike those that the calibration was made on"


OPTIONS = [{"settings": {"dtype": "float32", "temperature": 0.5}}, {"prompt_template": "chat@tools"}]


@pytest.mark.parametrize("changes", [*OPTIONS, {"settings": {"dtype": "bfloat16"}}, {"model": "n"}])
def test_other_options_are_refused_or_outside_the_promise_and_other_models_are_refused(changes: Any) -> None:
    facts: Any = {"settings": {"dtype": "float32"}, "prompt_template": "chat@plain"}
    calibration = calibrated(Binding(model="m", estimator="e", **facts))
    answer = draft().revised(**facts | changes)
    refusing, delivering = (
        Policy.from_calibration(calibration, on_other_options=rule) for rule in ("refuse", "deliver")
    )
    with pytest.raises(BindingMismatchError):
        decide(answer, refusing, can_escalate=False, prompt=USUAL)
    if changes not in OPTIONS:
        with pytest.raises(BindingMismatchError):
            decide(answer, delivering, can_escalate=False, prompt=USUAL)
        return
    found = decide(answer, delivering, can_escalate=False, prompt=USUAL)
    assert (found.action, found.promised, found.details.familiar) == ("answer", False, False)
    assert "at calibration" in found.details.unfamiliar[0]
    unsure = answer.model_copy(update={"uncertainty": 200.0})
    assert decide(unsure, delivering, can_escalate=False, prompt=USUAL).action == "abstain"
    same = draft().revised(**facts)
    assert decide(same, delivering, can_escalate=False, prompt=USUAL).promised


@pytest.mark.parametrize("strange", ["options", "prompt"])
@pytest.mark.parametrize("uncertainty", [200.0, None])
def test_an_answer_outside_the_promise_is_no_drift(strange: str, uncertainty: float | None) -> None:
    calibration = calibrated(Binding(model="m", estimator="e", settings={"dtype": "float32"}))
    policy = Policy.from_calibration(calibration, on_other_options="deliver")
    monitor = DriftMonitor(calibration)
    terms = Terms(policy=policy, monitor=monitor)
    usual = draft(uncertainty).revised(settings={"dtype": "float32"})
    sampled = usual.revised(settings={"dtype": "float32", "temperature": 1.0})
    odd = Draft(sampled, None, USUAL) if strange == "options" else Draft(usual, None, STRANGE)
    for _ in range(30):
        assert one(run(terms, lambda: [odd])).verdict.details.drift is None
    assert (monitor.report().answers, monitor.report().alarm) == (0, False)
    moved = [one(run(terms, lambda: [Draft(usual, None, USUAL)])).verdict.details.drift for _ in range(30)]
    assert (moved[0], moved[-1]) == (False, True)


def test_an_answer_that_a_target_pauses_is_counted_once() -> None:
    monitor = DriftMonitor(calibrated())
    terms = Terms(policy=Policy(threshold=0), can_escalate=True, monitor=monitor, on_error="abstain")
    with pytest.raises(KeyError, match="until later"):
        run(terms, lambda: [Draft(draft(), None)], lambda _: [Paused(KeyError("until later"))])
    assert monitor.report().answers == 0
    assert one(run(terms, lambda: [Draft(draft(), None)], lambda _: [Reply("later")])).verdict.details.drift is False
    assert monitor.report().answers == 1


def test_a_calibration_without_a_shape_gives_a_threshold_and_promises_nothing() -> None:
    found = decided(Policy.from_calibration(calibrated(shape=False)), USUAL)
    assert (found.action, found.promised, found.details.familiar) == ("answer", False, False)
    assert found.confidence is not None
    assert "make it anew with `semgrad-guard calibrate`" in found.details.unfamiliar[0]


def test_a_rule_that_would_stop_everything_is_refused() -> None:
    for make in (
        lambda: Policy.from_calibration(calibrated(shape=False), on_unfamiliar="abstain"),
        lambda: Policy(threshold=1.0, on_unfamiliar="abstain"),
    ):
        with pytest.raises(InputError, match="knows the shape of its prompts"):
            make()
    with pytest.raises(InputError, match="on_unfamiliar must be"):
        Policy(threshold=1.0, on_unfamiliar="ignore")  # type: ignore[arg-type]


def test_a_bare_policy_knows_nothing_of_familiarity() -> None:
    found = decided(Policy(threshold=5.0), STRANGE)
    assert (found.action, found.promised, found.details.familiar, found.details.unfamiliar) == (
        "answer",
        False,
        None,
        (),
    )


def test_what_an_unfamiliar_prompt_hands_on_is_not_promised_by_the_target() -> None:
    """The target was calibrated on what the first stage hands on, and such a question is none of these."""
    policy = Policy.from_calibration(calibrated())
    second = calibrated(Binding(model="m", estimator="e", upstream=policy.calibration_id))
    target = decided(Policy.from_calibration(second), USUAL)
    assert not escalated(decided(policy, STRANGE, uncertainty=200.0, target=True), target).promised
    assert escalated(decided(policy, USUAL, uncertainty=200.0, target=True), target).promised


def test_the_record_carries_it_and_a_new_decision_forgets_it() -> None:
    strange = decided(Policy.from_calibration(calibrated()), STRANGE)
    record = strange.metadata()
    assert (record["schema"], record["promised"], record["details"]["familiar"]) == (2, False, False)
    assert record["details"]["unfamiliar"] == list(strange.details.unfamiliar)
    fresh = undecided(strange)
    assert (fresh.details.familiar, fresh.details.unfamiliar, fresh.promised) == (None, (), False)
    old = strange.model_dump()
    old["details"] = {name: value for name, value in old["details"].items() if not name.endswith("familiar")}
    assert Verdict.model_validate(old).details.familiar is None


def test_a_failed_draft_leaves_the_record_of_a_withheld_one() -> None:
    made = calibrated(Binding(model="m", estimator="e", upstream="first"))
    terms = Terms(policy=Policy.from_calibration(made, on_unscored="answer"), on_error="abstain")

    def failing() -> list[Draft[None]]:
        raise AnswerFailedError("the engine failed")

    failed = one(run(terms, failing)).verdict
    withheld = one(run(terms, lambda: [Draft(unscored("", reason="the engine failed"), None)]))
    assert failed == withheld.verdict
    assert (failed.details.upstream, failed.details.familiar, failed.action) == ("first", False, "abstain")
