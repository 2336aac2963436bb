"""The server is killed and ended, loses its disk, its database and its upstream: acknowledged decisions are kept."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from load_checks.clients import Reply, ask, asking, connected
from load_checks.results import Check
from load_checks.saturation import logged
from load_checks.scripted import FAULTS, Scripted, draft
from load_checks.servers import Server, serving
from load_checks.small_model import small_model
from semgrad_guard.server.assembly import ROWS

CLIENTS, NAME, PATIENCE = 16, "small", 120.0
PATIENT = 30
"""Seconds that a request has before an upstream that may be slow; on a busy machine, healthy ones take some."""
_DISK = 32 * 2**20


@dataclass(eq=False)
class Load:
    """Clients that send one question after the other, and their responses."""

    url: str
    replies: list[Reply] = field(default_factory=list[Reply])
    ended: bool = False

    @property
    def ids(self) -> set[str]:
        """The decisions that were acknowledged."""
        return {decision_id for reply in self.replies for decision_id in reply.ids}

    @property
    def statuses(self) -> Counter[int]:
        """How often each status came; 0: the connection broke."""
        return Counter(reply.status for reply in self.replies)

    async def client(self, number: int) -> None:
        async with connected(self.url) as http:
            for turn in count():
                if self.ended:
                    return
                reply = await ask(http, asking(NAME, f"{number} {turn}", stream=turn % 2 == 0, max_tokens=4))
                self.replies.append(reply)
                if reply.status == 0:
                    return

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something is so.

        Raises:
            SystemExit: it takes too long.
        """
        ends = time.monotonic() + PATIENCE
        while not await asyncio.to_thread(holds):
            if time.monotonic() > ends:
                raise SystemExit(f"{what} did not happen in {PATIENCE:g} s; so far: {self.statuses}")
            await asyncio.sleep(0.05)

    async def answers(self, more: int, *, with_id: bool = True) -> None:
        """Wait for so many answers more, with ids of decisions or without."""

        def found() -> int:
            return sum(reply.status == 200 and bool(reply.ids) == with_id for reply in list(self.replies))

        aim = found() + more
        await self.until(lambda: found() >= aim, f"{more} answers {'with' if with_id else 'without'} ids")


@asynccontextmanager
async def loaded(url: str) -> AsyncGenerator[Load]:
    """Clients that send questions as long as this lasts."""
    load = Load(url)
    clients = [asyncio.ensure_future(load.client(number)) for number in range(CLIENTS)]
    try:
        yield load
    finally:
        load.ended = True
        await asyncio.gather(*clients)


async def faulty(folder: Path, *, kills: int) -> list[Check]:
    """All of these checks."""
    options = ["--model", small_model(folder / NAME), "--threshold", "0.5", "--max-tokens", "200"]
    found: list[Check] = []
    for check in (partial(_killed, kills=kills), _drained, _full, _away):
        place = folder / f"{len(found)}"
        place.mkdir()
        found.append(await check(place, options))
        print(found[-1].line, flush=True)
    (folder / "upstream").mkdir()
    return [*found, await _upstream(folder / "upstream", options[1])]


async def _killed(folder: Path, options: list[object], *, kills: int) -> Check:
    """kill -9 at any moment loses no decision that a client has the id of."""
    acknowledged, draw = set[str](), random.Random(0)
    for _ in range(kills):
        with serving(folder, *options) as server:
            async with loaded(server.url) as load:
                await load.answers(draw.randint(1, 30))
                server.kill()
        acknowledged |= load.ids
    with serving(folder, *options) as server:  # imports the last one's entries
        problems = [f"a server ended with {status} after SIGTERM"] if (status := server.end()) else []
    lost = acknowledged - logged(folder / "log.db").keys()
    problems += [f"{len(lost)} acknowledged decisions are lost"] if lost else []
    return Check("killed under load", {"kills": kills, "acknowledged": len(acknowledged), "lost": len(lost)}, problems)


async def _drained(folder: Path, options: list[object]) -> Check:
    """SIGTERM: running and waiting requests are answered, or get an error when the time is over."""
    waiting = 24
    with serving(folder, *options) as server:
        async with connected(server.url) as http:
            bodies = [asking(NAME, f"question {number}", stream=number % 2 == 0) for number in range(ROWS + waiting)]
            tasks = [asyncio.ensure_future(ask(http, body)) for body in bodies]
            load = Load(server.url)
            await load.until(lambda: server.metrics()["semgrad_guard_queue_depth"] >= waiting - 4, "a full queue")
            status = await asyncio.to_thread(server.end)
            load.replies += await asyncio.gather(*tasks)
        loud = server.loud()
    refused = [reply for reply in load.replies if reply.whole and reply.error == "shutting_down"]
    left = [reply for reply in load.replies if reply not in refused and not _good(reply)]
    problems = loud + ([f"the server ended with {status}"] if status else [])
    problems += [f"not answered: {reply.status} {reply.broken} {reply.text[-200:]}" for reply in left]
    if load.ids - logged(folder / "log.db").keys():
        problems.append("acknowledged decisions are lost")
    figures = {"asked": ROWS + waiting, "waiting": waiting, "answered": len(load.ids), "told": len(refused)}
    return Check("SIGTERM drains", figures, problems)


def _good(reply: Reply) -> bool:
    return reply.status == 200 and reply.whole and reply.error is None


