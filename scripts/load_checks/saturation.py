"""Clients at the limit, a tenth of them ill-meant: no answer is lost, mixed up or given twice, and nothing grows.

Why: docs/adr/0179-as-near-to-float64-as-single-processes.md
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from load_checks.clients import RUDE, Reply, ask, asking, connected
from load_checks.results import Check
from load_checks.servers import Server, serving
from semgrad_guard import Calibration, GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.decision_log.database import Database
from semgrad_guard.pocket import CALIBRATION_PATH, QUESTIONS_PATH

MODEL, QUESTIONS, QUEUE, TOLERANCE, GROWTH = "pocket", 100, 32, 1e-4, 0.05
COARSE = 1e-3
"""How far, relative to float64, a score in float32 may be off at most."""


@dataclass(frozen=True)
class Twin:
    """A single process's answer to a question; `exact` is the uncertainty in float64, 0 where there is none.

    `rounding` is how far, relative to float64, single processes are off in any of the questions.
    """

    question: str
    text: str
    action: str
    uncertainty: float | None
    exact: float = 0.0
    rounding: float = 0.0

    @property
    def off(self) -> float:
        """How far this single process is off, relative to float64; 0 where that is not known."""
        known = self.uncertainty is not None and self.exact
        return abs((self.uncertainty or 0.0) - self.exact) / self.exact if known else 0.0

    def differs(self, reply: Reply) -> str | None:
        """The difference of a server's answer, None where there is none. Of a withheld one nobody gets the score."""
        ((text, record),) = reply.choices
        found, delivered = record["uncertainty"], self.action == "answer"
        alike = text == self.text and record["action"] == self.action
        if alike and (self.has_score(found) if delivered else found is None):
            return None
        return f"{self.question!r}: {text!r}, {record['action']}, {found}, and not {self}"

    def has_score(self, found: float | None) -> bool:
        """Whether an uncertainty is this answer's.

        It is as near to the single process's as `TOLERANCE`; or it is as near to what float64 gives as single
        processes are: where float32 rounds coarsely, they are further off than `TOLERANCE` themselves.
        """
        return (found is None) == (self.uncertainty is None) and (self.is_near(found) or self.is_as_exact(found))

    def is_near(self, found: float | None) -> bool:
        """Whether an uncertainty is the single process's to within `TOLERANCE`; without one, it always is."""
        return (
            found is None or self.uncertainty is None or abs(found - self.uncertainty) <= TOLERANCE * self.uncertainty
        )

    def is_as_exact(self, found: float | None) -> bool:
        """Whether an uncertainty is no further from float64's than single processes are, which are off by little."""
        if found is None or self.uncertainty is None or not self.exact:
            return False
        bound = max(self.off, self.rounding)
        return self.off <= COARSE and abs(found - self.exact) <= min(bound, COARSE) * self.exact


