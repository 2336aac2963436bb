"""LiteLLM's generic guardrail API, in the shapes that its hooks send (litellm 1.106): nothing of a draft comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from semgrad_guard import Calibration, GenerationOptions, LanguageModel, Policy
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.records import Message
from semgrad_guard.server.app import make_app
from semgrad_guard.server.gateway import Conversation, Conversations, GuardrailRequest
from semgrad_guard.server.service import Service
from tests.thinking import ANSWERS, thinking_model, written

from .conftest import ALL, NONE, Serve

PATH = "/beta/litellm_basic_guardrail_api"
DRAFT = "an answer of the gateway's model"
USER = {"role": "user", "content": "hello", "cache_control": None}


def sent(kind: str, **more: Any) -> dict[str, Any]:
    """A request with every field that LiteLLM's hook writes, None included."""
    empty = ("litellm_trace_id", "structured_messages", "images", "tools", "tool_calls", "model", "litellm_call_id")
    return {
        **dict.fromkeys(empty),
        "input_type": kind,
        "texts": [],
        "request_data": {"user_api_key_alias": "a"},
        "request_headers": {"authorization": "[present]"},
        "litellm_version": "1.106.2",
        "additional_provider_specific_params": {"threshold": 1e9, "model": "x"},
        "a_field_of_tomorrow": 1,
        **more,
    }


def before(call_id: str = "c", **more: Any) -> dict[str, Any]:
    return sent("request", texts=["hello"], **{"structured_messages": [USER], "litellm_call_id": call_id, **more})


def after(call_id: str | None = "c", *texts: str, **more: Any) -> dict[str, Any]:
    return sent("response", texts=list(texts or (DRAFT,)), litellm_call_id=call_id, model="gpt-4", **more)


async def test_an_answer_is_judged_with_its_conversation(serve: Serve, language_model: LanguageModel) -> None:
    expected = language_model.score([Message("user", "hello")], DRAFT).hybridgrad
    async with serve(ALL) as client:  # a gateway needs no scores, and who has its key could try guesses by them
        found = (await client.post(PATH, json=after("other", structured_messages=[USER]))).json()
        assert (found["action"], found["semgrad_guard"][0]["uncertainty"]) == ("NONE", None)
    async with serve(ALL, scores_texts=True) as client:
        assert (await client.post(PATH, json=before())).json() == {"action": "NONE"}
        found = (await client.post(PATH, json=after())).json()
        assert found["action"] == "NONE"
        (record,) = found["semgrad_guard"]
        assert record["uncertainty"] == pytest.approx(expected, rel=1e-6)
        assert found["stream_holdback_chars"] == [len(DRAFT)]
        assert "texts" not in found
        again = (await client.post(PATH, json=after("other", structured_messages=[USER]))).json()
        assert again["semgrad_guard"][0]["uncertainty"] == pytest.approx(expected, rel=1e-6)
        many = (await client.post(PATH, json=after("c", DRAFT, "another"))).json()
        assert len({record["uncertainty"] for record in many["semgrad_guard"]}) == 2


@pytest.mark.parametrize("mode", ["enforce", "raise"])
async def test_a_withheld_answer_is_blocked_and_leaves_nothing_behind(serve: Serve, tmp_path: Path, mode: str) -> None:
    with DecisionLog(tmp_path / "log.db", text=True) as log:
        async with serve(NONE, mode=mode, service={"log": log}) as client:
            await client.post(PATH, json=before())
            response = await client.post(PATH, json=after())
            found = response.json()
            (listed,) = (await client.get("/v1/decisions")).json()["data"]
            metrics = (await client.get("/metrics")).text
    assert (response.status_code, found["action"]) == (200, "BLOCKED")
    assert set(found) == {"action", "blocked_reason", "semgrad_guard"}
    assert "is not let through" in found["blocked_reason"]
    assert found["semgrad_guard"][0]["decision_id"] in found["blocked_reason"]
    assert (listed["action"], listed["request_id"], listed["question"]) == ("abstain", "c", "hello")
    assert 'semgrad_guard_requests_total{action="abstain",model="tiny"} 1.0' in metrics
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for place in (response.text, str(response.headers), json.dumps(listed), metrics, kept.decode("latin-1")):
        assert not [word for word in (DRAFT, "gateway's model") if word in place]
    assert (found["semgrad_guard"][0]["scored_tokens"], found["semgrad_guard"][0]["gnll"]) == (0, None)


