"""The record of a run that can be stopped and resumed: JSON Lines, its settings first, then one answer a line.

Rows are appended whole and synced to the disk. A kill can cut the last line short: opening the file again removes the
stump, and the run makes that row anew. One process writes at a time; a second one is refused.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, ValidationError

from semgrad_guard.declared import first_fault
from semgrad_guard.errors import BindingMismatchError, DataFileError, InputError
from semgrad_guard.files import atomic_write, cannot_write, make_private, take_back
from semgrad_guard.questions.data import Question
from semgrad_guard.settings import OnCut


class AnswerScore(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The number of one estimator for an answer; None, with a reason, if it has none.

    `features` are the input of a learned estimator, kept so that it can be fitted on graded answers.
    """

    uncertainty: float | None
    reason: str | None = None
    features: dict[str, float] | None = None


class AnsweredSentence(BaseModel, frozen=True, extra="forbid"):
    """A sentence of an answer, text[start:end], with its scores; `leans_on` is the number of an earlier one."""

    start: int
    end: int
    leans_on: int | None = None
    scores: dict[str, AnswerScore]


class Answer(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """One answered question. `key` is the question's; `text` is None where the question does not fit the window.

    By sentence, `sentences` are those of the text (none where they have no scores), and `scores` hold the most doubtful
    one's; None: the answer was scored as a whole.
    """

    key: str
    id: str | None = None
    question: str
    text: str | None
    finish_reason: str | None = None
    scores: dict[str, AnswerScore]
    sentences: tuple[AnsweredSentence, ...] | None = None

    @classmethod
    def to(cls, question: Question, **fields: Any) -> Self:
        """The answer to a question, with these fields."""
        return cls(key=question.key, id=question.id, question=question.question, **fields)

    def uncertainty(self, estimator: str) -> float | None:
        """The number of the estimator that has this name in the run."""
        return self.scores[estimator].uncertainty

    @property
    def is_cut(self) -> bool:
        """Whether a limit cut it off (`max_tokens`)."""
        return self.finish_reason == "length"

    def judged(self, on_cut: OnCut) -> Self:
        """The answer with the scores that count for a guard with this rule about answers that a limit cut off."""
        from semgrad_guard.guard.decision import why_unscored  # numpy comes with it

        cut = self.text if self.is_cut else None
        why = why_unscored(cut, on_cut, by_sentence=bool(self.sentences)) if cut else None
        if why is None:
            return self
        scores = dict.fromkeys(self.scores, AnswerScore(uncertainty=None, reason=why))
        parts = self.sentences
        if parts:
            parts = (*parts[:-1], parts[-1].model_copy(update={"scores": scores}))
        return self.model_copy(update={"scores": scores, "sentences": parts})

    @property
    def sentence_keys(self) -> list[str]:
        """The names of its sentences, as a sheet of labels has them."""
        return [f"{self.key}.{number}" for number in range(1, len(self.sentences or ()) + 1)]

    @property
    def sentence_texts(self) -> list[str]:
        """Its sentences, without white space around them."""
        return [(self.text or "")[one.start : one.end].strip() for one in self.sentences or ()]

    @property
    def unscored(self) -> str | None:
        """Why no estimator could score it; None if one has."""
        scored = (self.scores, *(sentence.scores for sentence in self.sentences or ()))
        if any(score.uncertainty is not None or score.features for scores in scored for score in scores.values()):
            return None
        return next((score.reason for score in self.scores.values() if score.reason), None)


class SampleSet(BaseModel, frozen=True, extra="forbid"):
    """The samples that a plan drew: their texts, and the log-probability of each of their tokens (nats).

    The probabilities are those of logits divided by `temperature`, as the methods that share the plan read them.
    """

    plan: dict[str, Any]
    temperature: float = 1.0
    texts: tuple[str, ...]
    log_probs: tuple[tuple[float | None, ...], ...]


class EvaluatedAnswer(Answer, frozen=True):
    """An answer with its references, its tokens, and the score and cost of every method.

    `entropies` and `log_probs` (nats) have one entry per token of `token_ids`. `generation_ms` is the time of plain
    generation (that of the batch, divided by its `rows`), `milliseconds` is the additional cost of each method: all
    that it needs, even if another method had computed it already. `ablations` are variants of SemGrad,
    by name. A row that is a sentence of an answer has that one's key in `part_of`.
    """

    references: tuple[str, ...] = ()
    kind: str | None = None
    context: str | None = None
    token_ids: tuple[int, ...] = ()
    entropies: tuple[float, ...] = ()
    log_probs: tuple[float, ...] = ()
    rows: int = 1
    generation_ms: float = 0.0
    milliseconds: Mapping[str, float] = Field(default_factory=dict[str, float])
    ablations: Mapping[str, float | None] = Field(default_factory=dict[str, float | None])
    samples: tuple[SampleSet, ...] = ()
    part_of: str | None = None

    @classmethod
    def to(cls, question: Question, **fields: Any) -> Self:
        """The answer to a question, with what the question is graded by, and these fields."""
        given = {"references": question.answers, "kind": question.kind, "context": question.context}
        return super().to(question, **given, **fields)

    @property
    def rows_by_sentence(self) -> list[EvaluatedAnswer]:
        """A row for each of its sentences, in its place; itself where it was scored as a whole."""
        if self.sentences is None:
            return [self]
        return [
            self.model_copy(
                update={"key": key, "part_of": self.key, "text": text, "scores": one.scores, "sentences": None}
            )
            for key, text, one in zip(self.sentence_keys, self.sentence_texts, self.sentences, strict=True)
        ]

    @property
    def mean_entropy(self) -> float | None:
        """The mean of the token entropies in nats, None without any."""
        return sum(self.entropies) / len(self.entropies) if self.entropies else None


_MARK = "semgrad_guard_record"

Progress = Callable[[int, int], None]
"""Called with the number of finished items and the number of all items."""


def unwatched(done: int, total: int) -> None:
    """Progress that is not shown."""


class Row(Protocol):
    """A line of a record: a pydantic model whose `key` is unique in the record."""

    @property
    def key(self) -> str:
        """The name of the row in its record."""
        ...

    def model_dump_json(self) -> str:
        """The row as a line."""
        ...

    @classmethod
    def model_validate_json(cls, json_data: str | bytes) -> Self:
        """The row in a line."""
        ...


R = TypeVar("R", bound=Row)


class JobRecord(Generic[R]):
    """The rows at `path`, by key, for jobs with the same `settings` only; a context manager.

    `kind` names the rows in the header and in messages: "answers", "grades". A record whose settings have further
    `estimators` can be read as well. New rows would lack their scores, so it is not extended (`require_continuable`).

    Raises:
        BindingMismatchError: the record was made with other settings; `differences` names them.
        DataFileError: a line is broken, other than by a kill.
        InputError: the file cannot be written, is not a record of this kind, or another process is writing it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], row: type[R], *, kind: str = "answers") -> None:
        self.path = path
        self.rows: dict[str, R] = {}
        self._row, self._kind = row, kind
        self._further: BindingMismatchError | None = None
        with ExitStack() as opened:
            opened.enter_context(sole_writer(path))
            is_new = not path.exists()
            try:
                if is_new:
                    make_private(path)
                self._file = opened.enter_context(path.open("a+b", buffering=0))
            except OSError as error:
                raise InputError(f"Cannot write {path}: {error.strerror or error}. Choose another path.") from error
            try:
                self._resume(json.loads(json.dumps(settings)))
            except InputError:
                if is_new:  # a record without a header is of no use
                    path.unlink(missing_ok=True)
                raise
            take_back(path)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def require_continuable(self) -> None:
        """Refuse to extend a record with scores of estimators that this job does not have.

        Raises:
            BindingMismatchError: there are such estimators; the message names them.
        """
        if self._further is not None:
            raise self._further

    def append(self, rows: Iterable[R]) -> None:
        """Write rows as whole lines, and wait until the disk has them."""
        added = list(rows)
        self._write("".join(row.model_dump_json() + "\n" for row in added))
        self.rows.update((row.key, row) for row in added)

    def _resume(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        beginning = _beginning(self._kind)
        if whole:
            self._check(_settings(self.path, whole, self._kind), settings)
            self.rows.update((row.key, row) for row in _rows(self.path, whole, self._row, self._kind))
        elif not content.startswith(beginning) and not beginning.startswith(content):
            raise _foreign(self.path, self._kind)
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        if not whole:
            self._write(json.dumps({_MARK: self._kind, "settings": settings}) + "\n")

    def _check(self, recorded: dict[str, Any], settings: dict[str, Any]) -> None:
        wanted: Mapping[str, Any] = settings.get("estimators") or {}
        scored: Mapping[str, Any] = recorded.get("estimators") or {}
        changed = differing(recorded, settings)
        if changed and wanted and set(wanted) < set(scored):
            self._further = BindingMismatchError(
                f"The {self._kind} in {self.path} have scores of other estimators as well "
                f"({', '.join(sorted(set(scored) - set(wanted)))}), which further {self._kind} would lack. Run the "
                f"command that began the file on all the questions, then this one again; or start a new file."
            )
            changed = differing({**recorded, "estimators": {name: scored[name] for name in wanted}}, settings)
        if changed:
            differences = "; ".join(changed.values())
            error = BindingMismatchError(
                f"The {self._kind} in {self.path} were made with other settings: {differences}. Continue with the same "
                "settings, or start a new file."
            )
            error.differences = differences
            raise error

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(f"Cannot write {self.path}: {error.strerror or error}.") from error


def is_record(kind: str = "answers") -> Callable[[Path], bool]:
    """A function of a path: whether the file is a record of this kind, or the stump that a kill left of its header."""
    beginning = _beginning(kind)

    def check(path: Path) -> bool:
        line = first_line(path)
        return line.startswith(beginning) or (bool(line) and beginning.startswith(line))

    return check


def read_record(path: Path, row: type[R]) -> tuple[dict[str, Any], list[R]]:
    """The settings and the whole rows of a record of answers that a job has left, or is still writing.

    Raises:
        DataFileError: a line is broken, other than by a kill.
        InputError: the file cannot be read, or is not a record of answers.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}. Run the command that writes it.") from error
    whole = content[: content.rfind(b"\n") + 1]
    return _settings(path, whole, "answers"), _rows(path, whole, row, "answers")


