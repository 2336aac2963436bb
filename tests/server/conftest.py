"""A server in this process around the tiny random model, and a client for it."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Policy
from semgrad_guard.engine.answers.running import Work
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.guard import Answerer, Terms
from tests.steps import LIMIT, Steps, until

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

import httpx
from starlette.applications import Starlette

from semgrad_guard.server.app import make_app
from semgrad_guard.server.assembly import bound_to, server_of
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.service import ServedModel, Service

ALL, NONE = Policy(threshold=1e9, on_cut="score"), Policy(threshold=-1.0, on_cut="score")
OPTIONS = GenerationOptions(max_tokens=8)
Serve = Callable[..., Any]


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that came to its end."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def listening(app: Starlette, *, ends: threading.Event | None = None) -> Iterator[tuple[str, int]]:
    """The address of a server as `semgrad-guard serve` runs it; a signal comes with `ends`."""
    bound, begun = bound_to("127.0.0.1", 0), threading.Event()
    server = server_of(app, connections=64, started=begun.set)
    if ends is not None:
        threading.Thread(target=lambda: (ends.wait(), server.handle_exit(2, None)), daemon=True).start()
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
    thread.start()
    try:
        assert begun.wait(LIMIT)
        yield bound.getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        bound.close()


def raw_request() -> dict[str, Any]:
    """The scope of a request for a chat completion, for tests that are its server."""
    path, headers = "/v1/chat/completions", [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    about = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    asgi = {"version": "3.0", "spec_version": "2.4"}
    return {**about, "headers": headers, "asgi": asgi, "http_version": "1.1", "scheme": "http"}


def bodies(response: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, or the one body."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    return events(response.text) if is_stream else [response.json()]


def text_in(found: list[dict[str, Any]]) -> str:
    """The text of all answers in these bodies."""
    choices = [choice for body in found for choice in body["choices"]]
    return "".join(choice.get("delta", choice.get("message")).get("content") or "" for choice in choices)


def asking(text: str = "hello", **more: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture
def make_served(language_model: LanguageModel) -> Iterator[Callable[..., ServedModel]]:
    """A served model: `make_served(policy, mode="annotate", name="tiny")`; its threads end with the test."""
    made: list[ServedModel] = []

    def make(policy: Policy = ALL, *, model: LanguageModel | None = None, limit: int = 64, **given: Any) -> ServedModel:
        of_served = {field.name for field in fields(ServedModel)} - {"terms"}
        kept = {name: given.pop(name) for name in of_served & set(given)}
        answerer = Answerer(model or language_model, HybridGrad(), by_sentence=kept.get("by_sentence"))
        scheduler = kept.pop("scheduler", None) or Scheduler(answerer, limit=limit)
        terms = Terms(policy=policy, can_escalate=kept.get("target") is not None, **given)
        served = ServedModel(**{"name": "tiny", "scheduler": scheduler, "terms": terms, "options": OPTIONS, **kept})
        made.append(served)
        return served

    yield make
    for served in made:
        served.scheduler.close()
        unwatched(served.scheduler)


@pytest.fixture
def scorer(language_model: LanguageModel) -> Iterator[Scheduler]:
    """The owner of a copy of another server's model, which scores that one's answers."""
    made = Scheduler(Answerer(language_model, HybridGrad(), served=True))
    yield made
    made.close()


@pytest.fixture
def start(language_model: LanguageModel) -> Iterator[Callable[..., Scheduler]]:
    """A scheduler of a model, by default the tiny random one; its thread ends with the test."""
    made: list[Scheduler] = []

    def make(model: LanguageModel | None = None) -> Scheduler:
        made.append(Scheduler(Answerer(model or language_model, HybridGrad())))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()
        unwatched(scheduler)


@pytest.fixture
def serve(make_served: Callable[..., ServedModel]) -> Serve:
    """`async with serve(policy, mode=..., app={...}) as client`: an HTTP client of a server in this process."""

    @asynccontextmanager
    async def start(
        *policy: Policy, app: dict[str, Any] | None = None, service: dict[str, Any] | None = None, **given: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        made = Service([make_served(*policy, **given)], **(service or {}))
        transport = httpx.ASGITransport(make_app(made, **(app or {})))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            client.service = made  # type: ignore[attr-defined]
            yield client

    return start


def watched(scheduler: Any) -> tuple[list[Any], list[str]]:
    """What a scheduler begins from now on, and the kind of error ("NoneType": none) with which each of it ends."""
    begun, ended, takes = list[Any](), list[str](), scheduler.model.worker._takes

    def noting(job: Any) -> bool:
        if waits := takes(job):
            begun.append(job)
            job.ticket.add_done_callback(lambda done: ended.append(type(done.exception()).__name__))
        return waits

    scheduler.model.worker._takes = noting
    return begun, ended


def unwatched(scheduler: Any) -> None:
    """Watch the worker of this scheduler's model no longer; other tests share it."""
    if isinstance(scheduler, Scheduler):
        vars(scheduler.model.worker).pop("_takes", None)


def question_of(job: Any) -> str | None:
    """The question of a request, from its rendered prompt; None for other work."""
    return None if isinstance(job, Work) else job.request.prompt.text.partition("user\n")[2].partition("<")[0]


def held(scheduler: Scheduler, begun: list[Any], *, at: int) -> Steps:
    """Let the model wait at this step until the first request that began was cancelled: it is not done before."""
    steps = Steps(scheduler.model)
    steps.at(at, lambda: until(lambda: begun[0].ticket.context.copy().run(current_stop).remaining == 0))
    return steps
