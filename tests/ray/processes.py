"""The processes of this test's own cluster, by what Ray calls them. Read from /proc: these tests run on Linux."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path


def own_workers(name: str) -> list[int]:
    """Descendants of this process that Ray calls so: `ray::Worker` is an actor of that class, idle or at work."""
    return [number for number in _descendants(os.getpid()) if _title(number).startswith(f"ray::{name}")]


@contextmanager
def killer(name: str, kills: list[int], *, most: int, pauses: tuple[float, float]) -> Generator[None]:
    """Kills processes that Ray calls so, no one twice, after pauses at random between these two, in seconds.

    `kills` are their numbers.
    """
    ended, chance = threading.Event(), random.Random(0)

    def run() -> None:
        while len(kills) < most and not ended.wait(chance.uniform(*pauses)):
            if alive := [number for number in own_workers(name) if number not in kills]:
                kills.append(chance.choice(alive))
                os.kill(kills[-1], signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def resident(number: int) -> int:
    """Bytes of its own that a process holds now; what it shares, as Ray's object store, is not among them. 0 once it is
    gone."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{number}/status").read_text().splitlines())
        return 1024 * int(fields["RssAnon"].split()[0])
    except (OSError, KeyError):
        return 0


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(root, ()))
    for number in found:
        yield number
        found += children.get(number, ())


def _parent(folder: Path) -> int | None:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):  # it has ended meanwhile
        return None


def _title(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
