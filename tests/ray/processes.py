"""The processes of this test's own cluster, by what Ray calls them. Read from /proc: these tests run on Linux."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def own_workers(name: str) -> list[int]:
    """Descendants of this process that Ray calls so: `ray::Worker` is an actor of that class, idle or at work."""
    return [number for number in _descendants(os.getpid()) if _title(number).startswith(f"ray::{name}")]


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
