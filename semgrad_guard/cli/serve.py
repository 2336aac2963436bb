"""`semgrad-guard serve`: the guard as a server with OpenAI's protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.log_options import LogAddress, log_address, log_folder
from semgrad_guard.cli.terminal import note
from semgrad_guard.errors import InputError, MissingExtraError
from semgrad_guard.guard.modes import ABSTAIN_MESSAGE, Mode
from semgrad_guard.named import POCKET

if TYPE_CHECKING:
    from semgrad_guard.decision_log.decision_log import DecisionLog
    from semgrad_guard.engine.generation.options import GenerationOptions
    from semgrad_guard.guard import OnError, OnUnscored, Policy, Terms
    from semgrad_guard.server.scheduler import Scheduler
    from semgrad_guard.server.service import ServedModel
    from semgrad_guard.server.tracing import Evaluations
    from semgrad_guard.server.unguarded import Unguarded
    from semgrad_guard.server.upstream import RemoteServer, RemoteTarget

SERVER = "Server"
OTHERS = "Other servers"
LOG = "Decision log"
_KEY, _UPSTREAM_KEY, _TARGET_KEY = (
    "SEMGRAD_GUARD_API_KEY",
    "SEMGRAD_GUARD_UPSTREAM_API_KEY",
    "SEMGRAD_GUARD_ESCALATION_API_KEY",
)

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME",
        parser=values.source,
        help='"pocket" (the embedded model), "smollm2" (once `fetch` has brought it), a folder with safetensors, a '
        "GGUF file, or a Hugging Face hub id; several times for several.",
        show_default="pocket",
        rich_help_panel=options.MODEL,
    ),
]
Calibrations = Annotated[
    list[str] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        parser=values.source,
        help="Made by `calibrate`. With several models, NAME=FILE for each.",
        rich_help_panel=options.DECISION,
    ),
]


def serve(  # noqa: PLR0913  # a command's options are its arguments
    *,
    model: Models = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantization_config: options.QuantizationConfig = None,
    engine: options.Engine = None,
    estimator: options.EstimatorOption = None,
    calibration: Calibrations = None,
    threshold: options.Threshold = None,
    on_unscored: options.OnUnscored = "abstain",
    mode: Annotated[
        Mode,
        typer.Option(
            metavar="MODE",
            help="enforce: withhold what is not let through; annotate or observe: deliver it with its verdict; raise: "
            "answer with an error.",
            rich_help_panel=options.DECISION,
        ),
    ] = "enforce",
    abstain_message: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            parser=values.some_text,
            help="Delivered in place of what is withheld.",
            rich_help_panel=options.DECISION,
        ),
    ] = ABSTAIN_MESSAGE,
    on_error: Annotated[
        Literal["raise", "abstain"],
        typer.Option(
            metavar="ACTION",
            help="What a late model, or another server that fails, leads to: an error, or an abstention.",
            rich_help_panel=options.DECISION,
        ),
    ] = "raise",
    allow_override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            parser=values.one_of(("mode", "threshold", "timeout")),
            help="What a request may set otherwise: mode, threshold or timeout; several times for several.",
            rich_help_panel=options.DECISION,
        ),
    ] = None,
    max_tokens: options.MaxTokens = 256,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            parser=values.source,
            help="Where to listen. Other addresses than this machine's own take an API key.",
            rich_help_panel=SERVER,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(metavar="N", parser=values.whole(0, 65535), help="0 takes a free one.", rich_help_panel=SERVER),
    ] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=values.path,
            help=f"API keys that clients must send, one a line; or one in the environment, {_KEY}.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            parser=values.source,
            help="A further name under which clients may call the server; several times for several.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            parser=values.number(0, 86_400, open_below=True),
            help="For waiting, answering, scoring and escalating together.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    queue: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=values.whole(1, 100_000),
            help="Requests that may wait for a model; more are told to come back.",
            rich_help_panel=SERVER,
        ),
    ] = 64,
    connections: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=values.whole(1, 100_000),
            help="Requests that are answered at once, waiting ones included.",
            rich_help_panel=SERVER,
        ),
    ] = 256,
    max_body: Annotated[
        int,
        typer.Option(
            metavar="BYTES", parser=values.whole(1000, 2**31), help="The longest request.", rich_help_panel=SERVER
        ),
    ] = 2_000_000,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=values.whole(1, 2**31),
            help="The longest prompt.",
            show_default="what the model can read",
            rich_help_panel=SERVER,
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            parser=values.source,
            help="A server with OpenAI's protocol that writes the answers (http://localhost:8000/v1); its key stands "
            f"in the environment, {_UPSTREAM_KEY}. --model is then a name of its own.",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            parser=values.source,
            help="With --upstream: a local copy of the weights, which scores what the upstream writes.",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    allow_unguarded: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROUTE",
            parser=values.source,
            help="With --upstream: a route of it that is passed on without a verdict (embeddings, completions, "
            "responses); several times for several. All others are refused.",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    escalate_to: Annotated[
        str | None,
        typer.Option(
            metavar="URL#MODEL",
            parser=values.source,
            help="Asked for what is not let through; passed on unscored. Its key stands in the environment, "
            f"{_TARGET_KEY}.",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    log: LogAddress = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=values.path,
            help="Where decisions are safe until the database has them: a local disk.",
            show_default="beside the log",
            rich_help_panel=LOG,
        ),
    ] = None,
    log_text: Annotated[
        bool,
        typer.Option("--log-text", help="Also write down questions and delivered answers.", rich_help_panel=LOG),
    ] = False,
    keep_log: Annotated[
        int | None,
        typer.Option(
            metavar="DAYS",
            parser=values.whole(1, 36_500),
            help="Delete decisions that are older.",
            show_default="never",
            rich_help_panel=LOG,
        ),
    ] = None,
    no_log: Annotated[bool, typer.Option("--no-log", help="Keep no decision log.", rich_help_panel=LOG)] = False,
) -> None:
    """Serve models with OpenAI's protocol; every answer carries its verdict.

    Clients change their base_url and nothing else. By default the server answers this machine alone. The embedded model
    brings its calibration along; another model needs a calibration or a threshold, or a mode that only annotates.
    """
    _require_packages()
    from semgrad_guard.server.app import Limits, make_app
    from semgrad_guard.server.hosting import allowed_hosts, listen, run, url_of
    from semgrad_guard.server.keys import Keys
    from semgrad_guard.server.service import Service

    keys = Keys([*([os.environ[_KEY]] if _KEY in os.environ else []), *(_keys_in(api_key_file))])
    hosts = allowed_hosts(host, has_keys=bool(keys), named=allow_host or ())
    maker = _Maker(
        dtype=dtype,
        device=device,
        quantization=quantization_config,
        vllm=engine,
        estimator=estimator,
        calibrations=_by_model(calibration or [], model or [POCKET]),
        threshold=threshold,
        on_unscored=on_unscored,
        mode=mode,
        abstain_message=abstain_message,
        on_error=on_error,
        timeout=timeout,
        overridable=frozenset(allow_override or ()),
        options=loading.decoding(max_tokens=max_tokens, temperature=0.0, seed=0),
        queue=queue,
        prompt_limit=max_prompt_tokens,
        target=_target(escalate_to),
    )
    server = _upstream(upstream, timeout)
    unguarded = _unguarded(server, allow_unguarded)
    models = _served(maker, model, server, scorer)
    kept = None if no_log else _open_log(log, journal, text=log_text, days=keep_log)
    app = make_app(
        Service(models, log=kept, evaluations=_evaluations()),
        keys=keys,
        limits=Limits(body_bytes=max_body, connections=connections),
        hosts=hosts,
        unguarded=unguarded,
    )
    bound = listen(host, port)
    typer.echo(f"Serving {', '.join(each.name for each in models)} at {url_of(bound)}")
    try:
        run(app, bound, connections=connections)
    except KeyboardInterrupt:
        note("Requests that had begun are finished; the server has ended.")


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """What all served models have in common."""

    dtype: str | None
    device: str | None
    quantization: Mapping[str, Any] | None
    vllm: Mapping[str, Any] | None
    estimator: str | None
    calibrations: dict[str, Path]
    threshold: float | None
    on_unscored: OnUnscored
    mode: Mode
    abstain_message: str
    on_error: OnError
    timeout: float | None
    overridable: frozenset[str]
    options: GenerationOptions
    queue: int
    prompt_limit: int | None
    target: RemoteTarget | None

    def engine(self, name: str) -> ServedModel:
        """A model that answers itself."""
        scheduler, terms = self._scheduler(name, served=False)
        return self._model(scheduler.model.name, scheduler, terms)

    def behind(self, server: RemoteServer, name: str, scorer: str) -> ServedModel:
        """A model of another server, scored by a local one."""
        from semgrad_guard.server.upstream import Upstream

        scheduler, terms = self._scheduler(scorer, served=True)
        return replace(self._model(name, scheduler, terms), upstream=Upstream(server, scheduler))

    def _model(self, name: str, scheduler: Scheduler, terms: Terms) -> ServedModel:
        from semgrad_guard.server.service import ServedModel

        return ServedModel(
            name=name,
            scheduler=scheduler,
            terms=terms,
            options=self.options,
            target=self.target,
            overridable=self.overridable,
            prompt_limit=self.prompt_limit,
        )

    def _scheduler(self, name: str, *, served: bool) -> tuple[Scheduler, Terms]:
        from semgrad_guard.calibration import DriftMonitor
        from semgrad_guard.guard import Answerer, Terms
        from semgrad_guard.server.scheduler import Scheduler

        policy = self._policy(name, served=served)
        estimator = loading.load_estimator(self.estimator, policy)
        model = loading.load_model(
            name, self.dtype, device=self.device, quantization=self.quantization, engine=None if served else self.vllm
        )
        policy.check(Answerer(model, estimator, self.options, served=served).binding())
        calibration = policy.calibration
        terms = Terms(
            policy=policy,
            mode=self.mode,
            can_escalate=self.target is not None,
            abstain_message=self.abstain_message,
            on_error=self.on_error,
            timeout=self.timeout,
            monitor=DriftMonitor(calibration) if calibration is not None and calibration.scores else None,
        )
        return Scheduler(model, estimator, limit=self.queue, served=served), terms

    def _policy(self, name: str, *, served: bool) -> Policy:
        policy = loading.load_policy(self.calibrations.get(name), self.threshold, self.on_unscored)
        changed = any(each is not None for each in (self.estimator, self.dtype, self.quantization, self.vllm))
        if policy is None and name == POCKET and not served and not changed:
            policy = loading.pocket_policy(self.on_unscored)
        if policy is not None:
            return policy
        if self.mode in ("annotate", "observe"):
            from semgrad_guard.guard.policy import lets_every_score_through

            return lets_every_score_through(self.on_unscored)
        raise InputError(
            f"nothing says which answers of {name} are let through: give --calibration or --threshold, or --mode "
            "annotate to deliver every answer with its uncertainty"
        )


def _upstream(url: str | None, timeout: float | None) -> RemoteServer | None:
    if url is None:
        return None
    from semgrad_guard.server.upstream import RemoteServer

    return RemoteServer(url, api_key=os.environ.get(_UPSTREAM_KEY), timeout=timeout or 120.0)


def _served(
    maker: _Maker, models: Sequence[str] | None, upstream: RemoteServer | None, scorer: str | None
) -> list[ServedModel]:
    if upstream is None:
        if scorer is not None:
            raise typer.BadParameter("--scorer goes with --upstream; without one, --model answers and scores itself")
        return [maker.engine(name) for name in models or [POCKET]]
    if scorer is None:
        raise typer.BadParameter("--upstream needs --scorer: a local copy of the weights that the upstream serves")
    return [maker.behind(upstream, name, scorer) for name in models or [scorer]]


def _unguarded(upstream: RemoteServer | None, routes: Sequence[str] | None) -> Unguarded | None:
    if upstream is None:
        if routes:
            raise typer.BadParameter("--allow-unguarded goes with --upstream: it names routes of that server")
        return None
    from semgrad_guard.server.unguarded import Unguarded

    return Unguarded(upstream, frozenset(routes or ()))


def _evaluations() -> Evaluations | None:
    """Where OpenTelemetry is installed, events go to it; whether they leave the process is its settings' to say."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry._logs") is None:
        return None
    from semgrad_guard.server.tracing import Evaluations

    return Evaluations()