def number_of_try(path: Path, settings: Mapping[str, Any]) -> int:
    """The number of a calibration among all those on the labels of a record's answers, from 1 on.

    The first line of the record keeps every calibration, before its outcome is known. One that is repeated as it was
    has the number that it had.
    """
    with sole_writer(path):
        header, _, rows = path.read_bytes().partition(b"\n")
        content: dict[str, Any] = json.loads(header)
        tries, mine = content.setdefault("tries", []), json.loads(json.dumps(settings))
        if mine not in tries:
            tries.append(mine)
            atomic_write(path, json.dumps(content).encode() + b"\n" + rows, private=True)
    return tries.index(mine) + 1


def differing(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, str]:
    """The differences between the settings of two jobs, in words, by dotted name."""
    was, now = dict(flat(theirs)), dict(flat(mine))
    return {
        key: f"{key} is {now.get(key)!r} and was {was.get(key)!r}" for key in was | now if was.get(key) != now.get(key)
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings under dotted names."""
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(cast("Mapping[str, Any]", value), name)
        else:
            yield name, value


def _beginning(kind: str) -> bytes:
    """The first bytes of a record, up to its settings."""
    return json.dumps({_MARK: kind, "settings": {}}).encode()[: -len("{}}")]


def _settings(path: Path, whole: bytes, kind: str) -> dict[str, Any]:
    try:
        header: Any = json.loads(whole.partition(b"\n")[0])
    except (ValueError, RecursionError):
        raise _foreign(path, kind) from None
    fields = cast("dict[str, Any]", header) if isinstance(header, dict) else {}
    settings = fields.get("settings")
    if fields.get(_MARK) != kind or not isinstance(settings, dict):
        raise _foreign(path, kind)
    return cast("dict[str, Any]", settings)


def _rows(path: Path, whole: bytes, row: type[R], kind: str) -> list[R]:
    rows: list[R] = []
    for number, line in enumerate(whole.split(b"\n")[1:], start=2):
        try:
            if line:
                rows.append(row.model_validate_json(line))
        except ValidationError as error:
            raise DataFileError(
                f"{path}, line {number} is not a line of {kind}: {first_fault(error, place=False)}. Delete the "
                "line (it will be made again), or start a new file."
            ) from error
    return rows


def _foreign(path: Path, kind: str) -> InputError:
    return InputError(f"{path} exists and is not a record of {kind}; choose another path.")


@contextmanager
def sole_writer(path: Path) -> Generator[None]:
    """Hold `path` against every other run that would write it; a killed run holds nothing.

    The lock is a file of its own, next to `path` and gone at the end.

    Raises:
        InputError: another run is writing there at this moment, or nothing can be written there.
    """
    target = path.resolve()
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        if not target.parent.is_dir():  # the lock would make it
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(
            f"Another run is writing {path} at this moment. Wait until it has ended, or choose another path."
        ) from None
    except (OSError, NotImplementedError) as error:
        raise cannot_write(path, error) from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file; a lock file that stays does no harm
            os.unlink(lock.lock_file)
        lock.release()


def first_line(path: Path) -> bytes:
    """The first line of a file without its end, and not more of it than 64 KiB."""
    with path.open("rb") as file:
        return file.readline(1 << 16).removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
