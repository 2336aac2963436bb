"""The routes. Errors have OpenAI's form; nothing that a client sent, and no answer, is written to the process's log."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse

import semgrad_guard
from semgrad_guard.engine.scoring.segments import Segment
from semgrad_guard.guard import Outcome
from semgrad_guard.server import completions
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.forwarded import problem_of
from semgrad_guard.server.gate import Gate
from semgrad_guard.server.gateway import PATH as GUARDRAIL
from semgrad_guard.server.gateway import GuardrailRequest, LiteLLMGuardrail
from semgrad_guard.server.http_errors import ENDING, HttpError, http_error_of
from semgrad_guard.server.keys import Keys
from semgrad_guard.server.metrics import CONTENT_TYPE
from semgrad_guard.server.pages import PATHS, Pages
from semgrad_guard.server.protocol import (
    ChatRequest,
    DecisionsRequest,
    FeedbackRequest,
    ScoreRequest,
    SummaryRequest,
    parse_json,
)
from semgrad_guard.server.records import KEY, public_record
from semgrad_guard.server.service import Call, Service
from semgrad_guard.server.unguarded import Unguarded, refusal

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

logger = logging.getLogger("semgrad_guard.server")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client may take.

    `body_bytes` of one request; `body_seconds` in which it must arrive; `connections` that are answered at once. A
    stream that waits sends a comment after every `beat_seconds`, so that proxies do not take it for dead: at fixed
    times, which say nothing of the draft.
    """

    body_bytes: int = 2_000_000
    body_seconds: float = 30.0
    connections: int = 256
    beat_seconds: float = 15.0


