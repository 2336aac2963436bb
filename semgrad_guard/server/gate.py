"""The edge of the server: what every request passes before it reaches a route, and errors as they leave.

`Gate` checks how many requests there are, the name of the host, and the key. Every error ends there. It leaves in the
form that OpenAI's clients read: a status and {"error": {"message", "type", "param", "code"}}. Nothing of an answer that
was withheld is in it, and no path, host or account of the operator's.

`param` and the words have the names that the client used. Inside, a field has its name in chat completions. `names` is
a protocol's table of those that it names otherwise, by the beginning of their places: {"messages": "input",
"messages.0": "instructions"}; the longest beginning counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semgrad_guard.declared import first_fault
from semgrad_guard.engine.prompts.forms import FORM_FIELDS
from semgrad_guard.errors import (
    AnswerInterruptedError,
    BindingMismatchError,
    DeadlineExceededError,
    DecisionLogError,
    InputError,
    LowConfidenceError,
    MissingExtraError,
    PromptTooLongError,
    QueueFullError,
    SemGradGuardError,
    UnsupportedToolsError,
    UpstreamError,
)
from semgrad_guard.server.answers import ACTION_HEADER, ID_HEADER, WITHHELD, public_record

Names = Mapping[str, str]

_TYPES = frozenset({"str", "int", "float", "bool"})
"""Names in the places of errors that are pydantic's, for the types that a field may have."""
_NO_OBJECT = frozenset({"model_type", "model_attributes_type", "dict_type"})
"""Errors whose words are about Python's classes."""
_SETTINGS: Mapping[str, Sequence[str]] = {
    **{name: (name,) for name in ("temperature", "top_p", "top_k")},
    "grammar": FORM_FIELDS,
    "prompt_template": ("tools", "chat_template_kwargs", "reasoning_effort"),
}
"""The fields that change a setting by which an answer is compared with its calibration."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_NO_RETRY = {"x-should-retry": "false"}
"""The same request would fail again; OpenAI's clients heed it."""
_LATER = {"retry-after": "5"}


class HttpError(Exception):
    """The error that a request gets in place of an answer.

    `fields` are those of a chat completion that it may be about, the likeliest first.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        fields: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.fields = status, code, message, tuple(fields)
        self.headers, self.more = dict(headers or {}), dict(more or {})

    @property
    def param(self) -> str | None:
        """The field that it is about."""
        return self.fields[0] if self.fields else None

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error, **self.more}

    @property
    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


class ClientGoneError(Exception):
    """There is no client left to answer."""


ENDING = HttpError(503, "shutting_down", "the server is shutting down; try again later", headers=_LATER)
"""The error of requests that still wait when the server ends."""

_NO_LOG = "the decision log cannot be used now; the operator finds the reason in the server's own log"
_FAILED = "the server failed; its log names the place"
_CODES: tuple[tuple[type[SemGradGuardError], int, str, str | None], ...] = (
    (PromptTooLongError, 400, "context_length_exceeded", None),
    (InputError, 400, "invalid_request", None),
    (BindingMismatchError, 422, "calibration_mismatch", None),
    (DeadlineExceededError, 504, "deadline_exceeded", None),
    (AnswerInterruptedError, 503, "interrupted", None),
    (MissingExtraError, 501, "not_installed", None),
    (DecisionLogError, 503, "decision_log_unavailable", _NO_LOG),
    (SemGradGuardError, 500, "model_error", _FAILED),
)
"""Kinds of errors with a status and a code; and the words, where the error's own may be about a draft or the operator's
machine."""
BUGS = frozenset({"model_error", "internal_error"})
"""The codes of errors whose place is logged."""


def http_error_of(error: BaseException) -> HttpError:
    """The response to an error. One that is not ours is a bug, and its text stays here."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, LowConfidenceError):  # no text may replace the answer: only its verdict is sent
        verdict = error.verdict
        decision = {} if verdict.decision_id is None else {ID_HEADER: verdict.decision_id}
        headers = {ACTION_HEADER: verdict.action, **_NO_RETRY, **decision}
        text = f"{WITHHELD} (decision: {verdict.action})"
        return HttpError(422, "low_confidence", text, headers=headers, more={"semgrad_guard": public_record(verdict)})
    if isinstance(error, QueueFullError):
        return HttpError(429, "queue_full", str(error), headers={"retry-after": str(error.retry_after)})
    if isinstance(error, UpstreamError):
        return _upstream(error)
    if isinstance(error, BindingMismatchError) and error.differences is not None:
        text = f"this model's calibration was made for other options: {error.differences}"
        return HttpError(422, "calibration_mismatch", text)
    if isinstance(error, UnsupportedToolsError):
        text = f"{error.problem}; send no tools and no tool calls, or choose a model with such a template (Qwen2.5's)"
        return HttpError(400, "unsupported_tools", text, fields=error.fields)
    for kind, status, code, words in _CODES:
        if isinstance(error, kind):
            headers = _LATER if status == 503 else _NO_RETRY if status >= 500 else {}
            return HttpError(status, code, words or error.problem, fields=error.fields, headers=headers)
    return HttpError(500, "internal_error", _FAILED, headers=_NO_RETRY)


