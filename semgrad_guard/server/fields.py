"""The fields of a request in its errors: `param` and the words have the names that the client used.

Inside, a field has its name in chat completions. `names` is a protocol's table of those that it names otherwise, by the
beginning of their places: {"messages": "input", "messages.0": "instructions"}; the longest beginning counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from semgrad_guard.engine.prompts.grammar import FORM_FIELDS
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.server.answers import HttpError, http_error_of
from semgrad_guard.server.forwarded import problem_of

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
        "With --on-other-options deliver this server takes others, outside the promise"
    )
    return HttpError(problem.status, problem.code, text, fields=list(found))
