"""A server that judges by sentence: a withheld sentence is in no response, stream or log, and cuts come afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard import Answerer
from semgrad_guard.server.assembly import assemble
from semgrad_guard.server.gate import Keys
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.server_settings import ServerSettings
from tests.fixed_model import PIECES, TEXT, FixedModel

from .conftest import ALL, Serve, asking, events, text_in
from .others import Other, behind

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def fixed(language_model: LanguageModel) -> LanguageModel:
    return FixedModel.like(language_model)


def scores_of(model: LanguageModel) -> list[float]:
    verdict = Guard(model, ALL, by="sentence", options=GenerationOptions(max_tokens=64))("hello")
    assert verdict.text == TEXT
    return [sentence.uncertainty or 0.0 for sentence in verdict.sentences]


def surest(model: LanguageModel) -> tuple[Policy, int]:
    """A policy that lets one sentence through, and which one."""
    own = scores_of(model)
    return Policy(threshold=min(own) * 1.001), own.index(min(own))


def given_to(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_part_is_delivered_everywhere(serve: Serve, fixed: LanguageModel, tmp_path: Path) -> None:
    policy, kept = surest(fixed)
    with DecisionLog(tmp_path / "log.db", text=True) as log:
        async with serve(policy, model=fixed, by_sentence="drop", service={"log": log}) as client:
            whole = given_to(await client.post(CHAT, json=asking(logprobs=True, top_logprobs=2)))
            both = given_to(await client.post(CHAT, json=asking(n=2)))
            stream = await client.post(CHAT, json=asking(stream=True, stream_options={"include_usage": True}))
            listed = (await client.get("/v1/decisions")).text
            partly = [row["partly_withheld"] for row in (await client.get("/v1/decisions")).json()["data"]]
            metrics = (await client.get("/metrics")).text
        log.flush()
        seen = repr(log.database.decisions(limit=10))
    choice, record = whole["choices"][0], whole["semgrad_guard"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (PIECES[kept], "stop")
    around = {
        0: ["deliver", "drop"],
        1: ["drop", "deliver", "drop"],
        2: ["drop", "deliver"],
    }  # not how many are dropped
    assert [sentence["action"] for sentence in record["sentences"]] == around[kept]
    assert (record["action"], record["uncertainty"], choice["logprobs"]["content"]) == ("answer", None, None)
    own = record["sentences"][around[kept].index("deliver")]
    assert (own["start"], own["end"], own["uncertainty"]) == (
        0,
        len(PIECES[kept]),
        pytest.approx((policy.threshold or 0) / 1.001),
    )
    assert whole["usage"]["completion_tokens"] == own["tokens"] == record["details"]["scored_tokens"]
    for sentence in record["sentences"]:
        known = [sentence[name] for name in ("uncertainty", "compared", "scores", "tokens")]
        assert (known == [None, None, {}, 0]) == (sentence["action"] == "drop")
    assert [one["message"]["content"] for one in both["choices"]] == [PIECES[kept]] * 2
    chunks = events(stream.text)
    content = text_in(chunks)
    assert content == PIECES[kept]
    others = [piece.split()[0] for number, piece in enumerate(PIECES) if number != kept]
    for text in (json.dumps(whole), stream.text, listed, seen):
        assert not [word for word in others if word in text]
    assert f"{max(scores_of(fixed))}" not in listed
    assert (partly, "semgrad_guard_uncertainty_count{" in metrics) == ([True] * 4, False)


async def streamed(client: httpx.AsyncClient, **options: Any) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """The pieces of a stream, the verdicts that came with them, and the record."""
    chunks = events((await client.post(CHAT, json=asking(stream=True, **options))).text)
    deltas = [one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"]]
    sentences = [chunk["semgrad_guard_sentence"] for chunk in chunks if "semgrad_guard_sentence" in chunk]
    return [text for text in deltas if text], sentences, chunks[-1]["semgrad_guard"]


async def test_sentences_leave_while_the_answer_is_being_written(serve: Serve, fixed: LanguageModel) -> None:
    async with serve(ALL, model=fixed, by_sentence="stop") as client:
        pieces, sentences, record = await streamed(client)
        assert (pieces, len(sentences)) == (list(PIECES), 3)  # the last one ends with the answer
        assert sentences == [{**one, "promised": False} for one in record["sentences"]]
        for options in ({"max_tokens": 60}, {"stop": ["zzz"]}, {"logprobs": True, "top_logprobs": 2}):
            assert (await streamed(client, **options))[:2] == (pieces, sentences)
        assert (await streamed(client, n=2))[0] == [*PIECES, *PIECES]
    own = scores_of(fixed)
    between = sorted(own)[0] * 1.001
    async with serve(Policy(threshold=between), model=fixed, by_sentence="drop") as client:
        pieces, sentences, record = await streamed(client)
        whole = given_to(await client.post(CHAT, json=asking()))["choices"][0]["message"]["content"]
    assert "".join(pieces) == whole == PIECES[own.index(min(own))]
    assert [one["action"] for one in record["sentences"]].count("deliver") == 1


async def test_whole_answers_are_refused(serve: Serve, fixed: LanguageModel) -> None:
    async with serve(ALL, model=fixed, by_sentence="drop") as client:
        response = await client.post(CHAT, json=asking(response_format={"type": "json_object"}))
    assert (response.status_code, "a part of a JSON answer" in response.text) == (400, True)


async def test_a_part_of_another_servers_answer(serve: Serve, fixed: LanguageModel) -> None:
    """Its fields are about the whole answer, and stay here."""
    other = Other(TEXT, usage={"prompt_tokens": 3, "completion_tokens": 9}, annotations=["Milk"], matched_stop="Milk")
    scorer = Scheduler(Answerer(fixed, HybridGrad(), served=True, by_sentence="drop"))
    given = {**behind(other, scorer), "by_sentence": "drop"}
    async with serve(ALL, mode="annotate", **given) as client:
        first = given_to(await client.post(CHAT, json=asking()))
    own = [sentence["uncertainty"] for sentence in first["semgrad_guard"]["sentences"]]
    kept, policy = own.index(min(own)), Policy(threshold=min(own) * 1.001)
    others = [piece.split()[0] for number, piece in enumerate(PIECES) if number != kept]
    async with serve(policy, **given) as client:
        for more in ({}, {"stop": ["zzz"]}, {"stream": True}):
            response = await client.post(CHAT, json=asking(**more))
            assert PIECES[kept].strip() in response.text
            assert not [word for word in others if word in response.text]


def test_settings_follow_a_calibration(fixed: LanguageModel, tmp_path: Path, checkpoint: Path) -> None:
    options = GenerationOptions(max_tokens=4, seed=0)
    model = LanguageModel.from_pretrained(str(checkpoint))
    base = Guard(model, ALL, by="sentence", on_doubt="drop", options=options)
    answers = [AnswerSentences(f"q{number}", TEXT, [0.1, 0.2, 0.3], (True,) * 3, [None] * 3) for number in range(99)]
    forms = [model.render("q").form] * len(answers)
    made = calibrate_sentences(
        answers, on_doubt="drop", alpha=0.2, delta=0.2, binding=base.binding, prompts=forms, copies="keep"
    )
    made.save(tmp_path / "c.json")
    given = {"model": str(checkpoint), "calibration": str(tmp_path / "c.json"), "max_tokens": 4, "no_log": True}

    def start(**changes: Any) -> Any:
        return assemble(ServerSettings(**{**given, **changes}), keys=Keys(), hosts=None).service

    for changes in ({}, {"by": "sentence"}, {"on_doubt": "drop"}):
        service = start(**changes)
        [served] = service.models.values()
        assert served.described(0)["semgrad_guard"]["on_doubt"] == "drop"
        service.close()
    for changes in ({"by": "answer"}, {"on_doubt": "stop"}):
        with pytest.raises(BindingMismatchError, match="judged as"):
            start(**changes)