def make_app(
    service: Service,
    *,
    keys: Keys | None = None,
    limits: Limits | None = None,
    hosts: frozenset[str] | None = None,
    unguarded: Unguarded | None = None,
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        service: what answers.
        keys: who may come in; without any, everybody.
        limits: what one client may take.
        hosts: the names under which browsers may reach it (the Host header); None: any.
        unguarded: the upstream, and what of it is passed on without a verdict; None: there is no upstream.

    Raises:
        InputError: a route that this server answers itself is to be passed on.
    """
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="semgrad-guard", version=semgrad_guard.__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.add_middleware(
        Gate,
        keys=keys or Keys(),
        connections=limits.connections,
        hosts=hosts,
        report=lambda error: _reported(service, _cause(error)),
    )
    _handle_errors(app, service, refusal if unguarded is not None else _no_refusal)
    routes = Routes(service, limits)
    routes.add_to(app)
    if unguarded is not None:
        unguarded.require_not(app.openapi()["paths"])
        routes.pass_on(app, unguarded)
    return app


class Routes:
    """What each path does."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service, self._limits = service, limits
        self._began = int(time.time())
        self._guardrail = LiteLLMGuardrail(service)

    def add_to(self, app: FastAPI) -> None:
        """Make an application of them."""
        get: tuple[tuple[str, Callable[..., Any]], ...] = (
            ("/healthz", self.healthz),
            ("/readyz", self.readyz),
            ("/metrics", self.metrics),
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),
            ("/v1/calibration", self.calibration),
            ("/v1/decisions", self.decisions),
            ("/v1/decisions/summary", self.summary),
        )
        post: tuple[tuple[str, Callable[..., Any], type[BaseModel]], ...] = (
            ("/v1/chat/completions", self.chat, ChatRequest),
            ("/v1/score", self.score, ScoreRequest),
            ("/v1/feedback", self.feedback, FeedbackRequest),
            (GUARDRAIL, self.guardrail, GuardrailRequest),
        )
        for path, route in get:
            app.add_api_route(path, route, methods=["GET"], response_model=None)
        for path, probe in get[:2]:  # load balancers ask for heads
            app.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)
        pages = Pages()
        for path in PATHS:
            app.add_route(path, partial(pages.response, path), methods=["GET"], include_in_schema=False)
        for path, route, kind in post:
            app.add_api_route(path, route, methods=["POST"], response_model=None, openapi_extra=_takes(kind))

    def pass_on(self, app: FastAPI, unguarded: Unguarded) -> None:
        """Add the routes of an upstream that nobody judges."""

        async def passed_on(route: str, request: Request) -> Response:
            body = parse_json(await _body(request, self._limits))
            self._service.metrics.passed_on(route)
            return await _unless_gone(request, unguarded.passed_on(route, body))

        for path, route in unguarded.paths.items():
            add = partial(passed_on, route)
            app.add_route(path, add, methods=["POST"], include_in_schema=False)

    async def healthz(self) -> Mapping[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    async def readyz(self) -> Mapping[str, Any]:
        """Whether it can answer: the models are loaded, and there is room."""
        models = self._service.models
        if full := sorted(name for name, served in models.items() if served.scheduler.is_full):
            raise HttpError(503, "busy", f"no room for more requests: {', '.join(full)}")
        return {"status": "ready", "models": sorted(models)}

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self) -> Mapping[str, Any]:
        """The models that are served."""
        return {
            "object": "list",
            "data": [served.described(self._began) for served in self._service.models.values()],
        }

    async def model(self, name: str) -> Mapping[str, Any]:
        """One model."""
        return self._service.model(name).described(self._began)

    async def calibration(self, model: str | None = None) -> Mapping[str, Any]:
        """What thresholds would let through of a model's calibration answers, and how much of that would be wrong."""
        return self._service.calibration(model)

    async def chat(self, request: Request) -> Response:
        """A guarded chat completion, whole or streamed."""
        body = parse_json(await _body(request, self._limits))
        request_id = secrets.token_hex(12)
        try:
            call = self._service.call(body, request_id=request_id)
        except ValidationError as error:
            raise _invalid(error) from None
        if call.request.stream:
            return await _streamed(request, self._service, call, request_id, self._limits.beat_seconds)
        outcomes = await _unless_gone(request, self._service.outcomes(call))
        found = completions.completion(call, outcomes, request_id=request_id)
        return JSONResponse(found, headers=completions.headers(outcomes))

    async def score(self, request: Request) -> Mapping[str, Any]:
        """How uncertain the model would be of a text."""
        asked = await self._read(request, ScoreRequest)
        found = await _unless_gone(request, self._service.score(asked))
        record = {"object": "score", "model": found.model, KEY: public_record(found.verdict)}
        if found.segments is None:
            return record
        return {**record, "segments": [_segment(*each) for each in found.segments]}

    async def feedback(self, request: Request) -> Mapping[str, Any]:
        """Whether a delivered answer was right."""
        asked = await self._read(request, FeedbackRequest)
        return await asyncio.to_thread(self._service.feedback, asked)

    async def guardrail(self, request: Request) -> Mapping[str, Any]:
        """LiteLLM's generic guardrail API: whether a gateway may let an answer through."""
        asked = await self._read(request, GuardrailRequest)
        return (await _unless_gone(request, self._guardrail.answer(asked))).as_json()

    async def decisions(self, request: Request) -> Mapping[str, Any]:
        """Decisions, the latest first."""
        return await asyncio.to_thread(self._service.decisions, _query(request, DecisionsRequest))

    async def summary(self, request: Request) -> Mapping[str, Any]:
        """Rates and coverage by day, and in all."""
        return await asyncio.to_thread(self._service.summary, _query(request, SummaryRequest))

    async def _read(self, request: Request, kind: type[B]) -> B:
        body = parse_json(await _body(request, self._limits))
        try:
            return kind.model_validate(body)
        except ValidationError as error:
            raise _invalid(error) from None


def _query(request: Request, kind: type[B]) -> B:
    try:
        return kind.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise _invalid(error) from None


def _takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The body of a route in the OpenAPI schema; it is read by hand, so that errors have OpenAI's form."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    text = json.dumps(schema)
    for name, each in definitions.items():  # inlined: components of hand-made bodies are not collected
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"})[1:-1], json.dumps(each)[1:-1])
    for name, each in definitions.items():
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"})[1:-1], json.dumps(each)[1:-1])
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": json.loads(text)}}}}