def _upstream(error: UpstreamError) -> HttpError:
    later = {"retry-after": str(error.retry_after or 1)}
    if error.status == 429:
        return HttpError(429, "upstream_busy", str(error), headers=later)
    if error.status in (400, 404, 413, 422):
        return HttpError(error.status, "upstream_refused", str(error), fields=error.fields)
    return HttpError(502, "upstream_failed", str(error), headers=later if error.passing else _NO_RETRY)


def problem_of(error: ValidationError) -> tuple[str, str]:
    """The place and the kind of an error in a body, without the client's own text."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    fields = (str(part) for part in first["loc"] if str(part) not in _TYPES and "[" not in str(part))
    problem = "Input should be an object" if first["type"] in _NO_OBJECT else first_fault(error, place=False)
    return ".".join(fields)[:200], problem


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


def own_place(place: str, names: Names) -> str:
    """The client's own name for a place in the body of a chat completion."""
    parts = place.split(".")
    for length in range(len(parts), 0, -1):
        if (own := names.get(".".join(parts[:length]))) is not None:
            return ".".join((own, *parts[length:]))
    return place


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
            differs = f"{now!r} here and {was}" if field == setting else "not the same as"
            set_to = f"set temperature to {then or 0} or leave it out"  # some clients always send one
            advice.append(set_to if field == "temperature" else f"leave {own} out")
            found[own] = f"{own} is {differs} at calibration"
    if not found:
        return problem
    text = (
        f"this model's calibration was made for other options: {'; '.join(found.values())}; {' and '.join(advice)}. "
        "With the setting on_other_options=deliver this server takes others, outside the promise"
    )
    return HttpError(problem.status, problem.code, text, fields=list(found))


_HEALTH = frozenset({"/healthz", "/readyz"})
_PROBES = _HEALTH | {"/metrics"}
"""The routes that kubelet, HAProxy and Prometheus request by address, and HTTP/1.0 without a Host header."""
_SHORTEST_KEY = 16


