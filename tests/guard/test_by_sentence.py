"""Answers judged by sentence: what of a draft is delivered, what is recorded, and what is promised."""

from __future__ import annotations

from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy, calibrate
from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.estimators import GreatestEntropy, MaxProbability, ParaGrad, SemanticEntropy
from semgrad_guard.guard.decision import settle
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.sentences import watched_score
from semgrad_guard.guard.verdicts import undecided
from semgrad_guard.records import SentenceVerdict, Verdict
from semgrad_guard.settings import CLOSING_LINE

from .routed import routed

PIECES = ["Lima is old. ", "It is big. ", "Peru is far. ", "They speak Quechua."]
LEANS = [None, 0, None, 2]
POLICY = Policy(threshold=1.0)


def draft(*uncertainties: float | None, on_doubt: str = "stop") -> Verdict:
    """A draft whose sentences have these scores."""
    sentences, end = list[SentenceVerdict](), 0
    for piece, uncertainty, leans_on in zip(PIECES, uncertainties, LEANS, strict=False):
        begin, end = end, end + len(piece)
        sentences.append(SentenceVerdict(start=begin, end=end, uncertainty=uncertainty, leans_on=leans_on, tokens=3))
    greatest = None if None in uncertainties else max(u for u in uncertainties if u is not None)
    return Verdict.of(
        status="scored", action="answer", text="".join(PIECES[: len(uncertainties)]), estimator="hybridgrad",
        model="m", uncertainty=greatest, sentences=tuple(sentences),
        settings={"by": "sentence", "on_doubt": on_doubt},
    )  # fmt: skip


def shown(verdict: Verdict) -> list[str]:
    return [verdict.text[sentence.start : sentence.end] for sentence in verdict.sentences]


def actions(verdict: Verdict) -> str:
    return " ".join(sentence.action for sentence in verdict.sentences)


@pytest.mark.parametrize(
    ("on_doubt", "scores", "text", "expected"),
    [
        ("stop", (0, 0, 0, 0), "".join(PIECES), "deliver deliver deliver deliver"),
        ("stop", (0, 0, 2, 0), f"{PIECES[0]}{PIECES[1]}{CLOSING_LINE}", "deliver deliver stop stop"),
        ("drop", (0, 2, 0, 0), f"{PIECES[0]}{PIECES[2]}{PIECES[3]}", "deliver drop deliver deliver"),
        ("drop", (0, 0, 2, 0), f"{PIECES[0]}{PIECES[1]}", "deliver deliver drop drop"),
        ("stop", (0, None, 0), f"{PIECES[0]}{CLOSING_LINE}", "deliver stop stop"),
        ("drop", (0, None, 0), f"{PIECES[0]}{PIECES[2]}", "deliver drop deliver"),
    ],
)
def test_a_part_is_delivered(on_doubt: Any, scores: tuple[float | None, ...], text: str, expected: str) -> None:
    whole = draft(*scores, on_doubt=on_doubt)
    settled = settle(whole, Terms(policy=POLICY, can_escalate=True))
    assert settled.kind == "deliver"
    verdict = settled.verdict
    assert (verdict.text, verdict.action, actions(verdict)) == (text, "answer", expected)
    for piece, sentence in zip(shown(verdict), verdict.sentences, strict=True):
        assert (piece == "") == (sentence.action in ("stop", "drop"))
    assert "".join(shown(verdict)) == text.removesuffix(CLOSING_LINE)
    assert verdict.draft == (None if text == whole.text else whole.text)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


@pytest.mark.parametrize(
    ("on_doubt", "scores", "expected"),
    [("stop", (3, 0, 5), 3), ("drop", (3, 0, 2), 2), ("drop", (None, 0, 5), 5), ("stop", (), 7)],
)
def test_drift_compares_the_score_that_a_calibration_keeps(
    on_doubt: Any, scores: tuple[float | None, ...], expected: float
) -> None:
    """The most certain sentence's; without sentences that of the answer."""
    given = draft(*scores, on_doubt=on_doubt) if scores else draft(7).model_copy(update={"sentences": ()})
    assert watched_score(settle(given, Terms(policy=POLICY)).verdict) == expected


def test_nothing_withheld_is_in_the_metadata() -> None:
    verdict = settle(draft(0, 2, 0, 0, on_doubt="drop"), Terms(policy=POLICY)).verdict
    assert "big" not in str(verdict.metadata())
    assert "big" in str(verdict.metadata(keep_draft=True))


@pytest.mark.parametrize("on_doubt", ["stop", "drop"])
def test_where_nothing_is_left_the_whole_answer_is_withheld(on_doubt: Any) -> None:
    whole = draft(2, 3, on_doubt=on_doubt)
    assert settle(whole, Terms(policy=POLICY)).kind == "abstain"
    assert settle(whole, Terms(policy=POLICY, can_escalate=True)).kind == "escalate"


@pytest.mark.parametrize("on_doubt", ["stop", "drop"])
def test_no_part_of_an_irreplaceable_answer_is_delivered(on_doubt: Any) -> None:
    settled = settle(draft(0, 2, on_doubt=on_doubt), Terms(policy=POLICY), whole=True)
    assert settled.kind == "abstain"