async def test_one_withheld_answer_blocks_all_of_a_call(serve: Serve) -> None:
    async with serve(ALL, scores_texts=True) as client:
        await client.post(PATH, json=before())
        scores = (await client.post(PATH, json=after("c", DRAFT, "b"))).json()["semgrad_guard"]
    between = sum(score["uncertainty"] for score in scores) / 2
    async with serve(Policy(threshold=between)) as client:
        await client.post(PATH, json=before())
        found = (await client.post(PATH, json=after("c", DRAFT, "b"))).json()
    assert found["action"] == "BLOCKED"
    assert {record["action"] for record in found["semgrad_guard"]} == {"answer", "abstain"}


async def test_advice_blocks_nothing(serve: Serve) -> None:
    async with serve(NONE, mode="annotate") as client:
        await client.post(PATH, json=before())
        found = (await client.post(PATH, json=after())).json()
    assert (found["action"], "stream_holdback_chars" in found) == ("NONE", False)
    assert found["semgrad_guard"][0]["action"] == "abstain"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
PICTURE = {"role": "user", "content": [{"type": "image_url"}]}
UNSCORED = [
    ("no conversation", None, after(), "pre_call, post_call"),
    ("no call id", before(), after(None), "pre_call, post_call"),
    ("texts alone", before(structured_messages=None), after(), "pre_call, post_call"),
    ("a picture asked", before(structured_messages=[PICTURE]), after(), "no text"),
    ("a turn of nobody", before(structured_messages=[{"role": "robot", "content": "x"}]), after(), "cannot be read"),
    ("a call", before(), sent("response", tool_calls=[CALL], litellm_call_id="c"), "a tool call from elsewhere"),
    ("an image", before(), sent("response", images=["data:"], litellm_call_id="c"), "an image from elsewhere"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "then", "why"), [case[1:] for case in UNSCORED], ids=[case[0] for case in UNSCORED])
async def test_what_has_no_score_is_the_operators_to_decide(serve: Serve, first: Any, then: Any, why: str) -> None:
    for policy, action in ((ALL, "BLOCKED"), (Policy(threshold=0, on_unscored="answer"), "NONE")):
        async with serve(policy) as client:
            if first is not None:
                assert (await client.post(PATH, json=first)).json() == {"action": "NONE"}
            found = (await client.post(PATH, json=then)).json()
        assert (found["action"], found["semgrad_guard"][0]["status"]) == (action, "unscored")
        reason = found["semgrad_guard"][0]["reason"] if action == "NONE" else found["blocked_reason"]
        if action == "BLOCKED" and "elsewhere" in why:  # its client is not told that there was a call
            assert reason == "the answer is not let through"
        else:
            assert why in reason


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"reasoning_content": "It is Paris."}, True),
        ({"thinking_blocks": [{"thinking": "It is Paris."}]}, False),
        ({"texts": [written(next(iter(ANSWERS)))]}, True),
    ],
    ids=["told", "blocks", "raw"],
)
async def test_an_answer_is_scored_given_its_reasoning(serve: Serve, fields: dict[str, Any], known: bool) -> None:
    withheld = Policy(threshold=-1.0) if known else ALL
    for policy, action in ((withheld, "BLOCKED"), (Policy(threshold=1e9, on_unscored="answer"), "NONE")):
        async with serve(policy, model=thinking_model()) as client:
            await client.post(PATH, json=before())
            found = (await client.post(PATH, json={**after(), **fields})).json()
        (record,) = found["semgrad_guard"]
        assert found["action"] == action
        if action == "NONE":  # of a withheld answer nothing is revealed
            assert (record["status"], "reasoning" in (record["reason"] or "")) == (
                "scored" if known else "unscored",
                not known,
            )


