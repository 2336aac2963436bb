"""The promise of a chain, in words and end to end: two stages, simulated with known error rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Verdict
from semgrad_guard.calibration import Binding, Calibration, calibrate, gates
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError
from semgrad_guard.guard import Policy, Promise, combined_promise, split_delta
from semgrad_guard.guard.decision import decide, escalated
from semgrad_guard.guard.policy import OnUnfamiliar
from semgrad_guard.guard.question import Router
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.records import PromptForm

from .made_prompts import closed_book, drawn

ALPHA, DELTA, REPEATS = 0.15, 0.2, 150
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Questions of difficulty d in [0, 1]: each stage's error rate rises with d, and each has its own noisy score."""

    difficulty: Floats
    first: Floats
    second: Floats

    @classmethod
    def draw(cls, rng: np.random.Generator, n: int) -> World:
        d = rng.random(n)
        return cls(d, d + 0.15 * rng.normal(size=n), 0.3 * d + 0.3 * rng.random(n))

    @property
    def wrong_first(self) -> Floats:
        """P(the first stage's answer is wrong)."""
        return 0.9 * self.difficulty**1.5

    @property
    def wrong_second(self) -> Floats:
        """P(the second stage's answer is wrong)."""
        return 0.5 * self.difficulty**2

    def only(self, kept: NDArray[np.int64]) -> World:
        return World(self.difficulty[kept], self.first[kept], self.second[kept])


POPULATION = World.draw(np.random.default_rng(99), 50_000)


def through(scores: Floats, threshold: float | None) -> NDArray[np.bool_]:
    return scores <= (-np.inf if threshold is None else threshold)


def found(rng: np.random.Generator, scores: Floats, wrong: Floats, delta: float) -> float | None:
    """The threshold of a calibration on answers that are wrong at these rates."""
    return gates.walk(scores, rng.random(len(wrong)) < wrong, alpha=ALPHA, delta=delta).threshold


def simulate(*, on_all: bool, deltas: tuple[float, ...]) -> tuple[float, float, float]:
    """(violation rate, mean share delivered, mean share delivered by the second stage) in the population.

    The second stage is calibrated on fresh questions: those that the first hands on, or (wrongly) all of them.
    """
    rng = np.random.default_rng(7)
    outcomes: list[tuple[float, float, float]] = []
    for _ in range(REPEATS):
        world, fresh = World.draw(rng, 400), World.draw(rng, 1200)
        first = found(rng, world.first, world.wrong_first, deltas[0])
        fresh = fresh.only(np.flatnonzero(on_all | ~through(fresh.first, first))[:500])
        second = found(rng, fresh.second, fresh.wrong_second, deltas[1])
        by_first = through(POPULATION.first, first)
        by_second = ~by_first & through(POPULATION.second, second)
        wrong = float((POPULATION.wrong_first * by_first + POPULATION.wrong_second * by_second).sum())
        count = int(by_first.sum() + by_second.sum())
        outcomes.append((wrong / max(1, count), count / len(by_first), float(by_second.mean())))
    rates, shares, seconds = np.array(outcomes).T
    print(
        f"on_all={on_all}: violations {np.mean(rates > ALPHA):.3f}, delivered {shares.mean():.2f}/{seconds.mean():.2f}"
    )
    return float(np.mean(rates > ALPHA)), float(shares.mean()), float(seconds.mean())


def test_everything_delivered_by_a_chain_keeps_the_promise() -> None:
    violations, delivered, by_second = simulate(on_all=False, deltas=split_delta(DELTA, 2))
    assert violations <= DELTA
    assert delivered > 0.4
    assert by_second > 0.05  # the second stage matters


def test_calibrating_the_second_stage_on_all_questions_breaks_the_promise() -> None:
    violations, _, _ = simulate(on_all=True, deltas=split_delta(DELTA, 2))
    assert violations > 2 * DELTA


def bound(upstream: str | None = None) -> Binding:
    return Binding(model="m", estimator="e", upstream=upstream)


def stage(
    upstream: str | None = None,
    *,
    alpha: float = 0.1,
    delta: float = 0.05,
    bind: bool = True,
    shape: bool = True,
    n: int = 60,
) -> Calibration:
    binding = bound(upstream) if bind else None
    prompts = drawn(closed_book, n, 0) if shape else None
    return calibrate(range(n), [True] * n, alpha=alpha, delta=delta, binding=binding, prompts=prompts)


def test_a_chain_promises_the_largest_alpha_and_the_sum_of_deltas() -> None:
    one = stage()
    two = stage(one.id, alpha=0.2, delta=0.1)
    three = stage(two.id, alpha=0.15, delta=0.01)
    policies = [Policy.from_calibration(c) for c in (one, two, three)]
    assert combined_promise(policies) == Promise(alpha=0.2, delta=0.16)
    assert combined_promise(policies[:1]) == Promise(alpha=0.1, delta=0.05)
    assert combined_promise([Policy.from_calibration(stage(bind=False))]) == Promise(alpha=0.1, delta=0.05)
    wide = stage(delta=0.9)
    chain = [Policy.from_calibration(c) for c in (wide, stage(wide.id, delta=0.9))]
    assert combined_promise(chain) == Promise(alpha=0.1, delta=1.0)


