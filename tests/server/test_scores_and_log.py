"""Scores of given texts, the log of decisions, feedback on them, and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from semgrad_guard import LanguageModel, calibrate
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.guard import escalated, external, unscored
from tests.decision_log.test_feedback import decision

from .conftest import ALL, NONE, OPTIONS, Serve, asking, events

CHAT = "/v1/chat/completions"


async def test_a_text_is_scored(serve: Serve, language_model: LanguageModel) -> None:
    text = "A town. It is old."
    body = {"messages": [{"role": "user", "content": "What is it?"}], "text": text}
    async with serve(NONE) as client:  # who could try texts could try guesses at a withheld answer
        response = await client.post("/v1/score", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "score_not_allowed")
        assert (await client.get("/v1/models/tiny")).json()["semgrad_guard"]["scores_texts"] is False
    async with serve(NONE, scores_texts=True) as client:
        whole = (await client.post("/v1/score", json=body)).json()
        assert whole["semgrad_guard"]["uncertainty"] == language_model.score("What is it?", text).hybridgrad
        assert (whole["semgrad_guard"]["action"], whole["semgrad_guard"]["details"]["enforced"]) == ("abstain", False)
        assert "segments" not in whole
        parts = (await client.post("/v1/score", json={**body, "by": "sentence", "model": "tiny"})).json()["segments"]
        expected = language_model.segments("What is it?", text)
        assert [part["text"] for part in parts] == ["A town. ", "It is old."]
        assert [part["uncertainty"] for part in parts] == [generation.scores.hybridgrad for generation in expected]
        for changes, status in (({"text": ""}, 400), ({"model": "x"}, 404), ({"by": "word"}, 400), ({"more": 1}, 400)):
            assert (await client.post("/v1/score", json={**body, **changes})).status_code == status
        blank = (await client.post("/v1/score", json={**body, "text": " \n", "by": "sentence"})).json()
        assert blank["semgrad_guard"]["status"] == "unscored"


async def test_decisions_and_feedback(serve: Serve, tmp_path: Path, language_model: LanguageModel) -> None:
    draft = language_model.generate("the question", OPTIONS).text
    log = DecisionLog(tmp_path / "log.db")
    async with serve(NONE, service={"log": log}) as client:
        response = await client.post(CHAT, json=asking("the question"))
        first = response.json()["semgrad_guard"]["decision_id"]
        assert response.headers["x-semgrad-guard-decision-id"] == first
        streamed = events((await client.post(CHAT, json=asking("the question", stream=True))).text)
        second = streamed[-1]["semgrad_guard"]["decision_id"]
        several = (await client.post(CHAT, json=asking("the question", n=2))).json()["semgrad_guard"]
        given = {"decision_id": first, "right": False}
        assert (await client.post("/v1/feedback", json=given)).json()["decision_id"] == first
        missing = await client.post("/v1/feedback", json={**given, "decision_id": "dec_no"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "decision_not_found")
        listed = await client.get("/v1/decisions")
        rows = {row["id"]: row for row in listed.json()["data"]}
        assert set(rows) == {first, second, *(record["decision_id"] for record in several)}
        assert (rows[first]["action"], rows[first]["served"], rows[first]["tokens"]) == ("abstain", "tiny", None)
        assert rows[first]["feedback"]["right"] is False
        assert f"chatcmpl-{rows[first]['request_id']}" == response.json()["id"]
        assert draft not in listed.text
        assert "the question" not in listed.text
        page = (await client.get("/v1/decisions", params={"limit": 3})).json()
        rest = (await client.get("/v1/decisions", params={"limit": 3, "after": page["data"][-1]["id"]})).json()
        assert [len(page["data"]), page["has_more"], len(rest["data"]), rest["has_more"]] == [3, True, 1, False]
        assert (await client.get("/v1/decisions", params={"action": "answer"})).json()["data"] == []
        for bad in ({"limit": 0}, {"since": "yesterday"}, {"action": "x"}, {"more": 1}):
            assert (await client.get("/v1/decisions", params=bad)).status_code == 400
        gone = await client.get("/v1/decisions", params={"after": "dec_deleted"})  # no empty last page
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "after")
        client.service.close()
    assert draft.encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


async def test_an_answer_without_a_log_has_no_id(serve: Serve) -> None:
    async with serve(ALL) as client:
        assert (await client.post(CHAT, json=asking())).json()["semgrad_guard"]["decision_id"] is None
        assert (await client.get("/v1/decisions")).status_code == 404
        given = {"decision_id": "dec", "right": True}
        assert (await client.post("/v1/feedback", json=given)).status_code == 404


async def test_an_error_in_the_answers_place_is_a_decision_too(serve: Serve, tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        async with serve(NONE, mode="raise", service={"log": log}) as client:
            response = await client.post(CHAT, json=asking())
            assert response.status_code == 422
            decision_id = response.headers["x-semgrad-guard-decision-id"]
        assert log.flush()
        assert [decision.id for decision, _ in log.database.decisions()] == [decision_id]


async def test_metrics_and_health(serve: Serve, tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        async with serve(ALL, service={"log": log}) as client:
            with_usage = {"stream": True, "stream_options": {"include_usage": True}}
            bodies = [asking(f"q {i}", **(with_usage if i % 2 else {})) for i in range(4)]
            sent = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
            last = [events(found.text)[-1] if number % 2 else found.json() for number, found in enumerate(sent)]
            used = [found["usage"] for found in last]
            read, written = (sum(one[f"{kind}_tokens"] for one in used) for kind in ("prompt", "completion"))
            text = (await client.get("/metrics")).text
            for line in (
                'semgrad_guard_requests_total{action="answer",model="tiny"} 4.0',
                'semgrad_guard_uncertainty_count{model="tiny"} 4.0',
                'semgrad_guard_score_seconds_count{model="tiny"} 4.0',
                'semgrad_guard_queue_depth{model="tiny"} 0.0',
                "semgrad_guard_log_failures_total 0.0",
                'semgrad_guard_request_seconds_count{model="tiny"} 4.0',
                'semgrad_guard_requests_in_flight{model="tiny"} 0.0',
                f'semgrad_guard_tokens_total{{kind="prompt",model="tiny"}} {float(read)}',
                f'semgrad_guard_tokens_total{{kind="completion",model="tiny"}} {float(written)}',
                "semgrad_guard_build_info{",
            ):
                assert line in text, line
            assert (await client.get("/healthz")).json() == {"status": "ok"}
            assert [(await client.head(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]
            assert (await client.get("/readyz")).json() == {"status": "ready", "models": ["tiny"]}


async def test_the_drift_gauge_is_the_monitors_own(serve: Serve) -> None:
    """Whatever the order in which verdicts arrive, and before there is one."""
    monitor = DriftMonitor(calibrate([0.1 + 1e-3 * n for n in range(60)], [True] * 60, alpha=0.5, delta=0.5))
    async with serve(ALL, monitor=monitor) as client:
        gauge = 'semgrad_guard_drift{model="tiny"}'
        assert f"{gauge} 0.0" in (await client.get("/metrics")).text
        for _ in range(30):
            monitor.add(9.0)
        assert f"{gauge} 1.0" in (await client.get("/metrics")).text
        monitor.reset()
        assert f"{gauge} 0.0" in (await client.get("/metrics")).text


async def test_drift_is_the_operators_to_know(serve: Serve, tmp_path: Path) -> None:
    """It is about the scores of all answers, those of withheld ones too: no client finds it in a record or a row."""
    drifts = list[tuple[Any, Any, bool | None]]()
    for score in (0.12, 9.0):
        monitor = DriftMonitor(calibrate([0.1 + 1e-3 * n for n in range(60)], [True] * 60, alpha=0.5, delta=0.5))
        for _ in range(30):
            monitor.add(score)
        with DecisionLog(tmp_path / f"{score}.db") as log:
            async with serve(ALL, monitor=monitor, service={"log": log}) as client:
                record = (await client.post("/v1/chat/completions", json=asking())).json()["semgrad_guard"]
                (row,) = (await client.get("/v1/decisions")).json()["data"]
            ((decision, _),) = log.database.decisions()
        drifts.append((record["details"]["drift"], row.get("drift"), decision.drift))
    assert [found[:2] for found in drifts] == [(None, None)] * 2
    assert drifts[1][2]


async def test_what_is_delivered_counts_as_delivered(serve: Serve, tmp_path: Path) -> None:
    """Whatever the advice: in the metrics, the summary, the list and its filter, and the header."""
    with DecisionLog(tmp_path / "log.db") as log:
        async with serve(NONE, mode="annotate", service={"log": log}) as client:
            response = await client.post(CHAT, json=asking())
            headers = response.headers
            assert (headers["x-semgrad-guard-action"], headers["x-semgrad-guard-enforced"]) == ("abstain", "false")
            text = (await client.get("/metrics")).text
            assert 'semgrad_guard_requests_total{action="answer",model="tiny"} 1.0' in text
            assert 'semgrad_guard_flagged_total{model="tiny"} 1.0' in text
            assert 'action="abstain"' not in text
            listed = (await client.get("/v1/decisions", params={"action": "answer"})).json()["data"]
            assert [(row["action"], row["enforced"], row["delivery"]) for row in listed] == [
                ("abstain", False, "answer")
            ]
            for action in ("abstain", "escalate"):
                assert (await client.get("/v1/decisions", params={"action": action})).json()["data"] == []
    async with serve(NONE, mode="enforce") as client:
        assert "x-semgrad-guard-enforced" not in (await client.post(CHAT, json=asking())).headers
        text = (await client.get("/metrics")).text
        assert 'semgrad_guard_requests_total{action="abstain",model="tiny"} 1.0' in text
        assert "# TYPE semgrad_guard_log_failures_total counter" in text


async def test_savings_are_told_by_blocks_of_requests(serve: Serve, tmp_path: Path) -> None:
    """By the route that the page shows, and by the metrics; no scrape tells of one draft."""
    here = {"prompt_tokens": 9, "draft_tokens": 5, "seconds": 1.0}
    with DecisionLog(tmp_path / "log.db") as log:
        log.database.add([decision(n, "answer", **here) for n in range(25)] + [decision(99, "escalate", **here)])
        async with serve(NONE, service={"log": log}) as client:
            found = (await client.get("/v1/savings", params={"since": "2025-01-01"})).json()
            assert (await client.get("/v1/savings", params={"since": "soon"})).status_code == 400
            metrics = client.service.metrics
            for number in range(39):
                draft = unscored("x", reason="", scored_tokens=3)
                metrics.decided("tiny", escalated(draft, external("y", answer_tokens=7)))
                text = (await client.get("/metrics")).text
                drafts = 'semgrad_guard_draft_tokens_total{model="tiny"}'
                assert (f"{drafts} 60.0" in text) == (number >= 19)
                assert (drafts in text) == (number >= 19)
            assert 'semgrad_guard_target_tokens_total{kind="completion",model="tiny"} 273.0' in text
    assert found["sums"]["answer"]["prompt_tokens"] == 180
    assert found["words"][0].startswith("Of 26 requests 25 (96%) were answered here, 1 (4%) escalated")
    assert "of 20 answered here: 180 prompt and 100 answer tokens" in found["words"][1]
