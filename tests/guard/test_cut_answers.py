"""Answers that a limit cut off: which have no score, by whose rule, and that an earlier calibration keeps its own."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from semgrad_guard import Calibration, GenerationOptions, Guard, LanguageModel, Policy, Verdict, calibrate
from semgrad_guard.adapters.calibrating import AnsweredExample, _cut_calls
from semgrad_guard.adapters.examples import ExampleCalibration
from semgrad_guard.calibration import Binding
from semgrad_guard.engine.sentences import is_unfinished
from semgrad_guard.errors import InputError
from semgrad_guard.guard.cut_answers import FIRST_SENTENCE, LATER, why_unscored
from semgrad_guard.guard.decision import settle
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.verdicts import RecordedDraft
from semgrad_guard.questions.run_record import Answer, AnsweredSentence, AnswerScore
from semgrad_guard.records import SentenceVerdict, ToolCall
from semgrad_guard.settings import OnCut

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


def draft(text: str, cut: int | str | None = 24, **more: Any) -> Verdict:
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
        assert delivered(draft(text), policy) is (why_unscored(text, policy.on_cut or "score") is None), text
        assert delivered(draft(text, cut=None), policy)
        assert delivered(draft(text, cut="stop"), policy)
    call = ToolCall(name="paint", arguments={})
    assert delivered(draft("", tool_calls=(call,)), policy)


@pytest.mark.parametrize(("bound", "given"), [(None, "unscored"), ("unscored", "abstain"), ("abstain", "score")])
def test_another_rule_than_the_calibrations_is_refused(bound: OnCut | None, given: OnCut) -> None:
    with pytest.raises(InputError, match="chosen before labels are seen"):
        Policy.from_calibration(calibration(bound), on_cut=given)
    assert Policy.from_calibration(calibration(given), on_cut=given).on_cut == given


def test_by_sentence_the_one_that_was_cut_off_is_not_delivered() -> None:
    text = "It is Lima. The river is"
    parts = (SentenceVerdict(start=0, end=12, uncertainty=0.1), SentenceVerdict(start=12, end=24, uncertainty=0.1))
    one = draft(text, sentences=parts, settings={"on_doubt": "drop"})
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
        return _cut_calls([RecordedDraft(draft(text), None) for text in texts])

    assert (recorded("It is", "Yes. It"), recorded("Yes. It", "Yes."), recorded()) == ("unscored", "abstain", None)
