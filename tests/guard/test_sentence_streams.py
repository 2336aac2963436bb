"""Guarded streams by sentence: a sentence leaves once it has ended and is let through, and no other one does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.engine.answers import batch
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.errors import AnswerFailedError, AnswerInterruptedError, LowConfidenceError
from semgrad_guard.estimators import GreatestEntropy, MaxProbability, ParaGrad
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.streams import SentencePiece, StreamSteps, run_stream, streamed
from semgrad_guard.guard.timing import Work
from semgrad_guard.guard.verdicts import unscored
from semgrad_guard.records import SentenceVerdict, Verdict
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel
from tests.pairwise import in_turn

from .routed import routed


@pytest.fixture
def model(language_model: LanguageModel) -> FixedModel:
    return FixedModel.like(language_model)


def guard(model: LanguageModel, threshold: float, **changes: Any) -> Guard:
    given: dict[str, Any] = {"estimator": HybridGrad(), "by": "sentence", **changes}
    return routed(model, Policy(threshold=threshold, on_cut="score"), **given)


def scores(verdict: Verdict) -> list[float]:
    return [sentence.uncertainty for sentence in verdict.sentences if sentence.uncertainty is not None]


def actions(verdict: Verdict) -> list[str]:
    return [sentence.action for sentence in verdict.sentences]


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

    def not_at_first(answers: Any, spans: Any, codec: Any, known: Any) -> Any:
        calls.extend(known)
        return [None] if len(calls) == 1 else ended(answers, spans, codec, known)

    monkeypatch.setattr(batch, "ended_sentences", not_at_first)
    stream = guard(model, 1e9).stream("q")
    assert "".join(stream) == TEXT
    assert calls[:2] == [0, 0]
    assert actions(stream.verdict) == ["deliver"] * 3