def test_there_is_no_promise_with_an_uncalibrated_stage_or_unscored_answers() -> None:
    one = stage()
    two = stage(one.id)
    first, second = Policy.from_calibration(one), Policy.from_calibration(two)
    assert combined_promise([first, Policy(threshold=0.5)]) is None
    assert combined_promise([Policy(threshold=0.5), second]) is None
    assert combined_promise([first, Policy.from_calibration(two, on_unscored="answer")]) is None
    assert combined_promise([first, Policy.from_calibration(two, on_unscored="escalate")]) is not None
    old = stage(one.id, shape=False)
    assert combined_promise([first, Policy.from_calibration(old)]) is None
    assert combined_promise([Policy.from_calibration(stage(shape=False))]) is None


def test_there_is_no_promise_where_no_threshold_was_found() -> None:
    none = stage(n=2)
    assert none.threshold is None
    assert combined_promise([Policy.from_calibration(none)]) is None
    assert combined_promise([Policy.from_calibration(c) for c in (none, stage(none.id))]) is None


@pytest.mark.parametrize("kinds", [("threshold",), ("abstain", "threshold"), ("abstain", "abstain"), ("abstain",)])
@pytest.mark.parametrize("enforced", [True, False])
def test_the_promise_covers_everything_only_where_nothing_else_is_delivered(
    kinds: tuple[OnUnfamiliar, ...], enforced: bool
) -> None:
    stages = [stage()]
    while len(stages) < len(kinds):
        stages.append(stage(stages[-1].id))
    policies = [Policy.from_calibration(c, on_unfamiliar=kind) for c, kind in zip(stages, kinds, strict=True)]
    found = combined_promise(policies, enforced=enforced)
    assert found is not None
    assert (found.covers == "everything delivered") == (enforced and "threshold" not in kinds)


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (lambda one: [one, stage()], "Stage 2 .* was calibrated on all questions"),
        (lambda one: [one, stage(bind=False)], "Stage 2 .* follows calibration"),
        (lambda one: [one, stage("another")], "calibration another did not let through"),
        (lambda one: [stage(one.id)], "Stage 1 .* follows no other stage"),
        (lambda one: [stage(one.id), one], "Stage 1"),
        (lambda one: [one, stage(one.id), stage(one.id)], "Stage 3"),
    ],
)
def test_a_stage_calibrated_on_other_questions_is_refused(
    chain: Callable[[Calibration], list[Calibration]], words: str
) -> None:
    with pytest.raises(BindingMismatchError, match=words):
        combined_promise([Policy.from_calibration(c) for c in chain(stage(alpha=0.3))])


def test_delta_is_split_evenly() -> None:
    assert split_delta(0.1, 2) == (0.05, 0.05)
    assert sum(split_delta(0.1, 7)) == pytest.approx(0.1)
    with pytest.raises(CalibrationError, match="delta must"):
        split_delta(1.0, 2)
    with pytest.raises(InputError, match="at least one stage"):
        split_delta(0.1, 0)
    with pytest.raises(InputError, match="at least one stage"):
        combined_promise([])


@pytest.mark.parametrize("grader", ["contains", "contains+nli(folder)", "contains@1", "contains@2", "contains@3"])
def test_nothing_is_promised_where_the_grader_has_other_rules_now(grader: str) -> None:
    prompts, binding = drawn(closed_book, 400, 0), Binding(model="m", estimator="e", grader=grader)
    scores = [0.001 * i for i in range(400)]
    made = calibrate(scores, [True] * 400, alpha=0.1, delta=0.1, binding=binding, prompts=prompts)
    promise, unfamiliar = combined_promise([Policy.from_calibration(made)]), made.unfamiliar(prompts[0])
    if grader == "contains@3":
        assert (promise is not None, unfamiliar) == (True, ())
        return
    assert promise is None
    assert f"graded by {grader}, whose rules have changed since (it is contains@3 now); make it anew" in unfamiliar[0]


# An answer's promise is its chain's: whatever a target is wrapped in, its calibration must follow the stage before.


KNOWN, UNKNOWN = "What is the capital of Japan?", "What is the capital of Mongolia?"
PROMPT = PromptForm(text="<user>What is it?</user>", tokens=4, roles=("user",), user_text="What is it?")
SURE, UNSURE = 1.0, 200.0


@cache
def made_after(upstream: str | None, *, alpha: float = 0.1) -> Policy:
    binding = Binding(model="m", estimator="e", upstream=upstream)
    return Policy.from_calibration(
        calibrate(range(100), [True] * 100, alpha=alpha, delta=0.1, prompts=[PROMPT] * 100, binding=binding)
    )


def decided(policy: Policy, uncertainty: float, *, prompt: PromptForm | None = PROMPT) -> Verdict:
    draft = Verdict.of(status="scored", action="answer", text="a", estimator="e", model="m", uncertainty=uncertainty)
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
    assert (verdict.action, verdict.promised, verdict.details.upstream) == ("answer", False, "0123456789abcdef")


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
    chain = Guard(pocket, Router(Policy.from_calibration(first), lambda _: target(KNOWN)), options=options)
    verdict = chain(UNKNOWN)
    assert (verdict.text, verdict.action, verdict.promised) == ("Tokyo", "escalate", follows)
    assert target(KNOWN).promised is not follows  # asked directly, without a stage before it
