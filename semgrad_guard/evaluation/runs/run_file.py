"""The record of a run: JSON Lines, one answer a line after a header with the settings; killed runs continue.

Lines are appended whole and unbuffered. A kill can cut the last one short: opening the file again removes the stump,
and the run redoes that answer. One run writes at a time: a second one on the same file is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from semgrad_guard.errors import BindingMismatchError, DataFileError, InputError
from semgrad_guard.evaluation.files import first_line, sole_writer
from semgrad_guard.files import make_private, take_back

_MARK = "semgrad_guard_run"
_BEGINNING = b'{"semgrad_guard_run": 1, "settings": '


class AnswerScore(BaseModel):
    """One estimator's number for an answer; None, with a reason, where there is none.

    `features` are what a learned estimator reads, kept so that it can be fitted on graded answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    uncertainty: float | None
    reason: str | None = None
    features: dict[str, float] | None = None


class Answer(BaseModel):
    """One answered question. `key` is the question's; `text` is None where the question could not be asked."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    key: str
    id: str | None = None
    question: str
    text: str | None
    finish_reason: str | None = None
    scores: dict[str, AnswerScore]

    def uncertainty(self, estimator: str) -> float | None:
        """The number of the estimator that the run calls by this name."""
        return self.scores[estimator].uncertainty

    @property
    def unscored(self) -> str | None:
        """Why no method has anything to say of it; None where one has."""
        if any(score.uncertainty is not None or score.features for score in self.scores.values()):
            return None
        return next((score.reason for score in self.scores.values() if score.reason), None)


class Kept(Protocol):
    """What a run keeps of a question; `key` is the question's."""

    @property
    def key(self) -> str:
        """Names it among all of the run."""
        ...

    def model_dump_json(self) -> str:
        """The line of it."""
        ...

    @classmethod
    def model_validate_json(cls, json_data: str | bytes) -> Self:
        """What stands in a line."""
        ...


A = TypeVar("A", bound=Kept)


class RunFile(Generic[A]):
    """The answers at `path`, for runs with the same `settings` only; a context manager.

    `record` is what a line holds: `Answer`, or more. A record that has scores of further estimators is read as well; as
    new answers would lack those, it is not continued (`require_continuable`).

    Raises:
        BindingMismatchError: the file belongs to a run with other settings.
        DataFileError: a line of it is broken, other than by a kill.
        InputError: it cannot be written, is no record of a run, or another run is writing it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], record: type[A]) -> None:
        self.path = path
        self.answers: dict[str, A] = {}
        self._record = record
        self._further: BindingMismatchError | None = None
        mine: dict[str, Any] = json.loads(json.dumps(settings))
        with ExitStack() as opened:
            opened.enter_context(sole_writer(path))
            try:
                if not path.exists():
                    make_private(path)
                self._file = opened.enter_context(path.open("a+b", buffering=0))
            except OSError as error:
                raise InputError(f"Cannot write {path}: {error.strerror or error}. Choose another path.") from error
            self._resume(mine)
            take_back(path)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()

    def require_continuable(self) -> None:
        """Refuse to add answers to a record with scores of estimators that this run has not.

        Raises:
            BindingMismatchError: there are such estimators; the message names them.
        """
        if self._further is not None:
            raise self._further

    def append(self, answers: Iterable[A]) -> None:
        """Write answers as whole lines."""
        added = list(answers)
        self._write("".join(answer.model_dump_json() + "\n" for answer in added))
        self.answers.update((answer.key, answer) for answer in added)

    def _resume(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and not content.startswith(_BEGINNING[: len(content)]) and not content.startswith(_BEGINNING):
            raise _foreign(self.path)
        if whole:
            self._check(_settings(self.path, whole), settings)
            self.answers.update((answer.key, answer) for answer in _answers(self.path, whole, self._record))
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        if not whole:
            self._write(json.dumps({_MARK: 1, "settings": settings}) + "\n")

    def _check(self, found: dict[str, Any], settings: dict[str, Any]) -> None:
        wanted: Mapping[str, Any] = settings.get("estimators") or {}
        scored: Mapping[str, Any] = found.get("estimators") or {}
        refused = self._differing(found, settings)
        if refused is not None and wanted and set(wanted) < set(scored):
            self._further = self._lacking(set(scored) - set(wanted))
            refused = self._differing({**found, "estimators": {name: scored[name] for name in wanted}}, settings)
        if refused is not None:
            raise refused

    def _differing(self, found: Mapping[str, Any], settings: Mapping[str, Any]) -> BindingMismatchError | None:
        """Why a record with the settings `found` is none for a run with these."""
        changed = differing(found, settings)
        if not changed:
            return None
        return BindingMismatchError(
            f"The answers in {self.path} come from a run with other settings: {'; '.join(changed.values())}. "
            "Continue it with the same settings, or start a new file of answers."
        )

    def _lacking(self, others: set[str]) -> BindingMismatchError:
        """Why a record with scores of other estimators, too, takes no further answers of this run."""
        return BindingMismatchError(
            f"The answers in {self.path} have scores of other estimators as well ({', '.join(sorted(others))}), which "
            "further answers would lack. Run the command that began the file on all the questions, then this one "
            "again; or start a new file of answers."
        )

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise InputError(f"Cannot write {self.path}: {error.strerror or error}.") from error


def is_run(path: Path) -> bool:
    """Whether a file is the record of a run, or the stump that a kill left of one's first line."""
    line = first_line(path)
    return line.startswith(_BEGINNING) or (bool(line) and _BEGINNING.startswith(line))


def read_run(path: Path, record: type[A]) -> tuple[dict[str, Any], list[A]]:
    """The settings and the whole answers of a run, wherever it stands.

    Raises:
        DataFileError: a line of it is broken, other than by a kill.
        InputError: it cannot be read, or is no record of a run.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}. Run the evaluation first.") from error
    whole = content[: content.rfind(b"\n") + 1]
    return _settings(path, whole), _answers(path, whole, record)


def _settings(path: Path, whole: bytes) -> dict[str, Any]:
    try:
        found: Any = json.loads(whole.partition(b"\n")[0])
    except (ValueError, RecursionError):
        raise _foreign(path) from None
    header = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    settings = header.get("settings")
    if header.get(_MARK) != 1 or not isinstance(settings, dict):
        raise _foreign(path)
    return cast("dict[str, Any]", settings)


def _answers(path: Path, whole: bytes, record: type[A]) -> list[A]:
    lines = whole.split(b"\n")[1:]
    return [_read(path, line, number, record) for number, line in enumerate(lines, start=2) if line]


def _read(path: Path, line: bytes, number: int, record: type[A]) -> A:
    try:
        return record.model_validate_json(line)
    except ValidationError as error:
        raise DataFileError(
            f"{path}, line {number} is no answer of a run: {error.errors()[0]['msg']}. Delete the line (its "
            "question will be asked again), or start a new file of answers."
        ) from error


def _foreign(path: Path) -> InputError:
    return InputError(f"{path} exists and is no record of a run; choose another path for the answers.")


def differing(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, str]:
    """What is not the same in the settings of two runs, in words, by its dotted name."""
    was, now = _flat(theirs), _flat(mine)
    return {
        key: f"{key} is {now.get(key)!r} and was {was.get(key)!r}" for key in was | now if was.get(key) != now.get(key)
    }


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    if not isinstance(settings, dict):
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", settings).items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return flat
