"""The routes. Errors have OpenAI's form; the process's log holds neither a client's text nor an answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import semgrad_guard
from semgrad_guard.calibration.monitors import PromiseMonitor
from semgrad_guard.decision_log.entries import Decision, Feedback, parse_since
from semgrad_guard.errors import InputError
from semgrad_guard.server.completions import (
    Translation,
    completion,
    headers,
    limit_headers,
    streamed,
    unless_gone,
)
from semgrad_guard.server.gate import BUGS, ClientGoneError, Gate, HttpError, Keys, error_about, http_error_of
from semgrad_guard.server.other_protocols import ResponsesTranslation, TextTranslation
from semgrad_guard.server.protocol import DecisionsRequest, FeedbackRequest, ScoreRequest, parse_json
from semgrad_guard.server.server_settings import ServeOptions
from semgrad_guard.server.service import CONTENT_TYPE, Service

if TYPE_CHECKING:  # it needs the extra `log`
    from semgrad_guard.decision_log.decision_log import DecisionLog

B = TypeVar("B", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response | Mapping[str, Any]]]

logger = logging.getLogger("semgrad_guard.server")
_OF_REQUESTS = (ValidationError, HttpError, semgrad_guard.SemGradGuardError)
"""The errors of a request."""
_NO_ROUTE = "unknown route; answers come from POST /v1/chat/completions (the base_url ends in /v1)"

_HTML, _JS = "text/html; charset=utf-8", "text/javascript; charset=utf-8"
_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", _HTML),
    "/decisions": ("decisions.html", _HTML),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
    "/static/api.js": ("api.js", _JS),
    "/static/playground.js": ("playground.js", _JS),
    "/static/decisions.js": ("decisions.js", _JS),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
}
PATHS = frozenset(_FILES)
"""The paths of the pages. They hold no data, so they need no key: they get their data from the routes."""
_PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one client may take.

    `body_bytes` of one request; `body_seconds` in which it must arrive; `connections` that are answered at once. A
    stream that waits sends a comment after every `beat_seconds`, so that proxies do not take it for dead: at fixed
    times, which do not depend on the draft.
    """

    body_bytes: int = ServeOptions.max_body
    body_seconds: float = 30.0
    connections: int = ServeOptions.connections
    beat_seconds: float = 15.0


def make_app(
    service: Service,
    *,
    keys: Keys | None = None,
    limits: Limits | None = None,
    hosts: frozenset[str] | None = None,
) -> Starlette:
    """The server as an ASGI application.

    Args:
        service: answers the requests.
        keys: the keys that open it; without any, it is open.
        limits: how much one client may take.
        hosts: the names under which browsers may reach it (the Host header); None: any.
    """
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await asyncio.to_thread(service.close)

    gate = Middleware(
        Gate,
        keys=keys or Keys(),
        connections=limits.connections,
        hosts=hosts,
        open_paths=PATHS,
        report=partial(_reported, service),
    )
    routes, pages = Routes(service, limits), Pages()
    return Starlette(
        routes=[*routes.all(), *(Route(path, partial(pages.response, path)) for path in PATHS)],
        middleware=[gate],
        exception_handlers={HTTPException: _unrouted},
        lifespan=lifespan,
    )


