"""From settings to a server: models are loaded, each with its policy, the decision log is opened, and it listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette

from semgrad_guard.adapters.traces import EvaluationLog
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.calibration.binding import usual_options
from semgrad_guard.decision_log.database import log_address
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.declared import values_of
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.interruption import start_thread
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.scores.tape import Memory
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Answerer, OnDoubt, Policy, Terms, withholds
from semgrad_guard.guard.policy import judged_by, lets_every_score_through
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.loading import ModelSource, load_estimator, load_policy, pocket_policy
from semgrad_guard.named import POCKET
from semgrad_guard.server.app import Limits, make_app
from semgrad_guard.server.gate import Keys, address_of
from semgrad_guard.server.scheduler import ModelQueue, ReportedQueue, Scheduler
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.server.service import ServedModel, Service
from semgrad_guard.server.upstream import RemoteServer, RemoteTarget, Upstream
from semgrad_guard.settings import API_KEY, DRAIN_SECONDS, TARGET_KEY, UPSTREAM_KEY, LoadingOptions

ROWS = 32
"""Answers that are written at once, unless `max_batch` is another number."""
MEMORY = Memory(logits=256 << 20, activations=1 << 30, outputs=512 << 20, running=4 << 30)
"""The most that a batch of so many answers may hold for their scores."""
T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """An application, and the service behind it."""

    app: Starlette
    service: Service


def keys_of(settings: ServerSettings, *, of_host: Iterable[str] = ()) -> Keys:
    """The keys that open the server: in the environment, in the file, and of the server that hosts our routes.

    Raises:
        InputError: the file cannot be read, or holds no key.
    """
    in_environment = [os.environ[API_KEY]] if API_KEY in os.environ else []
    in_file = [] if settings.api_key_file is None else Keys.from_file(settings.api_key_file)
    return Keys([*in_environment, *in_file], of_host=of_host)


def assemble(
    settings: ServerSettings,
    *,
    keys: Keys,
    hosts: frozenset[str] | None,
    load: Callable[[ModelSource], LanguageModel] = ModelSource.load,
    queue: ModelQueue | None = None,
) -> Server:
    """Load the models, open the log, and make the application.

    Args:
        settings: the server's.
        keys: the keys that open it.
        hosts: the names under which it may be called; see `allowed_hosts`.
        load: loads a model.
        queue: the model's owner, where another program has loaded it.

    Raises:
        SemGradGuardError: a model, a calibration, a log or another server cannot be had.
    """
    maker = _Maker(settings, load, queue)
    models = _aside(lambda: [maker.served(name) for name in settings.names])
    log = None
    if not settings.no_log:
        keep = None if settings.keep_log is None else timedelta(days=settings.keep_log)
        address = log_address(settings.log)
        log = DecisionLog(address, journal=settings.journal, text=settings.log_text, keep=keep)
    # Where OpenTelemetry is installed, events go to it; its settings decide whether they leave the process.
    traced = find_spec("opentelemetry") is not None and find_spec("opentelemetry._logs") is not None
    service = Service(models, log=log, evaluations=EvaluationLog("semgrad_guard.server") if traced else None)
    limits = Limits(body_bytes=settings.max_body, connections=settings.connections)
    return Server(make_app(service, keys=keys, limits=limits, hosts=hosts), service)


def _aside(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread that ends with it.

    OpenMP keeps the threads that compute for a thread as long as that one lives, and the more it keeps, the sooner they
    go to sleep between two products. Those of the loading thread would cost the models' own threads a quarter of
    their speed (with two of them).
    """
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            future.set_exception(error)

    start_thread(run, name="semgrad-guard-loading")
    return future.result()


