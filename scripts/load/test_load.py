"""`semgrad-guard serve` with clients at its limit, killed, and ended: observed from outside, as its users would.

MINUTES and KILLS in the environment say how long. Why: docs/decisions.md#0151
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, serving

from semgrad_guard import Calibration, Guard, LanguageModel, Policy
from semgrad_guard.decision_log.database import Database
from semgrad_guard.pocket import CALIBRATION_PATH, QUESTIONS_PATH
from semgrad_guard.server.assembly import ROWS

MINUTES, KILLS = float(os.environ.get("MINUTES", "10")), int(os.environ.get("KILLS", "20"))
CLIENTS, QUEUE, QUESTIONS = 64, 32, 100
GROWTH = 0.05  # of memory, from the first fifth of a run to its last
ROUNDING = 2e-3  # of an uncertainty in float32: other rows of a batch add in another order
ID = re.compile(r"dec_[0-9a-f]{24}")
Json = dict[str, Any]


class Clients:
    """Clients that send one question after the other, and what they got."""

    def __init__(self, url: str) -> None:
        self.url, self.ended = url, False
        self.statuses, self.ids = Counter[int](), list[str]()
        self.wrong, self.differences = list[str](), list[float]()

    async def ask(self, http: httpx.AsyncClient, question: str, **more: Any) -> tuple[int, str]:
        """The status, 0 for a connection that broke, and what came of the body; its decisions are noted."""
        body = {"model": "pocket", "messages": [{"role": "user", "content": question}], **more}
        status, received = 0, bytearray()
        try:
            async with http.stream("POST", "/chat/completions", json=body) as response:
                found, status = ID.findall(str(response.headers)), response.status_code
                async for piece in response.aiter_bytes():
                    received += piece
        except httpx.TransportError:
            found = ID.findall(received.decode(errors="replace"))
            self.ids += set(found)
            self.statuses[0] += 1
            return 0, ""
        text = received.decode()
        self.ids += {*found, *ID.findall(text)}
        self.statuses[status] += 1
        return status, text

    async def client(self, number: int, expected: Mapping[str, tuple[str, str, float | None]]) -> None:
        """Ask until the end; one in ten leaves its streams in the middle, the others compare what they get."""
        draw = random.Random(number)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits, trust_env=False) as http:
            for turn in count():
                if self.ended:
                    return
                question = draw.choice(list(expected))
                asking = self.ask(http, question, stream=turn % 2 == 0)
                if number % 10 == 0 and turn % 2 == 0:
                    try:
                        await asyncio.wait_for(asking, draw.random() / 5)
                    except TimeoutError:
                        continue
                status, text = await asking if number % 10 or turn % 2 else (0, "")
                if status == 200:
                    self._compare(question, text, *expected[question])
                elif status == 429:
                    await asyncio.sleep(draw.random())
                elif status == 0 and number % 10:
                    return

    def _compare(self, question: str, body: str, text: str, action: str, uncertainty: float | None) -> None:
        found, record = answer(body)
        if (found, record["action"]) != (text, action):
            self.wrong.append(f"{question}: {found!r}, {record['action']}, and not {text!r}, {action}")
        elif action == "answer" and uncertainty is not None:
            self.differences.append(abs(record["uncertainty"] - uncertainty) / uncertainty)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is so, two minutes at most."""
        for _ in range(2400):
            if await asyncio.to_thread(holds):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"it did not happen; so far: {self.statuses}")


def answer(body: str) -> tuple[str, Json]:
    """The text and the verdict of a response, streamed or not."""
    whole = not body.startswith("data: ")
    parts = [body] if whole else [line[6:] for line in body.split("\n\n") if line.startswith("data: {")]
    text, record = "", Json()
    for choice in (choice for part in map(json.loads, parts) for choice in part["choices"]):
        message = choice.get("message") or choice.get("delta") or {}
        text += message.get("content") or ""
        record = (choice["logprobs"] or {}).get("semgrad_guard") or record
    return text, record


