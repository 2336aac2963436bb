"""The matrix: every path times every mode, around both kinds of model, for answers let through and withheld."""

from __future__ import annotations

import asyncio
import logging
import warnings
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import (
    ChatSemGrad,
    LowConfidenceError,
    UncertaintyRouter,
)
from semgrad_guard.errors import BindingMismatchError
from tests.pairwise import pairwise

from .router_kit import ABSTENTION, ELSEWHERE, KINDS, LIVE, MODES, PATHS, PROMPT, Kit
from .support import (
    EVERYTHING,
    NOTHING,
    QUESTION,
    Ledger,
    metadata_of,
    policy_for_another_model,
    text_of,
)


def _record(pieces: list[Any]) -> dict[str, Any]:
    (record,) = metadata_of(pieces)
    assert metadata_of(pieces[-1:]) == [record], "the verdict stands on the last piece"
    return record


# Not let through.


def test_enforce_withholds(kit: Kit, path: str, draft: str) -> None:
    pieces = kit.call(path, kit.router(NOTHING))
    record = _record(pieces)
    assert [piece.text for piece in pieces if piece.text] == [ABSTENTION], "one chunk"
    assert (record["action"], record["enforced"], record["threshold"]) == ("abstain", True, -1.0)
    assert "".join(kit.wire.tokens) in ("", ABSTENTION), "tokens of the draft went out"
    assert draft not in repr(pieces)
    kit.assert_closed()


def test_enforce_escalates(kit: Kit, path: str, draft: str) -> None:
    target = RunnableLambda(lambda messages: AIMessage(content=ELSEWHERE))
    pieces = kit.call(path, kit.router(NOTHING, escalate_to=target))
    assert text_of(pieces) == ELSEWHERE
    assert _record(pieces)["escalated"]["model"] == "external"
    assert draft not in repr(pieces)
    kit.assert_closed()


def test_annotate_delivers_live_and_says_what_it_would_have_done(kit: Kit, path: str, draft: str) -> None:
    def unasked(messages: Any) -> str:
        raise AssertionError("an annotating router asks no target")

    pieces = kit.call(path, kit.router(NOTHING, mode="annotate", escalate_to=RunnableLambda(unasked)))
    record = _record(pieces)
    assert text_of(pieces) == draft
    assert (record["action"], record["enforced"], record["threshold"]) == ("escalate", False, -1.0)
    assert record["promised"] is False
    assert "above the threshold" in record["reason"]
    assert (len(pieces) > 5) == (path in LIVE), "streams are live, token by token"
    kit.assert_closed()
    end = _message(kit.ledger.models()[0].outputs)
    assert end["response_metadata"]["semgrad_guard"]["action"] == "escalate", "traced as delivered"


def _message(outputs: Any) -> dict[str, Any]:
    return outputs["generations"][0][0]["message"]["kwargs"]


def test_observe_leaves_the_answer_and_reports(
    kit: Kit, path: str, draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="semgrad_guard"):
        pieces = kit.call(path, kit.router(NOTHING, mode="observe"))
    record = _record(pieces)
    assert text_of(pieces) == draft
    assert (record["action"], record["enforced"], record["threshold"], record["reason"]) == ("answer", True, None, None)
    assert (len(pieces) > 5) == (path in LIVE)
    (logged,) = [record for record in caplog.records if record.name == "semgrad_guard"]
    assert logged.levelno == logging.WARNING
    assert logged.semgrad_guard["action"] == "abstain"  # type: ignore[attr-defined]
    assert logged.semgrad_guard["uncertainty"] == record["uncertainty"]  # type: ignore[attr-defined]
    assert logged.semgrad_guard["enforced"] is False  # type: ignore[attr-defined]
    kit.assert_closed()


def test_raise_raises_before_anything_leaves(kit: Kit, path: str, draft: str) -> None:
    with pytest.raises(LowConfidenceError, match="above the threshold") as caught:
        kit.call(path, kit.router(NOTHING, mode="raise"))
    verdict = caught.value.verdict
    assert (verdict.action, verdict.text, verdict.draft) == ("abstain", "", None)
    assert kit.wire.tokens == []
    assert kit.wire.results == [], "the model's run ends with the error"
    assert draft not in repr(vars(caught.value))
    kit.assert_closed()
    model = kit.ledger.models()[0]
    assert "LowConfidenceError" in str(model.error)
    assert draft not in str(model.error)


@pytest.mark.parametrize("how", ["output", "events"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_raise_reaches_every_reader_of_version_3(
    chat: ChatSemGrad, ledger: Ledger, how: str, asynchronous: bool
) -> None:
    router, config = UncertaintyRouter(chat, NOTHING, mode="raise"), {"callbacks": [ledger]}

    async def aread() -> None:
        stream = await router.astream_events(QUESTION, config, version="v3")  # type: ignore[call-overload]
        try:
            await stream.output if how == "output" else [event async for event in stream]
        finally:  # handlers hear of the error a moment after the reader
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    def read() -> None:
        stream = router.stream_events(QUESTION, config, version="v3")  # type: ignore[call-overload]
        _ = stream.output if how == "output" else list(stream)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # version 3 is in beta
        with pytest.raises(LowConfidenceError):
            asyncio.run(aread()) if asynchronous else read()
    ledger.assert_balanced()


# Let through.


@pairwise(kit=KINDS, path=PATHS, mode=MODES, indirect=["kit", "path"])
def test_what_is_let_through_is_delivered_in_every_mode(kit: Kit, path: str, mode: str, draft: str) -> None:
    pieces = kit.call(path, kit.router(EVERYTHING, mode=mode))
    record = _record(pieces)
    assert text_of(pieces) == draft
    assert record["action"] == "answer"
    assert record["threshold"] == (None if mode == "observe" else 1e308)
    assert record["enforced"] == (mode != "annotate")
    kit.assert_closed()


@pairwise(kit=KINDS, path=PATHS, mode=["annotate", "raise"], indirect=["kit", "path"])
def test_a_foreign_calibration_is_refused(kit: Kit, path: str, mode: str) -> None:
    with pytest.raises(BindingMismatchError):
        kit.call(path, kit.router(policy_for_another_model(), mode=mode))
    kit.assert_closed()


def test_sequences_have_no_version_3(chat: ChatSemGrad) -> None:
    """If LangChain implements it, the matrix above must run it through chains too."""
    chain = PROMPT | UncertaintyRouter(chat, NOTHING)
    with pytest.raises(NotImplementedError):
        list(chain.stream_events({"question": QUESTION}, version="v3"))
    with pytest.raises(NotImplementedError):
        asyncio.run(_await(chain.astream_events({"question": QUESTION}, version="v3")))


async def _await(awaitable: Any) -> Any:
    return await awaitable
