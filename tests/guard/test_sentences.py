"""Answers by sentence: what of a draft is delivered, recorded and promised, and what leaves while it is written."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy, calibrate
from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.engine.answers import batch
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.errors import (
    AnswerFailedError,
    AnswerInterruptedError,
    BindingMismatchError,
    InputError,
    LowConfidenceError,
)
from semgrad_guard.estimators import GreatestEntropy, MaxProbability, ParaGrad, SemanticEntropy
from semgrad_guard.guard.decision import settle, undecided, unscored, watched_score
from semgrad_guard.guard.flow import Draft, SentencePiece, streamed
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.steps import StreamSteps, Work, run_stream
from semgrad_guard.records import SentenceVerdict, Verdict
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel
from tests.pairwise import in_turn

from .routed import routed

PARTS = ["Lima is old. ", "It is big. ", "Peru is far. ", "They speak Quechua."]
LEANS = [None, 0, None, 2]
POLICY = Policy(threshold=1.0)


def draft(*uncertainties: float | None, on_doubt: str = "stop") -> Verdict:
    """A draft whose sentences have these scores."""
    sentences, end = list[SentenceVerdict](), 0
    for piece, uncertainty, leans_on in zip(PARTS, uncertainties, LEANS, strict=False):
        begin, end = end, end + len(piece)
        sentences.append(SentenceVerdict(start=begin, end=end, uncertainty=uncertainty, leans_on=leans_on, tokens=3))
    greatest = None if None in uncertainties else max(u for u in uncertainties if u is not None)
    return Verdict.of(
        status="scored", action="answer", text="".join(PARTS[: len(uncertainties)]), estimator="hybridgrad",
        model="m", uncertainty=greatest, sentences=tuple(sentences),
        settings={"by": "sentence", "on_doubt": on_doubt},
    )  # fmt: skip


def shown(verdict: Verdict) -> list[str]:
    return [verdict.text[sentence.start : sentence.end] for sentence in verdict.sentences]


def actions(verdict: Verdict) -> list[str]:
    return [sentence.action for sentence in verdict.sentences]


def spelled(verdict: Verdict) -> str:
    return " ".join(actions(verdict))


@pytest.mark.parametrize(
    ("on_doubt", "scores", "text", "expected"),
    [
        ("stop", (0, 0, 0, 0), "".join(PARTS), "deliver deliver deliver deliver"),
        ("stop", (0, 0, 2, 0), f"{PARTS[0]}{PARTS[1]}{CLOSING_LINE}", "deliver deliver stop stop"),
        ("drop", (0, 2, 0, 0), f"{PARTS[0]}{PARTS[2]}{PARTS[3]}", "deliver drop deliver deliver"),
        ("drop", (0, 0, 2, 0), f"{PARTS[0]}{PARTS[1]}", "deliver deliver drop drop"),
        ("stop", (0, None, 0), f"{PARTS[0]}{CLOSING_LINE}", "deliver stop stop"),
        ("drop", (0, None, 0), f"{PARTS[0]}{PARTS[2]}", "deliver drop deliver"),
    ],
)
def test_a_part_is_delivered(on_doubt: Any, scores: tuple[float | None, ...], text: str, expected: str) -> None:
    whole = draft(*scores, on_doubt=on_doubt)
    settled = settle(whole, Terms(policy=POLICY, can_escalate=True))
    assert settled.kind == "deliver"
    verdict = settled.verdict
    assert (verdict.text, verdict.action, spelled(verdict)) == (text, "answer", expected)
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
    assert (spelled(advice.verdict), advice.verdict.promised) == ("deliver stop", False)


def test_an_unscored_sentence_that_is_delivered_hides_no_doubtful_one() -> None:
    policy = Policy(threshold=1.0, on_unscored="answer")
    verdict = settle(draft(0, None, 2), Terms(policy=policy)).verdict
    assert spelled(verdict) == "deliver deliver stop"


def test_a_delivered_part_can_be_judged_again() -> None:
    verdict = undecided(settle(draft(2, 0, 0, 0, on_doubt="drop"), Terms(policy=POLICY)).verdict)
    assert shown(verdict) == PARTS[2:]
    assert [sentence.leans_on for sentence in verdict.sentences] == [None, 0]
    assert spelled(verdict) == "deliver deliver"


SHORT = "Tea is old. It is hot! Go."
WRITTEN = GenerationOptions(max_tokens=64, grammar=r'start: "Tea is old. It is hot! Go."')


def guard(model: LanguageModel, threshold: float, *, on_cut: Any = "score", **changes: Any) -> Guard:
    given: dict[str, Any] = {"estimator": HybridGrad(), "by": "sentence", **changes}
    return routed(model, Policy(threshold=threshold, on_cut=on_cut), **given)


def writer(model: LanguageModel, threshold: float, **changes: Any) -> Guard:
    return guard(model, threshold, on_cut=None, **{"options": WRITTEN, **changes})


@pytest.mark.parametrize("estimator", [HybridGrad(), ParaGrad(), MaxProbability(), GreatestEntropy()])
def test_every_sentence_has_a_score(language_model: LanguageModel, estimator: Any) -> None:
    verdict = writer(language_model, 1e9, estimator=estimator)("q")
    assert (verdict.text, shown(verdict)) == (SHORT, ["Tea is old. ", "It is hot! ", "Go."])
    own = [sentence.uncertainty for sentence in verdict.sentences]
    assert verdict.uncertainty == max(u for u in own if u is not None)
    assert len(set(own)) == 3
    assert [sentence.leans_on for sentence in verdict.sentences] == [None, 0, None]
    assert sum(sentence.tokens for sentence in verdict.sentences) == verdict.details.scored_tokens
    assert all("gnll" in sentence.scores for sentence in verdict.sentences)


def test_scores_by_sentence_are_bound(language_model: LanguageModel) -> None:
    stop, drop, whole = (
        writer(language_model, 1.0, **changes).binding
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
    base = writer(language_model, 1e9, on_doubt="drop")
    drafted = base("q")
    own = [sentence.uncertainty or 0.0 for sentence in drafted.sentences]
    leans_on = [sentence.leans_on for sentence in drafted.sentences]
    first, last = own[0], max(own[0], own[1])
    answers = [
        AnswerSentences(f"q{number}", SHORT, own, (True, number % 2 == 0 or last <= first, True), leans_on)
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
    base = writer(language_model, 1.0)
    scores = [i / 100 for i in range(100)]
    whole = calibrate(scores, [True] * 100, alpha=0.2, delta=0.2, binding=base.binding)
    with pytest.raises(BindingMismatchError, match="whole answers"):
        Guard(language_model, Policy.from_calibration(whole), options=WRITTEN, by="sentence")("q")


def test_estimators_of_whole_answers_are_refused(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="whole answers"):
        writer(language_model, 1.0, estimator=SemanticEntropy())


# Streams: a sentence leaves once it has ended and is let through, and no other one does.


@pytest.fixture
def model(language_model: LanguageModel) -> FixedModel:
    return FixedModel.like(language_model)


def scores(verdict: Verdict) -> list[float]:
    return [sentence.uncertainty for sentence in verdict.sentences if sentence.uncertainty is not None]


@pytest.mark.parametrize("estimator", [HybridGrad(), ParaGrad(), MaxProbability(), GreatestEntropy()])
def test_sentences_leave_with_the_scores_of_the_whole_answer(model: FixedModel, estimator: Any) -> None:
    whole = guard(model, 1e9, estimator=estimator)("q")
    stream = guard(model, 1e9, estimator=estimator).stream("q")
    seen: list[tuple[str, int]] = [(piece, len(stream.sentences)) for piece in stream]
    assert seen == [(PIECES[0], 1), (PIECES[1], 2), (PIECES[2], 3)]
    assert scores(stream.verdict) == pytest.approx(scores(whole), rel=1e-5)
    assert [one.tokens for one in stream.verdict.sentences] == [one.tokens for one in whole.sentences]
    assert (stream.verdict.text, stream.verdict.details.scored_tokens) == (TEXT, whole.details.scored_tokens)


def thresholds(model: FixedModel) -> list[float]:
    """Below all scores of sentences, and above each of them."""
    return [0.0, *(score * 1.001 for score in sorted(scores(guard(model, 1e9)("q"))))]


@in_turn(on_doubt=["stop", "drop"], place=range(4))
def test_the_stream_is_the_text_of_the_record_at_any_threshold(model: FixedModel, on_doubt: Any, place: int) -> None:
    made = guard(model, thresholds(model)[place], on_doubt=on_doubt, escalate_to=lambda _: "Ask a cook.")
    whole, stream = made("q"), made.stream("q")
    pieces = list(stream)
    assert "".join(pieces) == stream.verdict.text == whole.text
    left = [piece for piece, sentence in zip(PIECES, whole.sentences, strict=True) if sentence.action == "deliver"]
    assert pieces[: len(left)] == left
    assert (stream.verdict.action, stream.verdict.details.enforced) == (whole.action, whole.details.enforced)
    assert actions(whole)[: len(stream.verdict.sentences)] == actions(stream.verdict)
    if on_doubt == "drop":
        assert len(stream.verdict.sentences) == 3

    async def read() -> tuple[str, Verdict]:
        found = made.astream("q")
        return "".join([piece async for piece in found]), await found.verdict()

    text, verdict = asyncio.run(read())
    assert (text, actions(verdict)) == (whole.text, actions(stream.verdict))


def test_stop_ends_the_model_behind_the_doubtful_sentence(model: FixedModel) -> None:
    stream = guard(model, 0.0).stream("q")
    assert list(stream) == [stream.verdict.text]
    assert (stream.verdict.action, stream.verdict.draft, actions(stream.verdict)) == (
        "abstain",
        "Tea is old.",
        ["stop"],
    )
    first, second, _ = scores(guard(model, 1e9)("hello"))
    assert first < second
    stream = guard(model, first * 1.001).stream("hello")
    assert list(stream) == [PIECES[0], CLOSING_LINE]
    assert stream.verdict.draft == "Tea is old. Milk is hot!"


@pytest.mark.parametrize("changes", [{"mode": "raise"}, {"by": "answer"}])
def test_other_answers_leave_as_a_whole(model: FixedModel, changes: dict[str, Any]) -> None:
    assert list(guard(model, 1e9, **changes).stream("q")) == [TEXT]


def test_a_doubt_raises_before_anything_leaves(model: FixedModel) -> None:
    with pytest.raises(LowConfidenceError):
        next(guard(model, thresholds(model)[1], mode="raise", on_doubt="drop").stream("q"))


def test_rows_of_one_batch_have_their_own_sentences(model: FixedModel) -> None:
    made = guard(model, 1e9)
    alone = made("q")

    async def read(question: str) -> tuple[list[str], Verdict]:
        stream = made.astream(question)
        return [piece async for piece in stream], await stream.verdict()

    async def together() -> list[tuple[list[str], Verdict]]:
        return await asyncio.gather(*(read(question) for question in ("q", "q", "What is the capital of Peru?", "q")))

    for number, (pieces, verdict) in enumerate(asyncio.run(together())):
        assert pieces == list(PIECES)
        if number != 2:
            assert scores(verdict) == pytest.approx(scores(alone), rel=1e-4)


def test_a_closed_stream_stops_the_model(model: FixedModel) -> None:
    stream = guard(model, 1e9).stream("q")
    assert next(stream) == PIECES[0]
    stream.close()
    assert list(stream) == []
    assert guard(model, 1e9)("q").text == TEXT


class Writing(FixedModel):
    """A model that can write another text only, of which `limit` tokens may leave a part."""

    written, limit = "", 99

    def fitted(self, options: GenerationOptions | None, *prompts: Prompt) -> GenerationOptions:
        return replace(super().fitted(options, *prompts), max_tokens=self.limit, grammar=f'start: "{self.written}"')


def writing(model: LanguageModel, text: str, limit: int = 99) -> Writing:
    made = Writing.like(model)
    made.written, made.limit = text, limit
    return made


@pytest.mark.parametrize("written", ["tea and " * 40, "Tea is old. Milk and " + "tea and " * 40])
def test_a_sentence_that_is_cut_is_judged_at_its_end(language_model: LanguageModel, written: str) -> None:
    stream = guard(writing(language_model, written, limit=24), 1e9).stream("q")
    pieces = list(stream)
    assert len(pieces) == len(stream.verdict.sentences) == written.count(".") + 1
    assert written.startswith("".join(pieces))
    assert (stream.verdict.details.cut, stream.verdict.text) == (24, "".join(pieces))
    assert None not in [sentence.uncertainty for sentence in stream.verdict.sentences]


def test_a_change_of_the_model_ends_the_stream(model: FixedModel) -> None:
    stream = guard(model, 1e9).stream("q")
    assert next(stream) == PIECES[0]
    handle = model._model.register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(AnswerInterruptedError):
            list(stream)
    finally:
        handle.remove()


def failing(pieces: list[str], end: Any) -> StreamSteps[Any, Draft[None]]:
    """An answer of which these sentences have left when its author ends it, or fails."""
    yield "raw text"
    yield from (SentencePiece(text, SentenceVerdict(start=0, end=5)) for text in pieces)
    if isinstance(end, Exception):
        raise end
    return Draft((yield Work(lambda: unscored(end, reason="none"))), None)


@pytest.mark.parametrize(
    ("pieces", "end", "shown", "error"),
    [
        ([], AnswerFailedError("gone"), 1, None),  # the abstain message alone
        (["Tea. "], AnswerFailedError("gone"), 1, AnswerFailedError),
        (["Tea. "], "Milk. ", 1, AnswerInterruptedError),
        (["Tea. "], "Tea. Milk. ", 2, None),
    ],
)
def test_nothing_follows_a_sentence_that_does_not_belong_to_it(
    pieces: list[str], end: Any, shown: int, error: type[Exception] | None
) -> None:
    terms = Terms(policy=Policy(threshold=1.0, on_unscored="answer"), on_error="abstain")
    found: list[Any] = []
    raised: Exception | None = None
    try:
        for step in run_stream(streamed(terms, failing(pieces, end))):
            found.append(step)
    except Exception as caught:  # noqa: BLE001 - compared below
        raised = caught
    assert (len(found), type(raised)) == (shown, error or type(None))
    assert "raw text" not in map(str, found)


def test_a_sentence_ends_while_a_character_is_being_written(language_model: LanguageModel) -> None:
    made = guard(writing(language_model, "茶很老。🍵牛奶很热！走吧。"), 1e9)  # several tokens a character
    whole, stream = made("q"), made.stream("q")
    assert list(stream) == ["茶很老。", "🍵牛奶很热！", "走吧。"]
    assert scores(stream.verdict) == pytest.approx(scores(whole), rel=1e-5)


@pytest.mark.parametrize("on_doubt", ["stop", "drop"])
def test_what_may_be_a_thought_behind_sentences_is_withheld(language_model: LanguageModel, on_doubt: Any) -> None:
    model = writing(language_model, "Tea is old. Milk is hot! </think> Go there. And stay.")
    stream = guard(model, 1e9, on_doubt=on_doubt).stream("q")
    pieces = list(stream)
    assert pieces[:2] == ["Tea is old. ", "Milk is hot! "]
    assert "Go" not in "".join(pieces)
    assert stream.verdict.text == "".join(pieces)
    assert actions(stream.verdict) == ["deliver", "deliver", on_doubt]
    assert "mark of reasoning" in str(stream.verdict.sentences[2].reason)


def test_sentences_whose_tokens_do_not_spell_them_yet_wait(model: FixedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, calls = batch.ended_sentences, list[int]()

    def not_at_first(answers: Any, spans: Any, known: Any) -> Any:
        calls.extend(known)
        return [None] if len(calls) == 1 else ended(answers, spans, known)

    monkeypatch.setattr(batch, "ended_sentences", not_at_first)
    stream = guard(model, 1e9).stream("q")
    assert "".join(stream) == TEXT
    assert calls[:2] == [0, 0]
    assert actions(stream.verdict) == ["deliver"] * 3