async def _body(request: Request, limits: Limits) -> bytes:
    """The body of a request, as long as it is JSON, not too long, and not too slow.

    Raises:
        HttpError: it is one of these.
        ClientGoneError: the client hung up.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # other kinds can be sent by any page in a browser, without asking
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


def _invalid(error: ValidationError) -> HttpError:
    """What to say of a body that is no such request. What was sent is not repeated."""
    place, said = problem_of(error)
    return HttpError(400, "invalid_request", f"{place or 'the body'}: {said}", param=place or None)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What the work returns; a client that goes away cancels it.

    Raises:
        ClientGoneError: there is nobody left to answer.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ClientGoneError(Exception):
    """Nobody is left to answer."""


async def _streamed(request: Request, service: Service, call: Call, request_id: str, beat: float) -> Response:
    """A stream. Its headers wait for its first step, up to the first beat: until then an error has a status."""
    steps = service.steps(call)
    first = asyncio.ensure_future(anext(aiter(steps)))
    try:
        done, _ = await _unless_gone(request, asyncio.wait({first}, timeout=beat))
    except (ClientGoneError, asyncio.CancelledError):
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    step = first.result() if done else None
    found = completions.headers([step]) if isinstance(step, Outcome) and call.request.count == 1 else {}
    chunks = completions.chunks(call, _again(first, steps), request_id=request_id)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no", **found}
    text = _beating(_events(service, chunks, steps), beat, waits=not done)
    return _Events(text, media_type="text/event-stream", headers=headers)


async def _again(
    first: asyncio.Future[str | Outcome[Answer]], steps: AsyncIterator[str | Outcome[Answer]]
) -> AsyncIterator[str | Outcome[Answer]]:
    yield await first
    async for step in steps:
        yield step


async def _beating(events: AsyncGenerator[str], beat: float, *, waits: bool) -> AsyncGenerator[str]:
    """The events, and a comment whenever there was none for so long; one at once, if a client `waits` already."""
    if waits:
        yield _BEAT
    following: asyncio.Future[str] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({following}, timeout=beat))[0]:
                yield _BEAT
            try:
                event = following.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


async def _events(service: Service, chunks: AsyncIterator[Any], steps: Any) -> AsyncGenerator[str]:
    """Chunks as server-sent events; an error in mid-stream is the last of them."""
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:  # noqa: BLE001 - the status has been sent: the stream says it
        problem = _reported(service, error)
        yield _event(problem.body)
    finally:
        await steps.aclose()
    yield _DONE


_NO_ROUTE = "there is no such route; answers come from POST /v1/chat/completions (the base_url ends in /v1)"
_DONE = "data: [DONE]\n\n"
_BEAT = ": waiting\n\n"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _Events(StreamingResponse):
    """A stream that ends as soon as its client is gone, whatever version of ASGI the server speaks."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(until_gone())
        ends = False
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server ends, and the time to finish is over
            ends = not sending.done()
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
        if ends:
            last = _event(ENDING.body) + _DONE
            await send({"type": "http.response.body", "body": last.encode(), "more_body": False})


def _segment(segment: Segment, uncertainty: float | None) -> dict[str, Any]:
    return {"text": segment.text, "start": segment.start, "end": segment.end, "uncertainty": uncertainty}


def _no_refusal(_: str) -> None:
    return None


def _handle_errors(app: FastAPI, service: Service, refused: Callable[[str], HttpError | None]) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGoneError):
            return Response(status_code=499)
        if isinstance(error, HTTPException):
            found = {404: ("not_found", _NO_ROUTE), 405: ("method_not_allowed", "use another method")}
            code, said = found.get(error.status_code, ("invalid_request", "the request cannot be read"))
            refusal = refused(request.url.path) if error.status_code == 404 else None
            error = refusal or HttpError(error.status_code, code, said, headers=error.headers)
        problem = _reported(service, error)
        return JSONResponse(problem.body, status_code=problem.status, headers=problem.headers)

    app.add_exception_handler(HTTPException, answer)
    for kind in (HttpError, ClientGoneError, semgrad_guard.SemGradGuardError):
        app.add_exception_handler(kind, answer)


def _cause(error: Exception) -> BaseException:
    """What ended an answer that had begun: the framework raises an error of its own from it."""
    cause = error.__cause__
    return cause if isinstance(error, RuntimeError) and isinstance(cause, semgrad_guard.SemGradGuardError) else error


def _reported(service: Service, error: BaseException) -> HttpError:
    """What to answer; a bug is logged by its place and its kind, without its words, which may hold what was asked."""
    problem = http_error_of(error)
    service.metrics.failed(problem.code)
    if problem.code == "internal_error":
        frames = traceback.extract_tb(error.__traceback__)
        place = " <- ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames[-6:]))
        logger.error("internal error: %s at %s", type(error).__name__, place)
    return problem
