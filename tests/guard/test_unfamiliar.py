"""Answers that a calibration does not cover: to prompts unlike its own, and those that a limit cut off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Message
from semgrad_guard.adapters.examples import ExampleCalibration
from semgrad_guard.adapters.recorded_runs import AnsweredExample, _cut_calls
from semgrad_guard.calibration import Binding, Calibration, DriftMonitor, calibrate
from semgrad_guard.engine.text_units import is_unfinished
from semgrad_guard.errors import AnswerFailedError, BindingMismatchError, InputError
from semgrad_guard.guard.decision import (
    FIRST_SENTENCE,
    LATER,
    binding_of,
    decide,
    escalated,
    settle,
    undecided,
    unscored,
    why_unscored,
)
from semgrad_guard.guard.flow import Draft, Paused, Reply, one
from semgrad_guard.guard.policy import Policy, Terms
from semgrad_guard.guard.question import RecordedDraft, recording
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.questions.run_record import Answer, AnsweredSentence, AnswerScore
from semgrad_guard.records import PromptForm, SentenceVerdict, ToolCall, Verdict, in_context
from semgrad_guard.settings import OnCut
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


# The calibration that comes with the embedded model promises nothing about prompts of another kind.

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT, BATCH = 60, 30


def read(document: str) -> str:
    """A document's last paragraph, which states the task in plain sentences."""
    return DOCUMENTS[document].split("\n\n")[-1]


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


ROWS = lines("questions.jsonl")
DOCUMENTS = {row["source"]: row["text"] for row in lines("documents.jsonl")}
ASKED = Random(0).sample(ROWS, COUNT)
OTHERS = Random(1).sample(sorted({row["document"] for row in ROWS}), COUNT)

Turns = Callable[[str, str, str], list[Message]]
OF_ANOTHER_KIND: dict[str, Turns] = {
    "the right passage": lambda q, right, _: [Message("user", in_context(q, right))],
    "an unrelated passage": lambda q, _, other: [Message("user", in_context(q, other))],
    "the right passage before the question": lambda q, right, _: [Message("user", f"{right} {q}")],
    "a system message": lambda q, *_: [Message("system", "You answer questions."), Message("user", q)],
    "a history": lambda q, *_: [Message("user", "Hello."), Message("assistant", "Hello."), Message("user", q)],
}


@pytest.fixture(scope="module")
def guard() -> Guard:
    policy = Policy.from_calibration(Calibration.load(CALIBRATION_PATH))
    return Guard(LanguageModel.from_pretrained("pocket"), policy, options=GenerationOptions(max_tokens=16))


def test_a_question_by_itself_is_promised(guard: Guard) -> None:
    known, unknown = guard.batch(["What is the capital of Japan?", "What is the capital of Mongolia?"])
    assert (known.action, known.promised, known.details.familiar) == ("answer", True, True)
    assert (unknown.action, unknown.promised, unknown.details.familiar) == ("abstain", False, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_ANOTHER_KIND)
def test_nothing_is_promised_about_prompts_of_another_kind(guard: Guard, kind: str) -> None:
    prompts = [
        OF_ANOTHER_KIND[kind](row["question"], read(row["document"]), read(other))
        for row, other in zip(ASKED, OTHERS, strict=True)
    ]
    verdicts = [v for start in range(0, COUNT, BATCH) for v in guard.batch(prompts[start : start + BATCH])]
    assert sum(verdict.promised for verdict in verdicts) == 0
    assert all(verdict.details.familiar is False and verdict.details.unfamiliar for verdict in verdicts)
    assert any(verdict.action == "answer" for verdict in verdicts)  # decided as usual


@pytest.mark.parametrize(("options", "where"), [({"max_tokens": 1}, "after 1 tokens"), ({"stop": ("k",)}, "at 'k'")])
def test_an_answer_that_is_cut_off_elsewhere_is_not_promised(guard: Guard, options: dict[str, Any], where: str) -> None:
    cut = Guard(guard.model, guard.policy, options=GenerationOptions(**options))
    verdict = cut("What is the capital of Japan?")
    assert (verdict.action, verdict.promised, verdict.details.familiar) == ("answer", False, False)
    assert where in verdict.details.unfamiliar[0]


