"""The flow: every driver delivers what `settle` decides, in every mode, with every kind of target."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard import Policy, ToolCall, Verdict
from semgrad_guard.errors import DeadlineExceededError, InputError, LowConfidenceError
from semgrad_guard.guard.decision import settle, unscored
from semgrad_guard.guard.flow import Draft, Outcome, Reply, answers, one, streamed
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.question import current_recorder, recording
from semgrad_guard.guard.steps import Live, StreamSteps, Work, adrive, arun_stream, drive, run_stream, sealing
from semgrad_guard.settings import Mode
from tests.guard.routed import run
from tests.steps import LIMIT

TEXT, THRESHOLD = "the draft", 1.0
MODES: tuple[Mode, ...] = get_args(Mode)


def scored(uncertainty: float | None, text: str = TEXT) -> Verdict:
    if uncertainty is None:
        return unscored(text, reason="nothing to score")
    return Verdict.of(
        status="scored", action="answer", text=text, estimator="hybridgrad", model="m", uncertainty=uncertainty
    )


@dataclass
class Source:
    """A model's part and a target's, as a door would give them; counts the requests."""

    uncertainty: float | None
    reply: Any = "the target's"
    error: Exception | None = None
    drafted: int = 0
    requests: int = 0
    closed: int = 0
    pieces: tuple[str, ...] = ("the ", "draft")
    verdicts: list[Verdict] = field(default_factory=list[Verdict])

    def draft(self) -> Draft[str]:
        self.drafted += 1
        return Draft(scored(self.uncertainty), "object")

    def drafts(self) -> Sequence[Draft[str]]:
        return [self.draft()]

    async def adrafts(self) -> Sequence[Draft[str]]:
        return self.drafts()

    def ask(self, waiting: Sequence[Any]) -> Sequence[Any]:
        self.requests += len(waiting)
        if self.error is not None:
            raise self.error
        return [Reply(self.reply, "target object") for _ in waiting]

    async def aask(self, waiting: Sequence[Any]) -> Sequence[Any]:
        return self.ask(waiting)

    def aasking(self, waiting: Sequence[Any]) -> Work:
        return Work.awaited(lambda: self.aask(waiting))

    def live(self) -> StreamSteps[str, Any]:
        return Written(self).steps()

    def asking(self, waiting: Sequence[Any]) -> Work:
        return Work(lambda: self.ask(waiting))


class Written(Live[str]):
    def __init__(self, source: Source) -> None:
        super().__init__(lambda: iter(source.pieces), self.apieces)
        self.source = source

    async def apieces(self) -> AsyncIterator[str]:
        for piece in self.source.pieces:
            yield piece

    def draft(self) -> Work:
        return Work(self.source.draft)

    def close(self) -> Work:
        self.source.closed += 1
        return super().close()


def by_call(terms: Terms, source: Source) -> tuple[list[str], Outcome[str]]:
    return [], one(run(terms, source.drafts, source.ask))


def by_coroutine(terms: Terms, source: Source) -> tuple[list[str], Outcome[str]]:
    return [], one(asyncio.run(adrive(answers(terms, Work.awaited(source.adrafts), source.aasking))))


def by_stream(terms: Terms, source: Source) -> tuple[list[str], Outcome[str]]:
    steps = list(run_stream(streamed(terms, source.live(), source.asking)))
    return [step for step in steps if isinstance(step, str)], steps[-1]  # type: ignore[return-value]


def by_async_stream(terms: Terms, source: Source) -> tuple[list[str], Outcome[str]]:
    async def collected() -> list[Any]:
        return [step async for step in arun_stream(streamed(terms, source.live(), source.asking))]

    steps = asyncio.run(collected())
    return [step for step in steps if isinstance(step, str)], steps[-1]


Driver = Callable[[Terms, Source], tuple[list[str], Outcome[str]]]
DRIVERS: tuple[Driver, ...] = (by_call, by_coroutine, by_stream, by_async_stream)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("can_escalate", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uncertainty", [0.5, 2.0, None])
def test_every_driver_delivers_the_same(
    driver: Driver, mode: Mode, can_escalate: bool, uncertainty: float | None
) -> None:
    verdicts: list[Verdict] = []
    policy = Policy(threshold=THRESHOLD)
    terms = Terms(policy=policy, mode=mode, can_escalate=can_escalate, abstain_message="no", notify=verdicts.append)
    source = Source(uncertainty)
    let_through = uncertainty is not None and uncertainty <= THRESHOLD
    if mode == "raise" and not let_through:
        with pytest.raises(LowConfidenceError) as caught:
            driver(terms, source)
        assert TEXT not in repr(vars(caught.value))
        assert verdicts == [caught.value.verdict]
        assert source.requests == 0
        return
    pieces, outcome = driver(terms, source)
    assert verdicts == [outcome.verdict.model_copy(update={"draft": None})]
    assert source.drafted == 1
    escalates = mode == "enforce" and not let_through and can_escalate and uncertainty is not None
    assert source.requests == escalates
    if mode == "annotate" or let_through:
        assert (outcome.verdict.text, outcome.answer) == (TEXT, "object")
        assert outcome.verdict.details.enforced is (mode in ("enforce", "raise"))
    elif escalates:
        assert (outcome.verdict.text, outcome.answer, outcome.verdict.action) == (
            "the target's",
            "target object",
            "escalate",
        )
    else:
        assert (outcome.verdict.text, outcome.answer, outcome.verdict.action) == ("no", None, "abstain")
    live = driver in (by_stream, by_async_stream)
    assert pieces == (["the ", "draft"] if live and mode == "annotate" else [])
    assert source.closed == live


@given(
    uncertainty=st.none() | st.floats(0, 10),
    threshold=st.floats(0, 10),
    on_unscored=st.sampled_from(["abstain", "answer", "escalate"]),
    mode=st.sampled_from(MODES),
    can_escalate=st.booleans(),
    trusted=st.booleans(),
)
def test_settling_never_delivers_what_is_not_let_through(
    uncertainty: float | None, threshold: float, on_unscored: Any, mode: Mode, can_escalate: bool, trusted: bool
) -> None:
    policy = Policy(threshold=threshold, on_unscored=on_unscored)
    settled = settle(scored(uncertainty), Terms(policy=policy, mode=mode, can_escalate=can_escalate), trusted=trusted)
    let_through = policy.decide(uncertainty, can_escalate=can_escalate) == "answer"
    advice = mode == "annotate" or (trusted and not let_through)
    assert (settled.kind == "deliver") is (advice or let_through)
    assert settled.verdict.details.enforced is not advice
    if settled.kind != "deliver":
        assert (settled.kind == "raise") is (mode == "raise")
        assert settled.kind != "escalate" or can_escalate
        assert settled.kind in ("abstain", "escalate", "raise")
    assert not settled.verdict.promised  # a bare threshold promises nothing


class TestTargets:
    terms = Terms(policy=Policy(threshold=THRESHOLD), can_escalate=True, abstain_message="no")

    @pytest.mark.parametrize("driver", DRIVERS)
    def test_a_failing_target_raises_by_default(self, driver: Driver) -> None:
        with pytest.raises(OSError, match="down"):
            driver(self.terms, Source(2.0, error=OSError("down")))

    @pytest.mark.parametrize("driver", DRIVERS)
    def test_a_failing_target_may_lead_to_an_abstention(self, driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
        terms = Terms(policy=self.terms.policy, can_escalate=True, abstain_message="no", on_error="abstain")
        _, outcome = driver(terms, Source(2.0, error=OSError("secret address")))
        assert (outcome.verdict.text, outcome.verdict.action, outcome.verdict.draft) == ("no", "abstain", TEXT)
        assert "OSError" in str(outcome.verdict.reason)
        assert "secret" not in str(outcome.verdict.reason)
        assert "secret address" in caplog.text

    def test_what_was_delivered_has_a_verdict_of_its_own(self) -> None:
        own = scored(0.25, "better")
        _, outcome = by_call(self.terms, Source(2.0, reply=own))
        assert outcome.verdict.uncertainty == 2.0
        assert outcome.verdict.delivered.uncertainty == 0.25
        assert outcome.verdict.delivered.action == "escalate"
        assert outcome.verdict.delivered.details.escalated_from == outcome.verdict
        _, unknown = by_call(self.terms, Source(2.0))
        assert unknown.verdict.delivered.uncertainty is None


class TestWords:
    def test_the_message_may_be_a_function_of_the_verdict(self) -> None:
        terms = Terms(policy=Policy(threshold=THRESHOLD), abstain_message=lambda v: f"unsure ({v.uncertainty:g})")
        assert by_call(terms, Source(2.0))[1].verdict.text == "unsure (2)"

    def test_a_function_that_returns_no_text_is_an_error_of_its_own(self) -> None:
        terms = Terms(policy=Policy(threshold=THRESHOLD), abstain_message=lambda _: 7)  # type: ignore[arg-type, return-value]
        with pytest.raises(InputError, match="must return a text"):
            by_call(terms, Source(2.0))


class TestTime:
    def test_a_target_that_is_late_is_left_behind(self) -> None:
        released = threading.Event()

        def slow(_: Sequence[Any]) -> Sequence[Any]:
            released.wait(LIMIT)
            return []

        terms = Terms(policy=Policy(threshold=THRESHOLD), can_escalate=True, timeout=0.05)
        try:
            with pytest.raises(DeadlineExceededError):
                one(run(terms, Source(2.0).drafts, slow))
        finally:
            released.set()

    def test_a_coroutine_that_is_late_is_cancelled(self) -> None:
        events: list[str] = []

        async def slow(_: Sequence[Any]) -> Sequence[Any]:
            events.append("asked")
            try:
                await asyncio.sleep(LIMIT)
            except asyncio.CancelledError:
                events.append("cancelled")
                raise
            return []

        for timeout in (0.05, 1.0, 20.0):  # a longer one where the machine was too busy to ask the target at all
            terms = Terms(policy=Policy(threshold=THRESHOLD), can_escalate=True, timeout=timeout, on_error="abstain")
            steps = answers(terms, Work.awaited(Source(2.0).adrafts), lambda places: Work.awaited(lambda: slow(places)))
            outcome = one(asyncio.run(adrive(steps)))
            assert outcome.verdict.action == "abstain"
            if events:
                break
        assert events == ["asked", "cancelled"]

    def test_a_target_s_own_timeout_is_its_own(self) -> None:
        terms = Terms(policy=Policy(threshold=THRESHOLD), can_escalate=True, timeout=LIMIT)
        with pytest.raises(TimeoutError, match="the target's"):
            by_call(terms, Source(2.0, error=TimeoutError("the target's")))
        with pytest.raises(TimeoutError, match="the target's"):
            by_coroutine(terms, Source(2.0, error=TimeoutError("the target's")))

    @pytest.mark.parametrize("on_error", ["raise", "abstain"])
    def test_a_model_that_is_late(self, on_error: Any) -> None:
        def late() -> Sequence[Draft[str]]:
            raise DeadlineExceededError("too late")

        terms = Terms(policy=Policy(threshold=THRESHOLD), timeout=LIMIT, on_error=on_error, abstain_message="no")
        if on_error == "raise":
            with pytest.raises(DeadlineExceededError):
                run(terms, late, Source(0.5).ask, count=2)
            return
        outcomes = [one([term]) for term in run(terms, late, Source(0.5).ask, count=2)]
        assert [o.verdict.text for o in outcomes] == ["no", "no"]
        assert all(o.verdict.status == "unscored" and o.verdict.reason == "too late" for o in outcomes)


def test_a_closed_stream_closes_its_source() -> None:
    source = Source(0.5)
    steps = run_stream(streamed(Terms(policy=Policy(threshold=1.0), mode="annotate"), source.live(), source.asking))
    assert next(steps) == "the "
    steps.close()
    assert source.closed == 1


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_recorder_sees_drafts_and_nothing_is_decided(driver: Driver) -> None:
    source = Source(2.0)
    with recording() as recorder:
        _, outcome = driver(Terms(policy=Policy(threshold=THRESHOLD), can_escalate=True), source)
    assert outcome.verdict.text == TEXT
    assert source.requests == 0
    assert [draft.verdict.uncertainty for draft in recorder.drafts] == [2.0]
    assert driver(Terms(policy=Policy(threshold=THRESHOLD)), source)[1].verdict.action == "abstain"
    assert len(recorder.drafts) == 1


def test_one_failing_draft_leaves_the_others_alone() -> None:
    foreign = Policy(threshold=THRESHOLD)

    def words(verdict: Verdict) -> str:
        if verdict.uncertainty == 3.0:
            raise RuntimeError("no words")
        return "no"

    terms = Terms(policy=foreign, abstain_message=words)
    drafts = [Draft(scored(u), str(u)) for u in (0.5, 3.0, 2.0)]
    outcomes = run(terms, lambda: drafts, Source(0.0).ask, count=3)
    assert [isinstance(outcome, RuntimeError) for outcome in outcomes] == [False, True, False]
    assert one([outcomes[2]]).verdict.text == "no"


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_error_holds_the_draft_only_where_drafts_are_kept(driver: Driver) -> None:
    terms = Terms(policy=Policy(threshold=THRESHOLD), mode="raise", keep_draft=True)
    with pytest.raises(LowConfidenceError) as caught:
        driver(terms, Source(2.0))
    assert caught.value.verdict.draft == TEXT


EVERYTHING = Policy(threshold=1e308, on_unscored="answer")


@pytest.mark.parametrize("text", ["", " \n", "\u200b \ufeff\u2060"])
@pytest.mark.parametrize("uncertainty", [0.0, None])
def test_an_empty_answer_is_not_let_through(text: str, uncertainty: float | None) -> None:
    draft = scored(uncertainty, text)
    assert settle(draft, Terms(policy=EVERYTHING)).kind == "abstain"
    assert settle(draft, Terms(policy=EVERYTHING, can_escalate=True)).kind == "escalate"
    raised = settle(draft, Terms(policy=EVERYTHING, mode="raise"))
    assert raised.kind == "raise"
    assert raised.verdict.promised is False
    assert uncertainty is None or raised.verdict.reason == "the answer is empty"
    assert settle(draft, Terms(policy=EVERYTHING, mode="annotate")).verdict.action == "abstain"


def test_calls_without_text_are_no_empty_answer() -> None:
    calls = scored(0.0, "").model_copy(update={"tool_calls": (ToolCall("search", {}),)})
    assert settle(calls, Terms(policy=EVERYTHING)).kind == "deliver"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "is empty"),
        (scored(0.0, " "), "is empty"),
        ("Lima \ud83d", "lone surrogate"),
        (scored(0.0, "Lima \udc00."), "lone surrogate"),
    ],
)
def test_a_targets_answer_that_nobody_can_read_is_not_delivered(reply: Any, why: str) -> None:
    source = Source(2.0, reply=reply)
    terms = Terms(policy=Policy(threshold=THRESHOLD), can_escalate=True, abstain_message="no")
    outcome = one(run(terms, source.drafts, source.ask))
    assert (outcome.verdict.text, outcome.verdict.action, outcome.answer) == ("no", "abstain", None)
    assert why in (outcome.verdict.reason or "")
    assert outcome.verdict.model_dump_json()


def test_a_recorder_ends_with_its_run() -> None:
    with recording() as recorder:
        left_behind = copy_context()
    assert left_behind.run(current_recorder) is None
    outcome = one(left_behind.run(run, Terms(policy=Policy(threshold=0)), Source(2.0).drafts, Source(2.0).ask))
    assert (outcome.verdict.action, recorder.drafts) == ("abstain", [])


REFUSED = Verdict.of(
    status="scored", action="abstain", text="Nur-Sultan", estimator="hybridgrad", model="m", reason="too high"
)


@pytest.mark.parametrize("draft", ["Nur-Sultan", "", None])
def test_the_message_names_the_draft_where_there_is_one(draft: str | None) -> None:
    error = LowConfidenceError(REFUSED, draft=draft, advice="Ask again.")
    assert (error.verdict.text, error.verdict.draft) == ("", draft)
    assert ("withheld answer" in str(error)) is bool(draft)
    assert "too high (decision: abstain)" in str(error)
    assert str(error).endswith("Ask again.")
    assert "Nur-Sultan" not in str(error)
    assert REFUSED.text == "Nur-Sultan"


@pytest.mark.parametrize(
    "run_steps",
    [
        lambda some: drive(sealing(some)),
        lambda some: asyncio.run(adrive(sealing(some))),
        lambda some: [*run_stream(some)],
    ],
)
def test_no_frame_of_an_error_holds_the_work_that_failed(run_steps: Callable[[Any], Any]) -> None:
    def steps() -> Any:
        yield Work.at_once(partial(bytes.fromhex, "a draft"))

    with pytest.raises(ValueError, match="fromhex") as caught:
        run_steps(steps())
    assert not [entry for entry in caught.traceback if "a draft" in repr(entry.frame.f_locals)]
