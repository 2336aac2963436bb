"""What travels between vLLM's server and its worker, as JSON: plain records, and errors by their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from semgrad_guard import errors
from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.scoring.segments import By
from semgrad_guard.errors import SemGradGuardError
from semgrad_guard.records import Message, PromptForm, Verdict
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.settings import ServerSettings

A = TypeVar("A")
R = TypeVar("R")

METHOD = "semgrad_guard"
"""The worker's one method: the name of a message, and the message; what comes back is JSON as well."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How the worker shall score: the server's settings, and the model's name."""

    settings: ServerSettings
    name: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a client asks (see `AnswerRequest`)."""

    conversation: tuple[Message, ...]
    options: GenerationOptions
    form: AnswerForm
    count: int
    logprobs: bool
    top_logprobs: int
    prompt_limit: int | None
    pieces: bool = False


@dataclass(frozen=True, kw_only=True)
class ToRead:
    """A request, the names under which vLLM will write its answers, and those of others that nobody waits for."""

    asked: Asked
    names: tuple[str, ...]
    let_go: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Read:
    """How it is written: the prompt's tokens, the options of each answer, and the tokens that end one.

    `thinks` says that reasoning may come first, so that no text can be shown before all of it is there.
    """

    ids: tuple[int, ...]
    options: tuple[GenerationOptions, ...]
    end_tokens: tuple[int, ...]
    thinks: bool = False


@dataclass(frozen=True, kw_only=True)
class Written:
    """The tokens of each answer to a request, those that ended them included, and its name."""

    asked: Asked
    names: tuple[str, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A text from elsewhere. Without `reason` it is to be scored, and in segments if `by` says so."""

    conversation: tuple[Message, ...] = ()
    text: str = ""
    form: AnswerForm = field(default_factory=AnswerForm)
    cut: bool = False
    reasoned: bool = False
    reason: str | None = None
    by: By | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredDraft:
    """A draft (`Draft`). `answer` is None for a text from elsewhere."""

    verdict: Verdict
    answer: Answer | None
    prompt: PromptForm | None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An error by the name of its class."""

    kind: str
    said: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """One of ours as it is; of others only what they are, since their words may hold what was asked."""
        ours = isinstance(error, SemGradGuardError)
        return cls(kind=type(error).__name__, said=str(error) if ours else "the worker failed at this request")

    def error(self) -> SemGradGuardError:
        """The error, to be raised."""
        named = getattr(errors, self.kind, errors.ScoringError)
        # One that carries more than words is raised as what it is a kind of.
        kind: type[SemGradGuardError] = next(each for each in named.__mro__ if "__init__" not in vars(each))
        return kind(self.said)


@dataclass(frozen=True)
class Call(Generic[A, R]):
    """One message to the worker: its name, what is sent, and what comes back."""

    name: str
    sent: TypeAdapter[A]
    found: TypeAdapter[R]

    def answered(self, payload: str, work: Callable[[A], R]) -> str:
        """What `work` makes of a message, or why it made nothing of it."""
        try:
            return json.dumps({"found": self.found.dump_python(work(self.sent.validate_json(payload)), mode="json")})
        except Exception as error:  # noqa: BLE001 - raised again in the other process
            return json.dumps({"failed": vars(Failed.of(error))})

    def read(self, said: str) -> R:
        """What came back.

        Raises:
            SemGradGuardError: what the worker raised.
        """
        found: dict[str, Any] = json.loads(said)
        if "failed" in found:
            raise Failed(**found["failed"]).error()
        return self.found.validate_python(found["found"])


Segments = list[tuple[str, int, int, float | None]]
"""Text, beginning, end and uncertainty of each."""

OPEN = Call("open", TypeAdapter(Opening), TypeAdapter(str))
READ = Call("read", TypeAdapter(ToRead), TypeAdapter(Read))
SCORE = Call("score", TypeAdapter(list[Written]), TypeAdapter(list[list[ScoredDraft] | Failed]))
ELSEWHERE = Call("elsewhere", TypeAdapter(Elsewhere), TypeAdapter(ScoredDraft))
SEGMENTS = Call("segments", TypeAdapter(Elsewhere), TypeAdapter(Segments))