class Keys:
    """The API keys that open a server; without any, it is open. They are held as hashes.

    Args:
        keys: the server's own.
        of_host: those of the server that hosts our routes; their length is that server's choice.

    Raises:
        InputError: one of the server's own is shorter than 16 characters, or holds others than ASCII's.
    """

    def __init__(self, keys: Iterable[str] = (), *, of_host: Iterable[str] = ()) -> None:
        own = [key.strip() for key in keys if key.strip()]
        if any(len(key) < _SHORTEST_KEY or not key.isascii() for key in own):  # as headers have them
            raise InputError(
                f"an API key has at least {_SHORTEST_KEY} characters, all of ASCII; make one with: openssl rand -hex 32"
            )
        self._hashes = tuple(_hash(key) for key in (*own, *(key.strip() for key in of_host if key.strip())))

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def open_to(self, authorization: str | None) -> bool:
        """Whether a request with this Authorization header may come in. Keys are compared in constant time."""
        if not self._hashes:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        given = _hash(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._hashes]  # all of them: no early end
        return scheme.lower() == "bearer" and any(matches)

    @classmethod
    def from_file(cls, path: Path) -> list[str]:
        """The keys in a file, one in each line; lines that begin with "#" are comments.

        Raises:
            InputError: the file cannot be read, or holds no key.
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeError) as error:
            raise InputError(f"the API keys in {path} cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise InputError(f"{path} holds no API key; write one a line")
        return keys


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Gate:
    """ASGI middleware: refuses a request that is one too many, comes under a foreign name, or has no key.

    A request counts once it is whole, so that half-sent ones lock out no client. `open_paths` need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        connections: int,
        hosts: frozenset[str] | None,
        open_paths: frozenset[str],
        report: Callable[[Exception], HttpError],
    ) -> None:
        self._app, self._keys, self._connections, self._hosts = app, keys, connections, hosts
        self._open_paths = _HEALTH | open_paths
        self._report = report
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request in, or answer it here.

        Every error ends here. Servers would log a bug with its text, which may be a client's; and they would take a
        cancellation for one, which comes when the time to finish running requests is over.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"].removeprefix(scope.get("root_path", ""))  # as routed
        is_inside = begun = False

        def enter() -> None:
            nonlocal is_inside
            if not is_inside:
                self._require_room(path)
                self._inside += 1
                is_inside = True

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                enter()
            return message

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            self._check_host(scope["method"], headers, path)
            self._check_key(headers, path)
            if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
                enter()  # a route need not read such a body
            with suppress(ClientGoneError):
                await self._app(scope, receiving, sending)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - see above
            problem = self._report(ENDING if isinstance(error, asyncio.CancelledError) else error)
            if not begun:
                await problem.response(scope, receive, send)
        finally:
            self._inside -= is_inside

    def _require_room(self, path: str) -> None:
        if path not in _HEALTH and self._inside >= self._connections:
            text = f"{self._inside} requests are being answered, which is the limit; try again later"
            raise HttpError(503, "too_many_connections", text, headers={"retry-after": "1"})

    def _check_key(self, headers: Headers, path: str) -> None:
        if path not in self._open_paths and not self._keys.open_to(headers.get("authorization")):
            challenge = {"www-authenticate": "Bearer"}
            raise HttpError(401, "invalid_api_key", "send the header Authorization: Bearer KEY", headers=challenge)

    def _check_host(self, method: str, headers: Headers, path: str) -> None:
        """Refuse foreign names.

        A page in a browser may point a name of its own at this machine. Its requests name a host, never an address, and
        have no key, so that probes by address cannot be such requests. Where vLLM hosts our routes, it allows every
        origin; a preflight alone gets nothing.

        Raises:
            HttpError: the request is refused.
        """
        if self._hosts is None:
            return
        name, origin = _name(headers.get("host", "")), headers.get("origin")
        if name not in self._hosts and not (path in _PROBES and (self._keys or not name or address_of(name))):
            raise HttpError(421, "unknown_host", "this server does not have that name; see --allow-host")
        if origin is not None and method != "OPTIONS" and _host_of(origin) not in self._hosts:
            raise HttpError(403, "foreign_origin", "pages from elsewhere may not use this server; see --allow-host")


def _name(host: str) -> str:
    """A Host header without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").lower()


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is; None for a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]"))
    return None


def _host_of(origin: str) -> str | None:
    with suppress(ValueError):
        return urlsplit(origin).hostname
    return None