def _target(address: str | None) -> RemoteTarget | None:
    if address is None:
        return None
    from semgrad_guard.server.upstream import RemoteServer, RemoteTarget

    url, _, model = address.partition("#")
    if not model:
        raise typer.BadParameter("--escalate-to names a model behind the URL: http://localhost:9000/v1#large")
    return RemoteTarget(RemoteServer(url, api_key=os.environ.get(_TARGET_KEY)), model)


def _by_model(given: Sequence[str], models: Sequence[str]) -> dict[str, Path]:
    """Whose calibration each file is."""
    found: dict[str, Path] = {}
    for each in given:
        name, named, path = each.partition("=")
        if named and name in models:
            found[name] = Path(path)
        elif len(models) == 1:
            found[models[0]] = Path(each)
        else:
            raise typer.BadParameter("with several models, --calibration is NAME=FILE, NAME being one of them")
    return found


def _keys_in(path: Path | None) -> list[str]:
    from semgrad_guard.server.keys import Keys

    return [] if path is None else Keys.from_file(path)


def _open_log(address: str | None, journal: Path | None, *, text: bool, days: int | None) -> DecisionLog:
    from semgrad_guard.decision_log.decision_log import DecisionLog

    found = log_address(address)
    if journal is None and "://" in str(found) and not str(found).startswith("sqlite"):
        journal = log_folder() / "journal"
    if isinstance(found, Path):
        found.parent.mkdir(parents=True, exist_ok=True)
    return DecisionLog(found, journal=journal, text=text, keep=None if days is None else timedelta(days=days))


def _require_packages() -> None:
    missing = [
        name for name in ("fastapi", "uvicorn", "prometheus_client", "sqlalchemy", "httpx") if not find_spec(name)
    ]
    if missing:
        raise MissingExtraError(*missing, extra="serve")
