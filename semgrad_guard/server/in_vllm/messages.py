"""The messages between vLLM's server and its worker, as JSON: plain records, and errors by their names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from semgrad_guard import errors
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.prompts.thoughts import Thinking
from semgrad_guard.engine.text_units import Span
from semgrad_guard.errors import SemGradGuardError
from semgrad_guard.guard import Draft
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.scheduler import AnswerRequest, ForeignText, Segment
from semgrad_guard.server.server_settings import ServerSettings

A = TypeVar("A")
R = TypeVar("R")

METHOD = "semgrad_guard"
"""The worker's one method. It takes the name of a message and the message, and returns JSON as well."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How the worker shall score: the server's settings, and the model's name."""

    settings: ServerSettings
    name: str


@dataclass(frozen=True, kw_only=True)
class ToRead:
    """A request, the names under which vLLM will write its answers, and those of abandoned answers."""

    request: AnswerRequest
    names: tuple[str, ...]
    abandoned: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Read:
    """How it is written: the prompt's tokens, the options of each answer, and the tokens that end one.

    `thinking` tells thoughts and answer apart. With `has_parts` sentences may leave before the answer ends.
    """

    ids: tuple[int, ...]
    options: tuple[GenerationOptions, ...]
    end_tokens: tuple[int, ...]
    thinking: Thinking | None = None
    has_parts: bool = False


@dataclass(frozen=True, kw_only=True)
class Written:
    """The tokens of each answer to a request that was read, those that ended them included, and its name.

    `stopped`: it was ended behind a sentence. `known` is the verdict on the sentences that have been scored.
    """

    names: tuple[str, ...]
    answers: tuple[tuple[int, ...], ...]
    stopped: bool = False
    known: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The tokens of an answer that is being written, and the sentences that have ended in it; `known` as above."""

    name: str
    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    known: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredPart:
    """The part of an answer that has ended. With its first `tokens` the answer would end behind its last sentence."""

    draft: Draft[None]
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An error by the name of its class."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """One of ours as it is; of others only the kind, since their text may quote a question."""
        ours = isinstance(error, SemGradGuardError)
        return cls(kind=type(error).__name__, text=str(error) if ours else "the worker failed at this request")

    def error(self) -> SemGradGuardError:
        """The error, to be raised."""
        named = getattr(errors, self.kind, errors.ScoringError)
        # One that carries more than a text is raised as its base class.
        kind: type[SemGradGuardError] = next(base for base in named.__mro__ if "__init__" not in vars(base))
        return kind(self.text)


@dataclass(frozen=True)
class Call(Generic[A, R]):
    """One message to the worker: its name, its form, and the form of the reply."""

    name: str
    sent: TypeAdapter[A]
    reply: TypeAdapter[R]

    def answered(self, payload: str, work: Callable[[A], R]) -> str:
        """The reply to a message: the result of `work`, or its error."""
        try:
            return json.dumps({"reply": self.reply.dump_python(work(self.sent.validate_json(payload)), mode="json")})
        except Exception as error:  # noqa: BLE001 - raised again in the other process
            return json.dumps({"failed": vars(Failed.of(error))})

    def read(self, reply: str) -> R:
        """The worker's result.

        Raises:
            SemGradGuardError: the worker's error.
        """
        fields: dict[str, Any] = json.loads(reply)
        if "failed" in fields:
            raise Failed(**fields["failed"]).error()
        return self.reply.validate_python(fields["reply"])


OPEN = Call("open", TypeAdapter(Opening), TypeAdapter(str))
READ = Call("read", TypeAdapter(ToRead), TypeAdapter(Read))
SENTENCES = Call("sentences", TypeAdapter(list[Begun]), TypeAdapter(list[ScoredPart | Failed | None]))
"""None where an answer's tokens spell another text."""
SCORE = Call("score", TypeAdapter(list[Written]), TypeAdapter(list[list[Draft[Answer]] | Failed]))
ELSEWHERE = Call("elsewhere", TypeAdapter(ForeignText), TypeAdapter(Draft[None]))
SEGMENTS = Call("segments", TypeAdapter(ForeignText), TypeAdapter(list[Segment]))
CALLS: Mapping[str, Call[Any, Any]] = {call.name: call for call in (READ, SENTENCES, SCORE, ELSEWHERE, SEGMENTS)}