@pytest.mark.parametrize(
    ("ends", "where"),
    [
        ({"max_tokens": 1}, "has 3 tokens; those of the calibration were cut off after 1"),
        ({"stop": ("k",)}, "behind 'k'"),
    ],
)
def test_an_answer_that_goes_on_where_the_calibration_cut_is_not_promised(
    guard: Guard, ends: dict[str, Any], where: str
) -> None:
    with recording() as recorder:
        guard("What is the capital of Japan?")
    (one,) = recorder.drafts
    binding = binding_of(one.verdict).model_copy(update={"max_tokens": 256, **ends})
    made = calibrate(range(100), [True] * 100, alpha=0.1, delta=0.1, prompts=[one.prompt] * 100, binding=binding)
    longer = Guard(guard.model, Policy.from_calibration(made))
    verdict = longer("What is the capital of Japan?")
    assert (verdict.action, verdict.promised, verdict.details.familiar) == ("answer", False, False)
    assert where in verdict.details.unfamiliar[0]
    stream = longer.stream("What is the capital of Japan?")
    assert "".join(stream) == verdict.text == "Tokyo"
    assert stream.verdict.details.unfamiliar == verdict.details.unfamiliar


# Answers that a limit cut off: which have no score, by whose rule, and that an earlier calibration keeps its own.

FINISHED = (
    "It is Lima.",
    "Is it?",
    "Lima!",
    'He said "Lima."',
    "It is **Lima.**",
    "首都是利马。",
    "Lima. 🙂",
    "Yes.  \n",
)
OPEN = ("It is", "It is Lima", "It is Dr. Lima and", "1. Lima", '{"city": "Li', "首都是利马")
LATER_ON = ("It is Lima. The river is", "Yes.\nIt", "1. Lima\n2. Ro", "首都是利马。它是")


@pytest.mark.parametrize("text", [*FINISHED, *OPEN, *LATER_ON])
def test_a_text_without_a_closing_mark_is_unfinished(text: str) -> None:
    assert is_unfinished(text) is (text not in FINISHED)


@pytest.mark.parametrize("text", [*FINISHED, *OPEN, *LATER_ON])
@pytest.mark.parametrize("by_sentence", [False, True])
def test_the_rule_says_which_cut_answers_have_no_score(text: str, by_sentence: bool) -> None:
    whole = text in FINISHED and by_sentence
    first = FIRST_SENTENCE if text in OPEN else None
    found = {rule: why_unscored(text, rule, by_sentence=by_sentence) for rule in get_args(OnCut)}
    assert found == {"score": None, "unscored": first, "abstain": first or (None if whole else LATER)}


def cut_draft(text: str, cut: int | str | None = 24, **more: Any) -> Verdict:
    fields = {"status": "scored", "uncertainty": 0.1, "estimator": "gnll", "model": "m", "action": "answer"}
    return Verdict.of(**{**fields, "text": text, "cut": cut, **more})


def calibration(on_cut: OnCut | None) -> Calibration:
    binding = Binding(model="m", estimator="gnll", on_cut=on_cut, max_tokens=24)
    return calibrate([i / 100 for i in range(100)], [True] * 100, alpha=0.1, delta=0.1, binding=binding)


def delivered(one: Verdict, policy: Policy) -> bool:
    verdict = settle(one, Terms(policy=policy)).verdict
    assert (verdict.status, verdict.uncertainty) in {("scored", 0.1), ("unscored", None)}
    assert verdict.status == "scored" or "cut it off" in str(verdict.reason)
    return verdict.action == "answer"


