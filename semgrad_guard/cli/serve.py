"""`semgrad-guard serve`: the guard as a server with OpenAI's protocol."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.terminal import note
from semgrad_guard.errors import MissingExtraError
from semgrad_guard.guard.modes import ABSTAIN_MESSAGE, Mode
from semgrad_guard.server.settings import API_KEY, TARGET_KEY, UPSTREAM_KEY, ServerSettings

SERVER = "Server"
OTHERS = "Other servers"

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME",
        parser=values.source,
        help=f"{options.MODEL_HELP}; repeat the option for several.",
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
    template_option: options.TemplateOption = None,
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
            help="If the model times out or an upstream server fails: return an error, or abstain.",
            rich_help_panel=options.DECISION,
        ),
    ] = "raise",
    allow_override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            parser=values.one_of(("mode", "threshold", "timeout")),
            help="What a request may set otherwise: mode, threshold or timeout; repeat the option for several.",
            rich_help_panel=options.DECISION,
        ),
    ] = None,
    allow_score: Annotated[
        bool,
        typer.Option(
            "--allow-score",
            help="Let clients have texts of their own scored (/v1/score) in the modes that withhold answers, too. Who "
            "can, can try guesses at a withheld answer.",
            rich_help_panel=options.DECISION,
        ),
    ] = False,
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
            help=f"API keys that clients must send, one a line; or one in the environment, {API_KEY}.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            parser=values.source,
            help="A further name under which clients may call the server; repeat the option for several.",
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
            help="Requests that may wait for a model; further ones are refused, to be sent again.",
            rich_help_panel=SERVER,
        ),
    ] = 64,
    max_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=values.whole(1, 100_000),
            help="Answers written in one batch. 1 gives the texts of single runs, also in half precision.",
            rich_help_panel=SERVER,
        ),
    ] = None,
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
            f"in the environment, {UPSTREAM_KEY}. --model is then a name of its own.",
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
            "responses); repeat the option for several. All others are refused.",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    escalate_to: Annotated[
        str | None,
        typer.Option(
            metavar="URL#MODEL",
            parser=values.source,
            help="Asked for what is not let through; passed on unscored. Its key stands in the environment, "
            f"{TARGET_KEY}.",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    log: options.LogAddress = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=values.path,
            help="A folder on a local disk: decisions are safe there until the database has them.",
            show_default="next to the log",
            rich_help_panel=options.LOG,
        ),
    ] = None,
    log_text: Annotated[
        bool,
        typer.Option(
            "--log-text", help="Also write down questions and delivered answers.", rich_help_panel=options.LOG
        ),
    ] = False,
    keep_log: Annotated[
        int | None,
        typer.Option(
            metavar="DAYS",
            parser=values.whole(1, 36_500),
            help="Delete decisions that are older.",
            show_default="never",
            rich_help_panel=options.LOG,
        ),
    ] = None,
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Keep no decision log.", rich_help_panel=options.LOG)
    ] = False,
) -> None:
    """Serve models with OpenAI's protocol; every answer carries its verdict.

    Clients change their base_url and nothing else. By default the server answers this machine alone. The embedded model
    brings its calibration along; another model needs a calibration or a threshold, or a mode that only annotates.
    """
    _require_packages()
    from semgrad_guard.server.assembly import assemble, keys_of
    from semgrad_guard.server.hosting import allowed_hosts, listen, run, url_of

    settings = _settings(
        model=tuple(model or ()) or None,
        dtype=dtype,
        device=device,
        quantization_config=quantization_config,
        template_option=dict(template_option or ()),
        engine=engine,
        estimator=estimator,
        calibration=tuple(calibration or ()),
        threshold=threshold,
        on_unscored=on_unscored,
        mode=mode,
        abstain_message=abstain_message,
        on_error=on_error,
        allow_override=frozenset(allow_override or ()),
        allow_score=allow_score,
        max_tokens=max_tokens,
        api_key_file=api_key_file,
        allow_host=tuple(allow_host or ()),
        timeout=timeout,
        queue=queue,
        max_batch=max_batch,
        connections=connections,
        max_body=max_body,
        max_prompt_tokens=max_prompt_tokens,
        upstream=upstream,
        scorer=scorer,
        allow_unguarded=tuple(allow_unguarded or ()),
        escalate_to=escalate_to,
        log=log,
        journal=journal,
        log_text=log_text,
        keep_log=keep_log,
        no_log=no_log,
    )
    keys = keys_of(settings)
    hosts = allowed_hosts(host, has_keys=bool(keys), named=settings.allow_host)
    server = assemble(settings, keys=keys, hosts=hosts, load=loading.load)
    bound = listen(host, port)
    line = f"Serving {', '.join(server.service.models)} at {url_of(bound)}"
    try:
        run(server.app, bound, connections=connections, started=lambda: typer.echo(line))
    except KeyboardInterrupt:
        note("Requests that had begun are finished; the server has ended.")


def _settings(**given: Any) -> ServerSettings:
    try:
        return ServerSettings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise typer.BadParameter(first["msg"].removeprefix("Value error, ")) from error


def _require_packages() -> None:
    missing = [
        name for name in ("fastapi", "uvicorn", "prometheus_client", "sqlalchemy", "httpx") if not find_spec(name)
    ]
    if missing:
        raise MissingExtraError(*missing, extra="serve")
