"""The fields of a request: as far as they are read for another server, and named in errors.

Another server may do more than our engine, and checks its requests itself. Only the fields that we need are read. A
request that the scorer cannot read is passed on, and its answer has no score.

In errors, `param` and the words have the names that the client used. Inside, a field has its name in chat completions.
`names` is a protocol's table of those that it names otherwise, by the beginning of their places:
{"messages": "input", "messages.0": "instructions"}; the longest beginning counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.declared import first_fault
from semgrad_guard.engine.prompts.grammar import FORM_FIELDS
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.records import Message
from semgrad_guard.server.answers import HttpError, http_error_of
from semgrad_guard.server.protocol import CUTS, ChatRequest

_OURS = frozenset({"model", "messages", "stream", "n", "semgrad_guard"})
"""The fields that decide how we answer: they must be valid."""
_SCORED = frozenset({"tools", "tool_choice", "response_format"})
"""The fields that change the prompt, next to the messages."""
_TYPES = frozenset({"str", "int", "float", "bool"})
"""Names in the places of errors that are pydantic's, for the types that a field may have."""
_NO_OBJECT = frozenset({"model_type", "model_attributes_type", "dict_type"})
"""Errors whose words are about Python's classes."""


@dataclass(frozen=True)
class Forwarded:
    """A request as far as we read it. `unread` is the reason why its answer cannot be scored; `left` has the fields
    that are not in the `request`, each with the reason."""

    request: ChatRequest
    conversation: tuple[Message, ...] = ()
    form: AnswerForm = field(default_factory=AnswerForm)
    unread: str | None = None
    left: Mapping[str, str] = field(default_factory=dict[str, str])

    def require_cuts(self) -> None:
        """Refuse cuts that this server is to make and cannot read.

        Raises:
            InputError: the request has such cuts.
        """
        if unread := [problem for name, problem in self.left.items() if name in CUTS]:
            raise InputError(unread[0])


def forwarded(body: Mapping[str, Any]) -> Forwarded:
    """Read a request that another server answers.

    Raises:
        ValidationError: a field that decides how we answer is wrong.
    """
    kept, unread, left = dict(body), list[str](), dict[str, str]()
    if isinstance(options := body.get("stream_options"), dict):  # other servers know further ones
        known = cast("dict[str, Any]", options)
        kept["stream_options"] = {name: value for name, value in known.items() if name == "include_usage"}
    while True:
        try:
            request = ChatRequest.model_validate(kept)
            break
        except ValidationError as error:
            place, problem = problem_of(error)
            name = place.partition(".")[0]
            if name == "messages" and (question := _question(body.get("messages"))) is not None:
                kept["messages"] = [{"role": "user", "content": question}]
            elif name in _OURS or name not in kept:
                raise
            else:
                del kept[name]
                left[name] = f"{place}: {problem}"
            if name in ("messages", *_SCORED):
                unread.append(f"{place}: {problem}")
    try:
        conversation, form = request.conversation(), request.form()
    except InputError as error:
        unread.append(str(error))
        conversation, form = (), AnswerForm()
    if unread:
        reason = f"the scorer cannot read the request ({'; '.join(unread)})"
        return Forwarded(request, unread=reason, left=left)
    return Forwarded(request, conversation, form, left=left)


def problem_of(error: ValidationError) -> tuple[str, str]:
    """The place and the kind of an error in a body, without the client's own text."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    fields = (str(part) for part in first["loc"] if str(part) not in _TYPES and "[" not in str(part))
    problem = "Input should be an object" if first["type"] in _NO_OBJECT else first_fault(error, place=False)
    return ".".join(fields)[:200], problem


def _question(messages: Any) -> str | None:
    """The user's last message as far as it is text; None where these are not messages at all."""
    listed = cast("list[Any]", messages) if isinstance(messages, list) else []
    if not listed or not all(isinstance(message, dict) for message in listed):
        return None
    texts = [message.get("content") for message in listed if message.get("role") == "user"]
    return texts[-1] if texts and isinstance(texts[-1], str) else ""


Names = Mapping[str, str]

_SETTINGS: Mapping[str, Sequence[str]] = {
    **{name: (name,) for name in ("temperature", "top_p", "top_k")},
    "grammar": FORM_FIELDS,
    "prompt_template": ("tools",),
}
"""The fields that change a setting by which an answer is compared with its calibration."""


def own_place(place: str, names: Names) -> str:
    """The client's own name for a place in the body of a chat completion."""
    parts = place.split(".")
    for length in range(len(parts), 0, -1):
        if (own := names.get(".".join(parts[:length]))) is not None:
            return ".".join((own, *parts[length:]))
    return place


def error_about(error: BaseException, body: Mapping[str, Any], names: Names) -> HttpError:
    """The response to an error of a request with this body, in the client's names."""
    if isinstance(error, ValidationError):
        place, problem = problem_of(error)
        own = own_place(place, names)
        return HttpError(400, "invalid_request", f"{own or 'the body'}: {problem}", fields=[own] if own else [])
    problem = http_error_of(error)
    if isinstance(error, BindingMismatchError) and error.changes:
        return _mismatch(problem, error.changes, body, names)
    found = _sent(problem.fields, body) or problem.param
    if found is None:
        return problem
    own = own_place(found, names)
    message = problem.message if own == found else problem.message.replace(found, own)
    return HttpError(problem.status, problem.code, message, fields=[own], headers=problem.headers, more=problem.more)


def _sent(fields: Sequence[str], body: Mapping[str, Any]) -> str | None:
    """The first of these fields that the request has."""
    return next((field for field in fields if body.get(field.partition(".")[0]) is not None), None)


def _mismatch(
    problem: HttpError, changes: Mapping[str, tuple[Any, Any]], body: Mapping[str, Any], names: Names
) -> HttpError:
    """A calibration that was made for other options: those that the request sets; or else the server's own."""
    found: dict[str, str] = {}
    advice: list[str] = []
    for setting, (now, then) in changes.items():
        if (field := _sent(_SETTINGS.get(setting, ()), body)) is not None:
            own, was = own_place(field, names), "not set" if then is None else repr(then)
            is_value = field == setting
            set_to = f"set temperature to {then or 0} or leave it out"  # some clients always send one
            advice.append(set_to if field == "temperature" else f"leave {own} out")
            found[own] = f"{own} is {f'{now!r} here and {was}' if is_value else 'not the same as'} at calibration"
    if not found:
        return problem
    text = (
        f"this model's calibration was made for other options: {'; '.join(found.values())}; {' and '.join(advice)}. "
        "With the setting on_other_options=deliver this server takes others, outside the promise"
    )
    return HttpError(problem.status, problem.code, text, fields=list(found))