@asynccontextmanager
async def loaded(
    server: Server, clients: int, expected: Mapping[str, tuple[str, str, float | None]]
) -> AsyncGenerator[Clients]:
    """So many clients, as long as this lasts."""
    crowd = Clients(server.url)
    tasks = [asyncio.ensure_future(crowd.client(number, expected)) for number in range(1, clients + 1)]
    try:
        yield crowd
    finally:
        crowd.ended = True
        await asyncio.gather(*tasks)


def logged(folder: Path) -> set[str]:
    """The decisions in the log."""
    database = Database(folder / "log.db")
    try:
        return {decision.id for decision, _ in database.decisions()}
    finally:
        database.close()


@pytest.fixture(scope="module")
def expected() -> Mapping[str, tuple[str, str, float | None]]:
    """Questions of the embedded model's world, and what one process answers to each."""
    lines = QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()
    guard = Guard(LanguageModel.from_pretrained("pocket"), Policy.from_calibration(Calibration.load(CALIBRATION_PATH)))
    questions = [json.loads(line)["question"] for line in lines[:: len(lines) // QUESTIONS][:QUESTIONS]]
    verdicts = ((question, guard(question)) for question in questions)
    return {question: (verdict.text, verdict.action, verdict.uncertainty) for question, verdict in verdicts}


async def test_clients_at_the_limit(
    tmp_path: Path, expected: Mapping[str, tuple[str, str, float | None]], record_property: Callable[[str, Any], None]
) -> None:
    """No answer is lost, mixed up or given twice; memory is flat, and the queue bounded."""
    with serving(tmp_path, "--queue", QUEUE) as server:
        async with loaded(server, CLIENTS, expected) as crowd:
            held, deepest, ends = list[int](), 0.0, time.monotonic() + 60 * MINUTES
            while time.monotonic() < ends:
                deepest = max(deepest, await asyncio.to_thread(server.metric, "semgrad_guard_queue_depth"))
                held.append(server.resident)
                await asyncio.sleep(1)
    warm = held[min(60, len(held) // 4) :]
    fifth = max(1, len(warm) // 5)
    growth = sum(warm[-fifth:]) / sum(warm[:fifth]) - 1
    worst, answers = max(crowd.differences), len(crowd.differences)
    print(f"\n{dict(crowd.statuses)}, {answers} scores, worst {worst:.1e}, {deepest:g} waited, {growth:+.1%} of memory")
    assert not crowd.wrong
    assert worst <= ROUNDING
    assert len(set(crowd.ids)) == len(crowd.ids), "two answers carry the same decision"
    assert set(crowd.ids) <= logged(tmp_path)
    assert set(crowd.statuses) == {200, 429}
    assert deepest <= QUEUE
    assert growth <= GROWTH


async def test_no_acknowledged_decision_is_lost_when_it_is_killed(
    tmp_path: Path, expected: Mapping[str, tuple[str, str, float | None]]
) -> None:
    acknowledged, draw = set[str](), random.Random(0)
    for _ in range(KILLS):
        with serving(tmp_path) as server:
            async with loaded(server, 16, expected) as crowd:
                aim = draw.randint(1, 60)
                await crowd.until(lambda crowd=crowd, aim=aim: len(crowd.ids) >= aim)
                server.process.kill()
                server.process.wait(60)
        acknowledged |= set(crowd.ids)
    with serving(tmp_path):  # imports the last one's entries
        pass
    print(f"\n{KILLS} kills, {len(acknowledged)} acknowledged decisions")
    assert acknowledged <= logged(tmp_path)


async def test_sigterm_answers_what_was_accepted(tmp_path: Path) -> None:
    waiting = 24
    with serving(tmp_path, "--max-tokens", "200") as server:
        crowd = Clients(server.url)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as http:
            requests = (crowd.ask(http, f"question {n}", stream=n % 2 == 0) for n in range(ROWS + waiting))
            tasks = [asyncio.ensure_future(one) for one in requests]
            await crowd.until(lambda: server.metric("semgrad_guard_requests_total") >= 0 and len(tasks) > 0)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.end)
            replies = await asyncio.gather(*tasks)
    assert all(status == 200 or "shutting_down" in text for status, text in replies)
    assert set(crowd.ids) <= logged(tmp_path)