class Routes:
    """The function of each path; a plain result is the JSON of the response."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service, self._limits = service, limits
        self._began = int(time.time())

    def all(self) -> list[Route]:
        """The routes, but for the pages."""
        get: Mapping[str, Handler] = {
            "/healthz": self.healthz,
            "/readyz": self.readyz,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/v1/decisions": partial(asyncio.to_thread, self.decisions),  # a database may take its time
            "/v1/promises": partial(asyncio.to_thread, self.promises),
            "/v1/savings": partial(asyncio.to_thread, self.savings),
        }
        post: Mapping[str, Handler] = {
            "/v1/chat/completions": partial(self._answered, Translation.of),
            "/v1/completions": partial(self._answered, TextTranslation.of),
            "/v1/responses": partial(self._answered, ResponsesTranslation.of),
            "/v1/score": self.score,
            "/v1/feedback": self.feedback,
        }
        return [
            Route(path, _responding(handler), methods=[method])
            for method, handlers in (("GET", get), ("POST", post))
            for path, handler in handlers.items()
        ]

    async def healthz(self, _: Request) -> Mapping[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    async def readyz(self, _: Request) -> Mapping[str, Any]:
        """Whether it can answer: the models are loaded, and there is room."""
        models = self._service.models
        if full := sorted(name for name, served in models.items() if served.scheduler.is_full):
            raise HttpError(503, "busy", f"no room for more requests: {', '.join(full)}")
        return {"status": "ready", "models": sorted(models)}

    async def metrics(self, _: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, _: Request) -> Mapping[str, Any]:
        """The models that are served."""
        models = self._service.models.values()
        return {"object": "list", "data": [served.described(self._began) for served in models]}

    async def model(self, request: Request) -> Mapping[str, Any]:
        """One model."""
        return self._service.model(request.path_params["name"]).described(self._began)

    async def score(self, request: Request) -> Mapping[str, Any]:
        """How uncertain the model would be of a text."""
        return await unless_gone(request, self._service.score(await self._read(request, ScoreRequest)))

    async def feedback(self, request: Request) -> Mapping[str, Any]:
        """Whether a delivered answer was right."""
        body, log = await self._read(request, FeedbackRequest), self._log
        grade: Any = {"right": body.right, "grader": body.grader, "current": self._service.calibrations}
        try:
            entry = await asyncio.to_thread(log.feedback, body.decision_id, **grade)
        except InputError as error:
            raise HttpError(404, "decision_not_found", str(error), fields=("decision_id",)) from error
        return {"object": "feedback", **entry.model_dump(mode="json")}

    def decisions(self, request: Request) -> Mapping[str, Any]:
        """Decisions, the latest first; those on withheld answers without their scores and times."""
        query, log = _checked(dict(request.query_params), DecisionsRequest), self._log
        log.flush()
        if query.after is not None and log.database.find(query.after) is None:  # deleted while a client turns the pages
            raise HttpError(404, "decision_not_found", "after: there is no decision of this id", fields=("after",))
        rows = log.database.decisions(
            since=None if query.since is None else parse_since(query.since),
            action=query.action,
            limit=query.limit + 1,
            before=query.after,
        )
        data = [_listed(decision, feedback) for decision, feedback in rows[: query.limit]]
        return {"object": "list", "data": data, "has_more": len(rows) > query.limit}

    def promises(self, _: Request) -> Mapping[str, Any]:
        """Whether the promises hold, by the grades of answers that were drawn at random: those of the calibrations
        that decide first."""
        current, logged = self._service.calibrations, {str(one.calibration_id): one for one in self._log.promises()}
        for name, calibration in current.items():
            if calibration.threshold is not None and calibration.is_about_answers and name not in logged:
                monitor, requested = PromiseMonitor(calibration.alpha, calibration.delta), calibration.requested
                logged[name] = monitor.report(calibration_id=name, requested_alpha=requested)
        data = [{**one.model_dump(), "words": str(one), "current": name in current} for name, one in logged.items()]
        return {"object": "list", "data": sorted(data, key=lambda one: not one["current"])}

    def savings(self, request: Request) -> Mapping[str, Any]:
        """What escalating only what is doubtful has saved, and cost, over whole blocks of decisions."""
        log, since = self._log, parse_since(request.query_params.get("since") or "7d")
        log.flush()
        found = log.database.savings(since=since)
        spent = {action: asdict(one) for action, one in found.spent.items()}
        return {"object": "savings", "requests": found.counts, "sums": spent, "words": found.words()}

    @property
    def _log(self) -> DecisionLog:
        if self._service.log is None:
            raise HttpError(404, "no_decision_log", "this server keeps no decision log")
        return self._service.log

    async def _answered(self, translated: Callable[[Mapping[str, Any]], Translation], request: Request) -> Response:
        """The response, whole or streamed, to a request in any of OpenAI's protocols."""
        body = parse_json(await _body(request, self._limits))
        request_id = secrets.token_hex(12)
        try:
            form = translated(body)
        except _OF_REQUESTS as error:
            raise error_about(error, body, {}) from error
        about = partial(error_about, body=form.body, names=form.names)
        try:
            call = self._service.call(form.body, request_id=request_id, response_id=f"{form.prefix}{request_id}")
            if call.request.stream:
                beat, report = self._limits.beat_seconds, partial(_reported, self._service, about=about)
                return await streamed(
                    request, self._service, call, request_id=request_id, form=form, beat=beat, report=report
                )
            outcomes = await unless_gone(request, self._service.outcomes(call))
        except _OF_REQUESTS as error:
            raise about(error) from error
        whole = completion(call, outcomes, request_id=request_id)
        self._service.metrics.used(call.served.name, whole["usage"])
        return JSONResponse(form.whole(whole), headers={**limit_headers(call), **headers(outcomes)})

    async def _read(self, request: Request, kind: type[B]) -> B:
        return _checked(parse_json(await _body(request, self._limits)), kind)


