"""`on_doubt="escalate"`: the target's answer follows the sentences before the doubtful one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semgrad_guard import Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.adapters.calls import verdict_of_record
from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard.verdicts import escalated
from semgrad_guard.records import Verdict
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel

from .routed import routed

QUESTION, REPLY = "hello", "Ask a cook."
FINISHED = f"{PIECES[0]}\n\n{REPLY}"
ENDED = f"{PIECES[0]}{CLOSING_LINE}"


@pytest.fixture(scope="module")
def model(language_model: LanguageModel) -> FixedModel:
    return FixedModel.like(language_model)


@pytest.fixture(scope="module")
def threshold(model: FixedModel) -> float:
    """A threshold that lets the first sentence through, and not the second one."""
    first, second, _ = (one.uncertainty or 0.0 for one in guard(model, 1e9)(QUESTION).sentences)
    assert first < second
    return (first + second) / 2


def guard(model: LanguageModel, threshold: float, target: Any = None, **changes: Any) -> Guard:
    given: dict[str, Any] = {"estimator": HybridGrad(), "by": "sentence", "on_doubt": "escalate", **changes}
    return routed(model, Policy(threshold=threshold), target, **given)


def actions(verdict: Verdict) -> list[str]:
    return [sentence.action for sentence in verdict.sentences]


def shown(verdict: Verdict) -> list[str]:
    return [verdict.text[sentence.start : sentence.end] for sentence in verdict.sentences]


def failing(_: Any) -> str:
    raise ConnectionError("gone")


def test_the_target_finishes(model: FixedModel, threshold: float) -> None:
    given: list[Any] = []
    verdict = guard(model, threshold, lambda conversation: given.append(conversation) or REPLY)(QUESTION)
    assert given == [QUESTION]  # and no draft
    assert (verdict.text, verdict.action, verdict.promised) == (FINISHED, "escalate", False)
    assert (actions(verdict), shown(verdict)) == (["deliver", "escalate", "escalate"], [PIECES[0], "", ""])
    assert verdict.escalated is not None
    assert (verdict.escalated.text, verdict.escalated.promised, verdict.escalated.status) == (REPLY, False, "unscored")
    assert (verdict.draft, verdict.delivered) == (TEXT, verdict)
    assert "Milk" not in str(verdict.metadata())
    read = verdict_of_record(verdict.metadata(keep_draft=True), verdict.text)
    assert read == verdict.model_copy(update={"decision_id": read.decision_id})


def test_a_stream_is_the_record(model: FixedModel, threshold: float) -> None:
    made = guard(model, threshold, lambda _: REPLY)
    stream = made.stream(QUESTION)
    assert list(stream) == [PIECES[0], f"\n\n{REPLY}"]
    assert stream.verdict.text == FINISHED
    assert (actions(stream.verdict), stream.verdict.draft) == (["deliver", "escalate"], "Tea is old. Milk is hot!")

    async def read() -> list[str]:
        async def target(_: Any) -> str:
            return REPLY

        return [piece async for piece in guard(model, threshold, target).astream(QUESTION)]

    assert asyncio.run(read()) == [PIECES[0], f"\n\n{REPLY}"]


def withholding(model: FixedModel) -> Guard:
    return guard(model, 0.0)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (None, "sentences are not let through"),
        (failing, "failed"),
        (lambda _: "  ", "is empty"),
        (lambda _: "\ud83d", "surrogate"),
        (withholding, "own guard"),
        (lambda model: guard(model, 0.0, mode="annotate"), "own guard"),
    ],
)
def test_without_a_reply_the_answer_ends(model: FixedModel, threshold: float, target: Any, reason: str) -> None:
    if target not in (None, failing) and isinstance(made := target(model), Guard):
        target = made
    ending = guard(model, threshold, target, on_error="abstain")
    stream = ending.stream(QUESTION)
    assert list(stream) == [PIECES[0], CLOSING_LINE]
    for verdict in (ending(QUESTION), stream.verdict):
        assert (verdict.text, verdict.action, verdict.escalated) == (ENDED, "answer", None)
        assert (set(actions(verdict)[1:]), shown(verdict)[0]) == ({"stop"}, PIECES[0])
        assert reason in (verdict.reason or "")


def test_an_error_is_raised_where_that_is_chosen(model: FixedModel, threshold: float) -> None:
    raising = guard(model, threshold, failing)
    with pytest.raises(ConnectionError):
        raising(QUESTION)
    stream = raising.stream(QUESTION)
    assert next(stream) == PIECES[0]
    with pytest.raises(ConnectionError):
        list(stream)


def test_where_no_sentence_is_let_through_the_whole_is_escalated(model: FixedModel) -> None:
    stream = guard(model, 0.0, lambda _: REPLY).stream(QUESTION)
    assert list(stream) == [REPLY]
    assert (stream.verdict.action, stream.verdict.is_continued) == ("escalate", False)


def test_two_stages(model: FixedModel, threshold: float, tmp_path: Any) -> None:
    with DecisionLog(tmp_path / "log.db", text=True) as log:
        second = guard(model, 1e9, log=log)
        verdict = guard(model, threshold, second, log=log)(QUESTION)
        assert verdict.text == f"{PIECES[0]}\n\n{TEXT}"
        assert verdict.escalated is not None
        assert (verdict.escalated.action, actions(verdict.escalated)) == ("answer", ["deliver"] * 3)
        assert second.stream(QUESTION).verdict.text == TEXT
        log.flush()
        rows = {row.id: row for row, _ in log.database.decisions(limit=9)}
        row = rows[verdict.decision_id or ""]
        assert (row.action, row.delivered, row.tokens) == ("escalate", verdict.text, None)
        assert [one.action for one in row.sentences or ()] == actions(verdict)
        inner = verdict.escalated.decision_id
        assert rows[inner or ""].delivered == TEXT
    # a first stage that hands a whole answer on to one that another finishes
    outer = guard(model, 0.0, guard(model, threshold, lambda _: REPLY))(QUESTION)
    assert (outer.text, outer.delivered.text, outer.delivered.is_continued) == (FINISHED, FINISHED, True)


def test_nothing_is_promised_about_two_authors(model: FixedModel, threshold: float) -> None:
    base = guard(model, threshold, lambda _: REPLY)
    own = [sentence.uncertainty or 0.0 for sentence in guard(model, 1e9)(QUESTION).sentences]
    answers = [AnswerSentences(f"q{number}", TEXT, own, (True, False, False), (None,) * 3) for number in range(120)]
    forms = [model.render(QUESTION).form] * len(answers)
    given: dict[str, Any] = {"alpha": 0.2, "delta": 0.2, "prompts": forms, "copies": "keep", "promise": "answer"}
    made = calibrate_sentences(answers, on_doubt="escalate", binding=base.binding, **given)
    assert made.sentences is not None
    assert made.sentences.on_doubt == "escalate"
    assert own[0] < (made.threshold or 0.0) < own[1]
    verdict = routed(model, Policy.from_calibration(made), lambda _: REPLY)(QUESTION)
    assert (verdict.text, verdict.details.familiar, verdict.promised) == (FINISHED, True, False)
    assert [sentence.promised for sentence in verdict.sentences] == [True, False, False]
    alone = Guard(model, Policy.from_calibration(made))(QUESTION)
    assert (alone.text, alone.promised) == (ENDED, True)
    last = alone.revised(upstream=made.id)
    inner = verdict.revised(upstream=made.id, escalated=last)
    assert (escalated(alone, last).promised, escalated(alone, inner).promised) == (True, False)
    with pytest.raises(BindingMismatchError, match="judged as"):
        Guard(model, Policy.from_calibration(made), on_doubt="stop")(QUESTION)