async def test_two_conversations_under_one_id_judge_nothing(serve: Serve) -> None:
    """A client may choose its call id, and must not lend an answer a question that it is sure of."""
    other = [{"role": "user", "content": f"Say: {DRAFT}"}]
    async with serve(ALL) as client:
        for rows in ([USER], [USER], other, [USER]):
            await client.post(PATH, json=before(structured_messages=rows))
        found = (await client.post(PATH, json=after())).json()
    assert (found["action"], found["semgrad_guard"][0]["status"]) == ("BLOCKED", "unscored")
    assert "two conversations" in found["blocked_reason"]


async def test_its_key_comes_as_litellm_sends_it(serve: Serve) -> None:
    from semgrad_guard.server.gate import Keys

    async with serve(ALL, app={"keys": Keys(["a-key-of-sixteen-letters"])}) as client:
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "another-key-of-letters"}, 401),
            ({"x-api-key": "a-key-of-sixteen-letters"}, 200),
            ({"x-api-key": "a-key-of-sixteen-letters", "authorization": "Bearer wrong"}, 401),
            ({"authorization": "Bearer a-key-of-sixteen-letters"}, 200),
        ):
            assert (await client.post(PATH, json=before(), headers=headers)).status_code == status


async def test_a_promise_about_a_models_own_answers_is_none_about_others(make_served: Any) -> None:
    """The embedded model by its shipped calibration: the same words are promised if it writes them, otherwise not."""
    policy, model = Policy.from_calibration(Calibration.load(CALIBRATION_PATH)), LanguageModel.from_pretrained("pocket")
    options = GenerationOptions(max_tokens=16)
    app = make_app(Service([make_served(policy, model=model, name="pocket", options=options, scores_texts=True)]))
    rows = [{"role": "user", "content": "What is the capital of Japan?"}]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        own = (await client.post("/v1/chat/completions", json={"model": "pocket", "messages": rows})).json()
        text = own["choices"][0]["message"]["content"]
        (record,) = (await client.post(PATH, json=after("c", text, structured_messages=rows))).json()["semgrad_guard"]
    assert (own["semgrad_guard"]["promised"], record["promised"]) == (True, False)
    assert record["uncertainty"] == pytest.approx(own["semgrad_guard"]["uncertainty"], rel=1e-3)
    assert record["unfamiliar"] == ["the answer was written elsewhere"]


async def test_several_models_are_told_apart_by_name(make_served: Any) -> None:
    app = make_app(Service([make_served(ALL, name="a"), make_served(NONE, name="b")]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        await client.post(PATH, json=before())
        for name, action in (("a", "NONE"), ("b", "BLOCKED")):
            assert (await client.post(PATH, json={**after(), "model": name})).json()["action"] == action
        assert (await client.post(PATH, json=after())).status_code == 404


def test_old_conversations_make_room() -> None:
    def conversation(text: str) -> Conversation:
        row = {"role": "user", "content": text}
        found = GuardrailRequest(input_type="request", structured_messages=[row]).conversation()
        assert found is not None
        return found

    kept = Conversations(most=3, characters=200)
    for number in range(5):
        kept.remember(str(number), conversation(str(number)))
    assert [kept.of(str(number)).question for number in range(5)] == [None, None, "2", "3", "4"]
    kept.remember("2", conversation("2"))  # again: it is the latest now
    kept.remember("5", conversation("x" * 60))
    assert [kept.of(key).question for key in ("3", "2")] == [None, "2"]
    kept.remember("6", conversation("x" * 1000))
    assert kept.of("6").reason is not None
