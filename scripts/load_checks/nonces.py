"""Every draft carries a nonce, and no nonce of a withheld draft is found in anything that leaves the server.

The run is cut into blocks, each with a server, a folder and a secret of its own; a finished block is in a file,
and is not repeated. In two blocks of four a scripted server writes the drafts. In the other two
our own engine does, in one running batch: each request's grammar allows its own nonce alone, so that an answer, or a
part of one, that belongs to another row is seen.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as counting
from pathlib import Path
from statistics import median
from typing import Any, Literal

import httpx
from pydantic import BaseModel

from load_checks.clients import Reply, ask, asking, connected
from load_checks.pauses import Pauses
from load_checks.results import Check
from load_checks.scripted import LETTERS, Scripted, draft, nonce
from load_checks.servers import Server, serving
from load_checks.small_model import small_model
from semgrad_guard import GenerationOptions, LanguageModel, Message
from semgrad_guard.adapters.calls import AnswerForm

BLOCK, CLIENTS, TWINS = 1000, 16, 50
"""Requests in a block; clients at once; one request in so many has its score compared with a single process's."""
INSTEAD = {"abstain": "I don't know.", "escalate": "a second opinion"}
"""The text that replaces a withheld draft."""
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
VARIANTS: Sequence[Mapping[str, Any]] = [
    {}, {"stream": True}, {"logprobs": True}, {"stream": True, "logprobs": True}, {"n": 2},
    {"tools": [TOOL]}, {"tools": [TOOL], "stream": True}, {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_object"}, "stream": True}, {"stream": True, "n": 2},
    {"semgrad_guard": {"mode": "raise"}}, {"semgrad_guard": {"mode": "raise"}, "stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
]  # fmt: skip
OWN_VARIANTS: Sequence[Mapping[str, Any]] = [
    {}, {"stream": True}, {"logprobs": True}, {"stream": True, "logprobs": True}, {"n": 2}, {"stream": True, "n": 2},
    {"stop": ["!", "?"]}, {"temperature": 1.5, "seed": 7}, {"temperature": 1.5, "seed": 7, "stream": True},
    {"semgrad_guard": {"mode": "raise"}}, {"semgrad_guard": {"mode": "raise"}, "stream": True},
]  # fmt: skip
FAULT = {11: "breaks", 23: "lies", 47: "fails", 71: "nonsense"}
"""Which of a hundred requests fail after the draft was sent, and how."""
_FRAGMENT = re.compile(f"[{LETTERS}]{{6,}}")


class Block(BaseModel):
    """The results of a block of requests."""

    number: int
    written_by: Literal["upstream", "engine"] = "upstream"
    drafts: int
    delivered: int
    withheld: int
    failed: int
    twins: int
    repeated: int = 0
    places: int
    seconds: float
    problems: list[str]


def own_format(secret: bytes, number: int) -> dict[str, Any]:
    """The `response_format` of a request to our own engine: the answer is the request's nonce, and nothing else."""
    schema = {"const": nonce(secret, number, 0)}
    return {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}


def own_score(model: LanguageModel, secret: bytes, number: int) -> float | None:
    """The score that a single process gives the answer to such a request."""
    form = AnswerForm.of({"response_format": own_format(secret, number)})
    options = GenerationOptions(grammar=form.grammar(model))
    found = model.generate(form.instructed((Message("user", f"{number} "),)), options).evidence.gradients()
    return None if found is None else found.scores.hybridgrad


@dataclass(eq=False)
class Run:
    """The requests of one block, on their way; `own`: our own engine writes the drafts."""

    secret: bytes
    threshold: float
    model: LanguageModel
    own: bool = False
    pauses: Pauses = field(default_factory=Pauses)
    repeated: int = 0
    open: set[str] = field(default_factory=set[str])  # nonces that may be read
    drafts: int = 0
    delivered: int = 0
    failed: int = 0
    twins: int = 0
    problems: list[str] = field(default_factory=list[str])

    async def client(self, http: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        """Send one question after the other."""
        for number in numbers:
            variants = OWN_VARIANTS if self.own else VARIANTS
            variant, fault = variants[number % len(variants)], "" if self.own else FAULT.get(number % 100, "")
            if fault == "breaks":
                variant = {"stream": True}
            elif fault:
                variant = {}
            form = {"response_format": own_format(self.secret, number)} if self.own else {}
            body = asking("scripted", f"{number} {fault}", **variant, **form)
            reply = await self._reply(http, body, number)
            self.drafts += variant.get("n", 1)
            try:
                allowed = self._judged(number, fault, variant, reply)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                allowed = set[str]()
                self.problems.append(f"{number} {body}: {error!r} {reply.status} {reply.broken} {reply.text[-300:]}")
            self.open |= allowed
            self._search(f"the answer to {number}", f"{reply.headers} {reply.text}", allowed)

    async def _reply(self, http: httpx.AsyncClient, body: Mapping[str, Any], number: int) -> Reply:
        """The response; requested once more if its time ran out because this process was stopped."""
        while True:
            began = time.monotonic()
            reply = await ask(http, dict(body))
            late = reply.broken is not None or reply.status >= 500
            if not late or not await asyncio.to_thread(self.pauses.since, began):
                return reply
            self.repeated += 1
            own = {nonce(self.secret, number, index) for index in range(2)}
            self._search(f"the broken answer to {number}", f"{reply.headers} {reply.text}", own)

    def _judged(self, number: int, fault: str, variant: Mapping[str, Any], reply: Reply) -> set[str]:
        """The nonces that a reply may hold; errors of its answers are recorded."""
        if fault:
            self.failed += 1
            self._require(reply.status == 502 and reply.error == "upstream_failed", number, reply)
            return set()
        self._require(reply.whole, number, reply)
        if reply.status == 422 and "raise" in str(variant):
            self._require(reply.error == "low_confidence", number, reply)
            return set()
        self._require(reply.status == 200 and len(reply.choices) == variant.get("n", 1), number, reply)
        allowed = set[str]()
        for index, (text, record) in enumerate(reply.choices):
            if record["action"] == "answer":
                own = nonce(self.secret, number, 0)
                expected = f'"{own}"' if self.own else draft(self.secret, number, index)
                self._require(text == expected, number, reply)
                self._require(record["uncertainty"] <= self.threshold, number, reply)
                allowed.add(own if self.own else nonce(self.secret, number, index))
                self.delivered += 1
            else:
                self._require(text == INSTEAD[record["action"]], number, reply)
            if number % TWINS == 0 and record["uncertainty"] is not None:
                self._compare(number, index, record["uncertainty"])
        return allowed

    def _compare(self, number: int, index: int, found: float) -> None:
        """Score the draft again in this process."""
        expected = (
            own_score(self.model, self.secret, number)
            if self.own
            else self.model.score(f"{number} ", draft(self.secret, number, index)).hybridgrad
        )
        self.twins += 1
        if expected is None or abs(found - expected) > 1e-4 * expected:
            self.problems.append(f"{number}: {found}, and a single process says {expected}")

    def _require(self, holds: bool, number: int, reply: Reply) -> None:
        if not holds:
            self.problems.append(f"{number}: {reply.status} {reply.broken} {reply.text[-500:]}")

    def search(self, places: Iterable[tuple[str, str]]) -> int:
        """Look in places of the whole block, where every delivered nonce may occur; the number of places."""
        looked = 0
        for place, text in places:
            self._search(place, text, self.open)
            looked += 1
        return looked

    def _search(self, place: str, text: str, allowed: set[str]) -> None:
        for fragment in set(_FRAGMENT.findall(text)) - allowed:
            if not any(fragment in nonce for nonce in allowed):
                self.problems.append(f"LEAK of {fragment} in {place}: {text[:300]}")


@dataclass(frozen=True)
class Scorer:
    """The model of a server, in this process, and the thresholds that let about half of the drafts through."""

    folder: Path
    model: LanguageModel
    threshold: float
    own_threshold: float

    @classmethod
    def of(cls, folder: Path) -> Scorer:
        """A small model, which is made in `folder`."""
        model = LanguageModel.from_pretrained(str(small_model(folder)))
        scores = [model.score(f"{number} ", draft(b"sample", number)).hybridgrad or 0.0 for number in range(40)]
        own = [own_score(model, b"sample", number) or 0.0 for number in range(40)]
        return cls(folder, model, median(scores), median(own))


async def block(folder: Path, scorer: Scorer, *, number: int, size: int) -> Block:
    """Answer the questions of one block, and look everywhere."""
    escalates, own = number % 2 == 1, number % 4 >= 2
    threshold = scorer.own_threshold if own else scorer.threshold
    run = Run(secrets.token_bytes(32), threshold, scorer.model, own)
    began, places = time.monotonic(), 0
    async with Scripted(run.secret) as upstream:
        writes = ["--model", scorer.folder]
        if not own:
            writes = ["--upstream", upstream.url, "--model", "scripted", "--scorer", scorer.folder]
        given = [
            *writes, "--threshold", threshold,
            *(["--escalate-to", f"{upstream.url}#large"] * escalates),
        ]  # fmt: skip
        with serving(folder, *given, log_text=True, allow_override=["mode"]) as server:
            numbers = iter(range(number * BLOCK, number * BLOCK + size))
            async with connected(server.url) as http:
                await asyncio.gather(*(run.client(http, numbers) for _ in range(CLIENTS)))
                for path in ("decisions?limit=1000", "promises", "models"):
                    places += run.search([(path, (await http.get(f"/{path}")).text)])
                places += run.search([("metrics", (await http.get(f"{server.url[:-3]}/metrics")).text)])
            places += run.search(_files(folder))
            await _ended(server, run)
            places += run.search(_files(folder))
    return Block(
        number=number,
        written_by="engine" if own else "upstream",
        drafts=run.drafts,
        delivered=run.delivered,
        withheld=run.drafts - run.delivered,
        failed=run.failed,
        twins=run.twins,
        repeated=run.repeated,
        places=places,
        seconds=time.monotonic() - began,
        problems=run.problems,
    )


async def _ended(server: Server, run: Run) -> None:
    if status := await asyncio.to_thread(server.end):
        run.problems.append(f"the server ended with {status}")
    run.problems += server.loud()


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """Everything that the server has written: its log, its journal, its database."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.name, path.read_bytes().decode(errors="replace")


async def searched(folder: Path, state: Path, *, count: int) -> Check:
    """Continue a run until so many drafts were judged."""
    scorer = Scorer.of(folder / "scripted")
    state.parent.mkdir(parents=True, exist_ok=True)
    done = _done(state)
    numbers = (number for number in counting() if number not in {one.number for one in done})
    while (left := count - sum(block.drafts for block in done)) > 0:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            found = await block(Path(name), scorer, number=next(numbers), size=min(BLOCK, left))
        done.append(found)
        with state.open("a", encoding="utf-8") as file:
            file.write(found.model_dump_json() + "\n")
        print(f"{sum(block.drafts for block in done)} drafts: {found.model_dump_json()}"[:300], flush=True)
    names = ("drafts", "delivered", "withheld", "failed", "twins", "repeated", "places", "seconds")
    figures = {name: round(sum(getattr(block, name) for block in done)) for name in names}
    figures["by our own engine"] = sum(block.drafts for block in done if block.written_by == "engine")
    return Check(
        "no nonce of a withheld draft anywhere", figures, [problem for block in done for problem in block.problems]
    )


def _done(state: Path) -> list[Block]:
    if not state.exists():
        return []
    return [Block.model_validate_json(line) for line in state.read_text(encoding="utf-8").splitlines()]