@dataclass(frozen=True)
class _Maker:
    """Makes each model with the settings that all of them share."""

    settings: ServerSettings
    load: Callable[[ModelSource], LanguageModel]
    queue: ModelQueue | None

    @cached_property
    def upstream(self) -> RemoteServer | None:
        """The server that writes the answers, if another one does."""
        url = self.settings.upstream
        if url is None:
            return None
        return RemoteServer(url, api_key=os.environ.get(UPSTREAM_KEY), timeout=self.settings.timeout or 120.0)

    @cached_property
    def target(self) -> RemoteTarget | None:
        """The server that answers in the place of answers that are not let through."""
        if self.settings.escalate_to is None:
            return None
        url, _, model = self.settings.escalate_to.partition("#")
        return RemoteTarget(RemoteServer(url, api_key=os.environ.get(TARGET_KEY)), model)

    def served(self, name: str) -> ServedModel:
        """A model that answers itself, or one of the upstream's, scored by a local one."""
        target = self.target  # a URL that is none is refused before a model is loaded
        policy = policy_of(self.settings, name)
        by_sentence = judged_by(policy.calibration, self.settings.by, self.settings.on_doubt)
        terms = self._terms(policy)
        upstream: Upstream | None = None
        if self.upstream is None:
            scheduler = self.queue or self._scheduler(name, policy, by_sentence)
        elif self.settings.scorer is None:
            scheduler = ReportedQueue(ReportedScorer.of(name, policy.calibration, self.settings.estimator, by_sentence))
            policy.check(scheduler.scorer.binding)
            upstream = Upstream(self.upstream, scheduler, usual_options(policy.binding))
        else:
            scheduler = self._scheduler(name, policy, by_sentence)
            upstream = Upstream(self.upstream, scheduler)
        return ServedModel(
            name=name if upstream is not None else scheduler.name,
            scheduler=scheduler,
            upstream=upstream,
            terms=terms,
            options=options_of(self.settings),
            target=target,
            prompt_limit=self.settings.max_prompt_tokens,
            scores_texts=self.settings.allow_score,
            by_sentence=by_sentence,
        )

    def _scheduler(self, name: str, policy: Policy, by_sentence: OnDoubt | None) -> Scheduler:
        settings, scores_only = self.settings, self.upstream is not None
        estimator = load_estimator(settings.estimator, policy)
        engine, loading = None if scores_only else settings.engine, values_of(settings, LoadingOptions)
        model = self.load(ModelSource(model=settings.scorer or name, engine=engine, **loading))
        answerer = Answerer(model, estimator, options_of(settings), served=scores_only, by_sentence=by_sentence)
        policy.check(answerer.binding())
        if model.memory == Memory():
            model.memory = MEMORY
        model.max_batch = settings.max_batch or ROWS
        return Scheduler(answerer, limit=settings.queue)

    def _terms(self, policy: Policy) -> Terms:
        settings, calibration = self.settings, policy.calibration
        return Terms(
            policy=policy,
            mode=settings.mode,
            can_escalate=self.target is not None,
            abstain_message=settings.abstain_message,
            on_error=settings.on_error,
            timeout=settings.timeout,
            closing_line=settings.closing_line,
            monitor=DriftMonitor(calibration) if calibration is not None and calibration.scores else None,
        )


def options_of(settings: ServerSettings) -> GenerationOptions:
    """How answers are written, unless a request changes it."""
    return GenerationOptions(max_tokens=settings.max_tokens, max_thinking_tokens=settings.max_thinking_tokens, seed=0)


def policy_of(settings: ServerSettings, name: str) -> Policy:
    """The policy for the answers of the model of that name.

    Raises:
        InputError: there is none.
        CalibrationError: a calibration's file cannot be read as one.
    """
    policy = load_policy(settings.calibrations.get(name), settings)
    own = (settings.estimator, settings.dtype, settings.quantization_config, settings.engine)
    changed = settings.template_options or any(setting is not None for setting in own)
    if policy is None and name == POCKET and settings.upstream is None and not changed:
        policy = pocket_policy(settings)
    if policy is not None:
        return replace(policy, on_other_options=settings.on_other_options)
    if not withholds(settings.mode):
        return lets_every_score_through(settings.on_unscored)
    raise InputError(
        f"no setting decides which answers of {name} are let through: give --calibration or --threshold, or --mode "
        "annotate to deliver every answer with its uncertainty"
    )


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_REMEDY = f"set {API_KEY}, or give --api-key-file. Without one it listens on 127.0.0.1"
_OPEN_FOR_ONE = 4
"""Connections for each request that is answered; with one more, the server answers 503."""
_HEAD_BYTES, _IDLE_SECONDS = 65_536, 30
"""Bytes of a request's head that has not ended, and seconds between an answer and the next request."""


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine alone."""
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def allowed_hosts(
    host: str, *, has_keys: bool, named: Iterable[str] = (), remedy: str = _REMEDY
) -> frozenset[str] | None:
    """The names under which a server may be called; None: any.

    A server without keys is called by the names of this machine only: a page in a browser may point a name of its own
    at it. `remedy` explains how this server gets a key.

    Raises:
        InputError: other machines could reach the server, and it has no key.
    """
    own = frozenset(name.lower() for name in named)
    if has_keys:
        return own | _LOOPBACK | {host.strip("[]").lower()} if own else None
    if not is_loopback(host):
        raise InputError(f"at {host} others could reach this server, so it takes an API key: {remedy}")
    return _LOOPBACK | own | {host.strip("[]").lower()}


def bound_to(host: str, port: int) -> socket.socket:
    """A socket at this address, for a server to listen; port 0 takes any that is free.

    Raises:
        InputError: the address is not available.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once (TCP_NODELAY) where a socket names TCP as its protocol. Otherwise a stream's
    # first piece would wait 40 ms for the client's acknowledgement of the head.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, UnicodeError) as error:
        bound.close()
        why = error.strerror if isinstance(error, OSError) else "this is no name of a host"
        raise InputError(f"nothing can listen at {host[:80]}:{port}: {why}. Choose another --port or --host") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL that clients take as their base_url."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


class _Announced(uvicorn.Server):
    """Calls `started` once requests are answered, and once a signal ends it as it should."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        if self.started:
            self._announce()


def server_of(app: Starlette, *, connections: int, started: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """A server of an application that answers so many requests at once; waiting ones have connections, too.

    `started` is called when it has begun.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        access_log=False,
        log_level="error",  # its warnings are one for each request that is no HTTP, and advice about websockets
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        limit_concurrency=_OPEN_FOR_ONE * connections,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    return _Announced(config, started)


def run(app: Starlette, bound: socket.socket, *, connections: int, started: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal comes; requests that run then are finished first. `started` is called when it has begun."""
    server_of(app, connections=connections, started=started).run(sockets=[bound])