async def _full(folder: Path, options: list[object]) -> Check:
    """A full disk: answers have no id, and an alarm rises; with room again, there are ids again."""
    with _disk(folder / "disk") as disk, serving(folder, *options, log=disk.folder / "log.db") as server:
        async with loaded(server.url) as load:
            await load.answers(30)
            disk.fill(server)
            await load.answers(60, with_id=False)
            failures = (await asyncio.to_thread(server.metrics))["semgrad_guard_log_failures_total"]
            disk.free(server)
            await load.answers(60)
        ended, loud = server.end(), server.loud()
        lost = load.ids - logged(disk.folder / "log.db").keys()
    problems = loud + [
        f"not answered: {reply.status} {reply.text[-200:]}" for reply in load.replies if not _good(reply)
    ]
    problems += [f"{len(lost)} acknowledged decisions are lost"] if lost else []
    problems += [] if failures else ["no alarm: semgrad_guard_log_failures_total is 0"]
    problems += [] if "could not be written down" in server.output.read_text() else ["no alarm in the server's log"]
    problems += [f"the server ended with {ended}"] if ended else []
    figures = {"by": disk.kind, "answers": len(load.replies), "acknowledged": len(load.ids), "failures": int(failures)}
    return Check("disk full, and not any more", {**figures, "lost": len(lost)}, problems)


async def _away(folder: Path, options: list[object]) -> Check:
    """A database that cannot be written: answers have ids, the backlog shows, and is gone when it is back."""
    path = folder / "log.db"
    with serving(folder, *options) as server:
        async with loaded(server.url) as load:
            await load.answers(30)
            holder = sqlite3.connect(path, timeout=60)
            holder.execute("begin exclusive")
            await load.answers(60)
            await load.until(lambda: "is not up to date" in server.output.read_text(), "an alarm in the server's log")
            behind = (await asyncio.to_thread(server.metrics))["semgrad_guard_log_pending"]
            holder.rollback()
            holder.close()
            await load.answers(30)
        await load.until(lambda: server.metrics()["semgrad_guard_log_pending"] == 0, "an empty journal")
        lost = load.ids - logged(path).keys()
        ended, loud = server.end(), server.loud()
    problems = loud + [
        f"not answered: {reply.status} {reply.text[-200:]}" for reply in load.replies if not _good(reply)
    ]
    problems += [f"{len(lost)} acknowledged decisions are lost"] if lost else []
    problems += [] if behind >= 60 else [f"semgrad_guard_log_pending is {behind:g}"]
    problems += [f"the server ended with {ended}"] if ended else []
    figures = {"answers": len(load.replies), "acknowledged": len(load.ids), "behind": int(behind), "lost": len(lost)}
    return Check("database away, and back", figures, problems)


async def _upstream(folder: Path, scorer: object) -> Check:
    """Another server that fails in every way: an error with a name, or an abstention; others are answered meanwhile."""
    found, problems = Counter[str](), list[str]()
    async with Scripted(b"faults") as upstream:
        for on_error, url in (("raise", upstream.url), ("abstain", upstream.url), ("raise", "http://127.0.0.1:9/v1")):
            given = ("--upstream", url, "--model", NAME, "--scorer", scorer, "--threshold", "1e9", "--timeout", PATIENT)
            # the upstream reasons, so that its answers have no score
            with serving(folder, *given, on_unscored="answer", on_error=on_error) as server:
                async with connected(server.url) as http:
                    faults = [(number, FAULTS[number % 6] if number % 6 < 5 else "") for number in range(60)]
                    bodies = [asking(NAME, f"{n} {fault}", stream=n % 4 == 0) for n, fault in faults]
                    replies = await asyncio.gather(*(ask(http, body) for body in bodies))
                problems += server.loud()
                server.end()
            for (number, fault), reply in zip(faults, replies, strict=True):
                dead = not url.startswith(upstream.url)
                found[f"{'dead' if dead else fault or 'healthy'}, {on_error}: {reply.status}"] += 1
                expected = None if fault or dead else draft(b"faults", number)
                if not _as_agreed(reply, expected, abstains=on_error == "abstain"):
                    problems.append(f"{number} {fault} ({on_error}): {reply.status} {reply.broken} {reply.text[-300:]}")
    return Check("an upstream that fails", dict(sorted(found.items())), problems)


def _as_agreed(reply: Reply, expected: str | None, *, abstains: bool) -> bool:
    """Whether a reply is the answer, or where there is none an error with a name or an abstention."""
    if not reply.whole:
        return False
    if expected is not None or abstains:
        return reply.status == 200 and [text for text, _ in reply.choices] == [expected or "I don't know."]
    errors = {(502, "upstream_failed"), (504, "deadline_exceeded")}
    errors |= {(200, error) for _, error in errors}  # in a stream that was kept alive meanwhile
    return (reply.status, reply.error) in errors


@dataclass(frozen=True)
class Disk:
    """A place that can be filled to the last byte: a small file system, or the most that one process may write."""

    folder: Path
    kind: str

    def fill(self, server: Server) -> None:
        """Leave no room."""
        if self.kind == "limit":
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    def free(self, server: Server) -> None:
        """Make room again."""
        if self.kind == "limit":
            both = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, both)
        (self.folder / "ballast").unlink(missing_ok=True)


@contextmanager
def _disk(folder: Path) -> Generator[Disk]:
    """A small file system where this user may mount one, and a limit where not."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0  # noqa: S603
    try:
        yield Disk(folder, "tmpfs" if mounted else "limit")
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)  # noqa: S603, S607
