"""A journal: entries are on the disk before anybody relies on them, and stay there until the database has them.

Each process writes segments of its own, locked while it lives. Whoever starts next takes up the segments of those that
are gone. Several entries that come together are synced together (a group commit).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from semgrad_guard.decision_log.entries import Decision, Feedback, read_entry
from semgrad_guard.errors import DecisionLogError
from semgrad_guard.files import take_back

logger = logging.getLogger("semgrad_guard.decision_log")

_SUFFIX = ".jsonl"
_SEGMENT = 16 * 2**20
"""Bytes after which another segment is begun."""


@dataclass(frozen=True)
class Segment:
    """A file of entries, and the lock of whoever writes it."""

    path: Path
    lock: FileLock

    def entries(self, start: int = 0) -> tuple[list[Decision | Feedback], int]:
        """The entries from a byte on, and where the last whole line ends.

        A line that is not whole was never acknowledged: whoever wrote it was stopped before the sync.
        """
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        found: list[Decision | Feedback] = []
        for line in data[:whole].splitlines():
            try:
                found.append(read_entry(line))
            except ValueError:
                logger.error("a line of %s cannot be read and is left out", self.path)
        return found, start + whole

    def remove(self) -> None:
        """Delete the file, and let go of its lock."""
        self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Let go of the lock; the file stays for whoever comes next."""
        self.lock.release()
        with suppress(OSError):
            Path(self.lock.lock_file).unlink(missing_ok=True)


class Journal:
    """Writes entries to segments in a folder.

    Raises:
        DecisionLogError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _protect(folder)
        except OSError as error:
            raise DecisionLogError(
                f"the journal cannot be kept in {folder}: {error.strerror}; choose another"
            ) from error
        self._changed = threading.Condition()
        self._waiting: list[tuple[bytes, Future[None]]] = []
        self._closed = False
        self._file: BinaryIO | None = None
        self._segment: Segment | None = None
        self.full: list[Segment] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="semgrad-guard-journal")
        self._thread.start()

    @property
    def current(self) -> Segment | None:
        """The segment that is being written."""
        return self._segment

    def write(self, entries: Sequence[Decision | Feedback]) -> None:
        """Return once the entries are on the disk.

        Raises:
            DecisionLogError: they are not.
        """
        done: Future[None] = Future()
        lines = b"".join(entry.model_dump_json(exclude_none=True).encode() + b"\n" for entry in entries)
        with self._changed:
            if self._closed:
                raise DecisionLogError("the decision log is closed")
            self._waiting.append((lines, done))
            self._changed.notify()
        try:
            done.result()
        except OSError as error:
            raise DecisionLogError(f"the journal in {self.folder} cannot be written: {error.strerror}") from error

    def orphans(self) -> Iterator[Segment]:
        """The segments of processes that are gone; they are locked, and the caller's."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if self._segment is not None and path == self._segment.path:
                continue
            if any(path == each.path for each in self.full):
                continue
            lock = _lock_of(path)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            if path.exists():
                yield Segment(path, lock)
            else:
                lock.release()

    def close(self) -> None:
        """Write what waits, and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while batch := self._next():
            try:
                self._append(b"".join(lines for lines, _ in batch))
            except Exception as error:  # noqa: BLE001 - raised where somebody waits
                for _, done in batch:
                    done.set_exception(error)
            else:
                for _, done in batch:
                    done.set_result(None)

    def _next(self) -> list[tuple[bytes, Future[None]]]:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            batch, self._waiting = self._waiting, []
            return batch

    def _append(self, data: bytes) -> None:
        file = self._file or self._begin()
        start = file.tell()
        try:
            _write_all(file, data)
            os.fsync(file.fileno())
        except OSError:
            # What was written of it must not run into the next line, nor be taken for acknowledged.
            try:
                file.truncate(start)
                file.seek(start)
            except OSError:
                self._end()
            raise
        if file.tell() > _SEGMENT:
            self._end()

    def _begin(self) -> BinaryIO:
        path = self.folder / f"{secrets.token_hex(8)}{_SUFFIX}"
        lock = _lock_of(path)
        lock.acquire(timeout=0)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file = os.fdopen(descriptor, "wb", buffering=0)
            _sync_folder(self.folder)
        except OSError:
            lock.release()
            raise
        self._segment = Segment(path, lock)
        return self._file

    def _end(self) -> None:
        """Leave a segment to be taken into the database as a whole."""
        if self._file is not None and self._segment is not None:
            with suppress(OSError):
                self._file.close()
            self.full.append(self._segment)
        self._file = self._segment = None


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Write every byte: a file without a buffer takes what there is room for, and raises only at the next write."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _lock_of(path: Path) -> FileLock:
    return FileLock(f"{path}.lock", thread_local=False, mode=0o600)


def _protect(folder: Path) -> None:
    """Leave segments to their owner alone, and the folder, unless other files are in it, too."""
    found = list(folder.iterdir())
    for path in found:
        if path.suffix == _SUFFIX:
            with suppress(FileNotFoundError):  # another process has taken it into the database
                take_back(path)
    if all(path.name.endswith((_SUFFIX, f"{_SUFFIX}.lock")) for path in found):
        take_back(folder)


def _sync_folder(folder: Path) -> None:
    """Bring a new file's name onto the disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