def test_modes() -> None:
    doubtful = draft(0, 2)
    assert settle(doubtful, Terms(policy=POLICY, mode="raise")).kind == "raise"
    advice = settle(doubtful, Terms(policy=POLICY, mode="annotate"))
    assert advice.kind == "deliver"
    assert (advice.verdict.text, advice.verdict.details.enforced) == (doubtful.text, False)
    assert (actions(advice.verdict), advice.verdict.promised) == ("deliver stop", False)


def test_an_unscored_sentence_that_is_delivered_hides_no_doubtful_one() -> None:
    policy = Policy(threshold=1.0, on_unscored="answer")
    verdict = settle(draft(0, None, 2), Terms(policy=policy)).verdict
    assert actions(verdict) == "deliver deliver stop"


def test_a_delivered_part_can_be_judged_again() -> None:
    verdict = undecided(settle(draft(2, 0, 0, 0, on_doubt="drop"), Terms(policy=POLICY)).verdict)
    assert shown(verdict) == PIECES[2:]
    assert [sentence.leans_on for sentence in verdict.sentences] == [None, 0]
    assert actions(verdict) == "deliver deliver"


TEXT = "Tea is old. It is hot! Go."
WRITTEN = GenerationOptions(max_tokens=64, grammar=r'start: "Tea is old. It is hot! Go."')


def guard(model: LanguageModel, threshold: float, **changes: Any) -> Guard:
    given: dict[str, Any] = {"estimator": HybridGrad(), "options": WRITTEN, "by": "sentence", **changes}
    return routed(model, Policy(threshold=threshold), **given)


@pytest.mark.parametrize("estimator", [HybridGrad(), ParaGrad(), MaxProbability(), GreatestEntropy()])
def test_every_sentence_has_a_score(language_model: LanguageModel, estimator: Any) -> None:
    verdict = guard(language_model, 1e9, estimator=estimator)("q")
    assert (verdict.text, shown(verdict)) == (TEXT, ["Tea is old. ", "It is hot! ", "Go."])
    own = [sentence.uncertainty for sentence in verdict.sentences]
    assert verdict.uncertainty == max(u for u in own if u is not None)
    assert len(set(own)) == 3
    assert [sentence.leans_on for sentence in verdict.sentences] == [None, 0, None]
    assert sum(sentence.tokens for sentence in verdict.sentences) == verdict.details.scored_tokens
    assert all("gnll" in sentence.scores for sentence in verdict.sentences)


def test_scores_by_sentence_are_bound(language_model: LanguageModel) -> None:
    stop, drop, whole = (
        guard(language_model, 1.0, **changes).binding
        for changes in ({}, {"on_doubt": "drop"}, {"by": "answer"})
    )  # fmt: skip
    for one, two in ((stop, drop), (stop, whole), (whole, drop)):
        with pytest.raises(BindingMismatchError):
            one.require(two)
    before = {name: value for name, value in (stop.settings or {}).items() if name != "earlier"}
    for form in ({}, {"earlier": "differentiated"}):  # those of the first releases named no form
        with pytest.raises(BindingMismatchError, match="'earlier'"):
            stop.require(stop.model_copy(update={"settings": {**before, **form}}))


def test_a_calibrated_guard_promises_what_it_delivers(language_model: LanguageModel) -> None:
    base = guard(language_model, 1e9, on_doubt="drop")
    drafted = base("q")
    own = [sentence.uncertainty or 0.0 for sentence in drafted.sentences]
    leans_on = [sentence.leans_on for sentence in drafted.sentences]
    first, last = own[0], max(own[0], own[1])
    answers = [
        AnswerSentences(f"q{number}", TEXT, own, (True, number % 2 == 0 or last <= first, True), leans_on)
        for number in range(120)
    ]
    forms = [language_model.render("q").form] * len(answers)
    made = calibrate_sentences(
        answers, on_doubt="drop", alpha=0.2, delta=0.2, binding=base.binding, prompts=forms, copies="keep"
    )
    kept = Guard(language_model, Policy.from_calibration(made), options=WRITTEN)  # both settings are the calibration's
    verdict = kept("q")
    delivered = [sentence for sentence in verdict.sentences if sentence.action == "deliver"]
    assert verdict.promised == (bool(delivered) and not verdict.details.unfamiliar)
    assert all(sentence.promised and (sentence.compared or 0) <= (made.threshold or 0) for sentence in delivered)
    assert kept.promise is None
    forms_of_judging: list[tuple[Any, Any]] = [("sentence", "stop"), ("answer", None)]
    for by, on_doubt in forms_of_judging:
        other = Guard(language_model, Policy.from_calibration(made), options=WRITTEN, by=by, on_doubt=on_doubt)
        with pytest.raises(BindingMismatchError, match="judged as"):
            other("q")


def test_a_calibration_of_whole_answers_is_none_of_sentences(language_model: LanguageModel) -> None:
    base = guard(language_model, 1.0)
    scores = [i / 100 for i in range(100)]
    whole = calibrate(scores, [True] * 100, alpha=0.2, delta=0.2, binding=base.binding)
    with pytest.raises(BindingMismatchError, match="whole answers"):
        Guard(language_model, Policy.from_calibration(whole), options=WRITTEN, by="sentence")("q")


def test_estimators_of_whole_answers_are_refused(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="whole answers"):
        guard(language_model, 1.0, estimator=SemanticEntropy())