def _listed(decision: Decision, feedback: Feedback | None) -> dict[str, Any]:
    shown = (
        None if feedback is None else feedback.model_dump(mode="json", include={"at", "right", "sampling", "grader"})
    )
    partly = decision.is_part
    decision = decision if decision.shows_draft else decision.without_score()
    # Which grades will count, and whether the scores have drifted, withheld ones too, are the operator's to know.
    row = {**decision.model_dump(mode="json", exclude={"drawn"}), "drift": None}
    return {"object": "decision", **row, "delivery": decision.delivery, "partly_withheld": partly, "feedback": shown}


class Pages:
    """The pages for people: files of the wheel, read once, under a policy by which they reach nothing else."""

    def __init__(self) -> None:
        folder = files("semgrad_guard.server") / "static"
        self._content = {path: (folder / name).read_bytes() for path, (name, _) in _FILES.items()}

    def response(self, path: str, request: Request) -> Response:
        """The file at one of `PATHS`; a page that is mounted below a path names its files there."""
        content, kind = self._content[path], _FILES[path][1]
        if kind == _HTML:
            content = content.replace(b'="/', f'="{escape(request.scope.get("root_path", ""))}/'.encode())
        return Response(content, media_type=kind, headers=dict(_PAGE_HEADERS))


def _checked(fields: Mapping[str, Any], kind: type[B]) -> B:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise error_about(error, fields, {}) from None


def _responding(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        found = await handler(request)
        return found if isinstance(found, Response) else JSONResponse(found)

    return respond


async def _body(request: Request, limits: Limits) -> bytes:
    """The body of a request, as long as it is JSON, not too long, and not too slow.

    Raises:
        HttpError: it is one of these.
        ClientGoneError: the client hung up.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # any page in a browser can send other kinds without a preflight
        raise HttpError(415, "unsupported_media_type", "send JSON, with the header content-type: application/json")
    too_long = HttpError(413, "body_too_large", f"a request has up to {limits.body_bytes} bytes")
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and int(stated) > limits.body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.body_bytes:
                    raise too_long
    except TimeoutError:
        raise HttpError(408, "body_too_slow", f"the request did not arrive in {limits.body_seconds:g} s") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


async def _unrouted(_: Request, error: Exception) -> Response:
    """What the framework itself refuses; the gate answers every error."""
    assert isinstance(error, HTTPException)  # noqa: S101 - as it is registered
    texts = {404: ("not_found", _NO_ROUTE), 405: ("method_not_allowed", "use another method")}
    code, text = texts.get(error.status_code, ("invalid_request", "the request cannot be read"))
    raise HttpError(error.status_code, code, text, headers=error.headers) from error


def _reported(
    service: Service, error: BaseException, *, about: Callable[[BaseException], HttpError] = http_error_of
) -> HttpError:
    """The answer to an error. A bug is logged by its place and its kind, without its text, which may be a client's."""
    problem = about(error)
    service.metrics.failed(problem.code)
    if problem.code in BUGS:
        frames = traceback.extract_tb(error.__traceback__)
        place = " <- ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames[-6:]))
        logger.error("%s: %s at %s", problem.code, type(error).__name__, place)
    return problem