def twins() -> list[Twin]:
    """Questions of the embedded model's world, spread over all of them, and one process's answer to each."""
    lines = QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()
    model, exact = LanguageModel.from_pretrained(MODEL), LanguageModel.from_pretrained(MODEL, dtype="float64")
    guard = Guard(model, Policy.from_calibration(Calibration.load(CALIBRATION_PATH)), options=GenerationOptions())
    found: list[Twin] = []
    for line in lines[:: max(1, len(lines) // QUESTIONS)][:QUESTIONS]:
        question = json.loads(line)["question"]
        verdict = guard(question)
        value = exact.score(question, model.generate(question).text).hybridgrad
        found.append(Twin(question, verdict.text, verdict.action, verdict.uncertainty, value or 0.0))
    rounding = max(twin.off for twin in found)
    return [replace(twin, rounding=rounding) for twin in found]


@dataclass(eq=False)
class Crowd:
    """All clients of one run, and their responses."""

    server: Server
    twins: Sequence[Twin]
    ends: float
    replies: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    ids: list[str] = field(default_factory=list[str])
    twin_of: dict[str, Twin] = field(default_factory=dict[str, Twin])
    nearer: int = 0
    resident: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    deepest: int = 0

    async def polite(self, number: int) -> None:
        """Send a question, read the answer, repeat; where the queue is full, retry after the given time."""
        draw = random.Random(number)
        async with connected(self.server.url) as client:
            while time.monotonic() < self.ends:
                twin = draw.choice(self.twins)
                reply = await ask(client, asking(MODEL, twin.question, stream=draw.random() < 0.5))
                self.replies[f"{reply.status}"] += 1
                if not reply.whole:
                    self.wrong.append(f"lost: {twin.question!r} with status {reply.status} ({reply.broken})")
                elif reply.status == 429 and "retry-after" in reply.headers:
                    await asyncio.sleep(draw.random() * int(reply.headers["retry-after"]))
                elif reply.status == 200 and reply.error is None:
                    self._compare(twin, reply)
                else:
                    self.wrong.append(f"status {reply.status}: {reply.text[-300:]}")

    def _compare(self, twin: Twin, reply: Reply) -> None:
        if difference := twin.differs(reply):
            self.wrong.append(f"mixed up: {difference}")
        elif not twin.is_near(reply.choices[0][1]["uncertainty"]):
            self.nearer += 1
        if len(reply.ids) != 1:
            self.wrong.append(f"one answer with the decisions {sorted(reply.ids)}")
        self.ids += reply.ids
        self.twin_of |= dict.fromkeys(reply.ids, twin)

    async def rude(self, number: int) -> None:
        """Mean it ill, in every way in turn."""
        draw, address = random.Random(-number), httpx.URL(self.server.url)
        ways = list(RUDE)
        while time.monotonic() < self.ends:
            number += 1
            way = ways[number % len(ways)]
            status = await way(address.host, address.port or 80, asking(MODEL, draw.choice(self.twins).question))
            self.replies[f"{way.__name__}: {status}"] += 1
            if status not in RUDE[way]:
                self.wrong.append(f"{way.__name__} got {status}")
            await asyncio.sleep(draw.random())

    async def watch(self) -> None:
        """Look at the server's memory and at the depth of its queue."""
        began = time.monotonic()
        while time.monotonic() < self.ends:
            found = await asyncio.to_thread(self.server.metrics)
            self.deepest = max(self.deepest, int(found["semgrad_guard_queue_depth"]))
            self.resident.append((time.monotonic() - began, self.server.resident))
            await asyncio.sleep(1)

    def growth(self, warm: float) -> float:
        """The mean memory of the last fifth next to that of the first fifth, once it is warm."""
        held = [value for at, value in self.resident if at >= warm]
        part = max(1, len(held) // 5)
        return sum(held[-part:]) / sum(held[:part]) - 1


async def saturated(folder: Path, *, minutes: float, clients: int) -> list[Check]:
    """Run the clients for so many minutes."""
    expected = await asyncio.to_thread(twins)
    with serving(folder, queue=QUEUE) as server:
        crowd = Crowd(server, expected, time.monotonic() + 60 * minutes)
        rude = clients // 10
        people = [crowd.rude(number) if number < rude else crowd.polite(number) for number in range(clients)]
        await asyncio.gather(crowd.watch(), *people)
        status, loud = server.end(), server.loud()
    warm = min(60.0, 15 * minutes)  # the first minute, or the first quarter of a short run
    return [_answers(crowd, folder, minutes, status, loud), _memory(crowd, warm), _queue(crowd)]


def _answers(crowd: Crowd, folder: Path, minutes: float, status: int, loud: list[str]) -> Check:
    problems = crowd.wrong + loud + ([f"the server ended with {status}"] if status else [])
    if len(set(crowd.ids)) != len(crowd.ids):
        problems.append("given twice: two answers carry the same decision")
    scores = logged(folder / "log.db")
    if lost := set(crowd.ids) - scores.keys():
        problems.append(f"{len(lost)} acknowledged decisions are not in the log")
    problems += [
        f"mixed up in the log: {scores[id]}, and not {twin}"
        for id, twin in crowd.twin_of.items()
        if id in scores and not twin.has_score(scores[id])
    ]
    figures = {"minutes": minutes, "answers": len(crowd.ids), "as near to float64 as single processes": crowd.nearer}
    figures["single processes against float64"] = f"{crowd.twins[0].rounding:.1e}"
    figures |= sorted(crowd.replies.items())
    return Check("no answer lost, mixed up or given twice", figures, problems)


def _memory(crowd: Crowd, warm: float) -> Check:
    growth = crowd.growth(warm)
    most = max(value for _, value in crowd.resident)
    figures = {"growth": f"{growth:+.2%}", "most_mb": round(most / 1e6), "looked": len(crowd.resident)}
    problems = [f"memory grew by {growth:.1%} after {warm:g} s"] if growth > GROWTH else []
    return Check("memory is flat", figures, problems)


def _queue(crowd: Crowd) -> Check:
    refused = crowd.replies["429"]
    problems = [f"{crowd.deepest} waited, and {QUEUE} may"] if crowd.deepest > QUEUE else []
    if not refused:
        problems.append("nobody was refused: the queue never was full")
    return Check("the queue is bounded", {"deepest": crowd.deepest, "limit": QUEUE, "refused": refused}, problems)


def logged(path: Path) -> dict[str, float | None]:
    """The uncertainties of the decisions in a log, by their ids."""
    database = Database(path)
    try:
        return {decision.id: decision.uncertainty for decision, _ in database.decisions()}
    finally:
        database.close()
