"""An answer's promise is its chain's: whatever a target is wrapped in, its calibration must follow the stage before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard import Calibration, GenerationOptions, Guard, LanguageModel, Policy, Verdict
from semgrad_guard.calibration import Binding, calibrate
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard import combined_promise, decide
from semgrad_guard.guard.verdicts import escalated
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.records import PromptForm

KNOWN, UNKNOWN = "What is the capital of Japan?", "What is the capital of Mongolia?"
PROMPT = PromptForm(text="<user>What is it?</user>", tokens=4, roles=("user",), user_text="What is it?")
SURE, UNSURE = 1.0, 200.0


def made_after(upstream: str | None, *, alpha: float = 0.1) -> Policy:
    binding = Binding(model="m", estimator="e", upstream=upstream)
    return Policy.from_calibration(
        calibrate(range(100), [True] * 100, alpha=alpha, delta=0.1, prompts=[PROMPT] * 100, binding=binding)
    )


def decided(policy: Policy, uncertainty: float, *, prompt: PromptForm | None = PROMPT) -> Verdict:
    draft = Verdict(status="scored", action="answer", text="a", estimator="e", model="m", uncertainty=uncertainty)
    return decide(draft, policy, can_escalate=True, prompt=prompt)


@given(linked=st.lists(st.booleans(), max_size=3), familiar=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_chain_promises_what_combined_promise_says(linked: list[bool], familiar: list[bool]) -> None:
    """Every stage but the last hands on; each was calibrated after the one before, or on all questions."""
    policies = [made_after(None)]
    for number, link in enumerate(linked):
        policies.append(made_after(policies[-1].calibration_id if link else None, alpha=0.1 + 0.01 * (number + 1)))
    stages = [
        decided(policy, SURE if policy is policies[-1] else UNSURE, prompt=PROMPT if known else None)
        for policy, known in zip(policies, familiar, strict=False)
    ]
    delivered = stages.pop()
    while stages:
        delivered = escalated(stages.pop(), delivered)
    try:
        whole = combined_promise(policies) is not None
    except BindingMismatchError:
        whole = False
    assert delivered.promised == (whole and all(familiar[: len(policies)]))


def test_a_later_stage_by_itself_promises_nothing() -> None:
    """Its calibration is about what another stage does not let through."""
    verdict = decided(made_after("0123456789abcdef"), SURE)
    assert (verdict.action, verdict.promised, verdict.upstream) == ("answer", False, "0123456789abcdef")


@pytest.fixture(scope="module")
def pocket() -> LanguageModel:
    return LanguageModel.from_pretrained("pocket")


@pytest.mark.parametrize("follows", [True, False])
def test_a_guard_behind_a_function_keeps_the_promise_of_its_calibration(pocket: LanguageModel, follows: bool) -> None:
    first = Calibration.load(CALIBRATION_PATH)
    fields = {name: getattr(first, name) for name in Calibration.model_fields if name not in ("id", "schema_version")}
    assert first.binding is not None
    binding = first.binding.model_copy(update={"upstream": first.id})
    second = Calibration.seal(**{**fields, "binding": binding}) if follows else first
    options = GenerationOptions(max_tokens=16)
    target = Guard(pocket, Policy.from_calibration(second), options=options)
    chain = Guard(
        pocket, Policy.from_calibration(first), options=options, escalate_to=lambda _conversation: target(KNOWN)
    )
    verdict = chain(UNKNOWN)
    assert (verdict.text, verdict.action, verdict.promised) == ("Tokyo", "escalate", follows)
    assert target(KNOWN).promised is not follows  # asked directly, without a stage before it