RULES = {
    "bare": (Policy(threshold=0.5), "unscored"),
    "bare, abstain": (Policy(threshold=0.5, on_cut="abstain"), "abstain"),
    "bare, score": (Policy(threshold=0.5, on_cut="score"), "score"),
    "calibrated": (Policy.from_calibration(calibration("unscored")), "unscored"),
    "calibrated, abstain": (Policy.from_calibration(calibration("abstain")), "abstain"),
    "calibrated before": (Policy.from_calibration(calibration(None)), "score"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_policy_decides_by_its_calibrations_rule(name: str) -> None:
    policy, rule = RULES[name]
    assert policy.on_cut == rule
    for text in (*OPEN, *LATER_ON, *FINISHED):
        assert delivered(cut_draft(text), policy) is (why_unscored(text, policy.on_cut or "score") is None), text
        assert delivered(cut_draft(text, cut=None), policy)
        assert delivered(cut_draft(text, cut="stop"), policy)
    call = ToolCall(name="paint", arguments={})
    assert delivered(cut_draft("", tool_calls=(call,)), policy)


@pytest.mark.parametrize(("bound", "given"), [(None, "unscored"), ("unscored", "abstain"), ("abstain", "score")])
def test_another_rule_than_the_calibrations_is_refused(bound: OnCut | None, given: OnCut) -> None:
    with pytest.raises(InputError, match="chosen before labels are seen"):
        Policy.from_calibration(calibration(bound), on_cut=given)
    assert Policy.from_calibration(calibration(given), on_cut=given).on_cut == given


def test_by_sentence_the_one_that_was_cut_off_is_not_delivered() -> None:
    text = "It is Lima. The river is"
    parts = (SentenceVerdict(start=0, end=12, uncertainty=0.1), SentenceVerdict(start=12, end=24, uncertainty=0.1))
    one = cut_draft(text, sentences=parts, settings={"on_doubt": "drop"})
    rules: dict[OnCut, list[str]] = {"unscored": ["deliver"] * 2, "abstain": ["deliver", "drop"]}
    for rule, actions in rules.items():
        verdict = settle(one, Terms(policy=Policy(threshold=0.5, on_cut=rule))).verdict
        assert [part.action for part in verdict.sentences] == actions
        assert verdict.text == text[: 12 * actions.count("deliver")]


def test_a_record_and_a_guard_take_the_same_scores_away() -> None:
    score = {"gnll": AnswerScore(uncertainty=0.1, features={"x": 1.0})}
    parts = (AnsweredSentence(start=0, end=12, scores=score), AnsweredSentence(start=12, end=24, scores=score))
    whole = Answer(key="k", question="q", text="It is Lima. The river is", finish_reason="length", scores=score)
    assert whole.judged("unscored") == whole
    assert (whole.judged("abstain").uncertainty("gnll"), whole.judged("abstain").unscored) == (None, LATER)
    divided = whole.model_copy(update={"sentences": parts}).judged("abstain")
    assert divided.sentences is not None
    assert [one.scores["gnll"].uncertainty for one in divided.sentences] == [0.1, None]
    ended = whole.model_copy(update={"finish_reason": "stop", "text": "It is"})
    assert ended.judged("abstain") == ended


def test_a_guard_withholds_what_its_limit_cut_off(language_model: LanguageModel) -> None:
    def guarded(on_cut: OnCut) -> Guard:
        return Guard(language_model, Policy(threshold=1e9, on_cut=on_cut), options=GenerationOptions(max_tokens=4))

    verdict = guarded("unscored")("q")
    assert (verdict.action, verdict.status, verdict.reason) == ("abstain", "unscored", FIRST_SENTENCE)
    assert guarded("score")("q").action == "answer"
    assert guarded("abstain").binding.on_cut == "abstain"


@pytest.mark.parametrize(("rule", "unscored"), [("unscored", 10), ("abstain", 20), ("score", 0)])
def test_a_chains_calibration_has_the_rule_too(
    rule: OnCut, unscored: int, language_model: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    form, bound = language_model.render("q").form, Binding(model="m", estimator="gnll")
    mildest: list[Any] = [*["unscored"] * 10, *["abstain"] * 10, *[None] * 40]
    rows = [
        AnsweredExample(key=str(i), text="Lima", uncertainty=i / 100, binding=bound, prompt=form, cut_calls=cut)
        for i, cut in enumerate(mildest)
    ]
    examples = [(f"q {i}", "Lima" if i > 4 else "Rome") for i in range(60)]
    made = ExampleCalibration(examples, "exact-match", alpha=0.3, delta=0.3, on_cut=rule)(rows)
    assert (made.n, made.n_unscored, made.binding and made.binding.on_cut) == (60, unscored, rule)
    assert "max_tokens cut off 20 of 60 answers, 5 of them wrong: raise it." in caplog.text
    with pytest.raises(InputError, match="on_cut must be"):
        ExampleCalibration(examples, "exact-match", alpha=0.3, delta=0.3, on_cut="drop")


def test_the_mildest_rule_that_takes_a_calls_score_away_is_recorded() -> None:
    def recorded(*texts: str) -> OnCut | None:
        return _cut_calls([RecordedDraft(cut_draft(text), None) for text in texts])

    assert (recorded("It is", "Yes. It"), recorded("Yes. It", "Yes."), recorded()) == ("unscored", "abstain", None)
