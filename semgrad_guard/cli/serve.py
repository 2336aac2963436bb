"""`semgrad-guard serve`: models behind OpenAI's protocol, every answer with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from pydantic import ValidationError
from pydantic_core import from_json

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.options import option
from semgrad_guard.cli.terminal import note
from semgrad_guard.declared import first_fault
from semgrad_guard.errors import InputError, require_installed
from semgrad_guard.questions.data_files import read_text
from semgrad_guard.server.settings import ServerSettings
from semgrad_guard.settings import API_KEY, TARGET_KEY, UPSTREAM_KEY

SERVER = "Server"
OTHERS = "Other servers"


def serve(  # noqa: PLR0913  # a command's options are its arguments
    *,
    model: Annotated[
        list[str] | None,
        option(
            f"{options.MODEL_HELP}; repeat the option for several. Default: pocket.",
            options.MODEL,
            "NAME",
            reads=options.some_text,
        ),
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    template_option: options.Template = None,
    engine: options.LocalEngine = "transformers",
    estimator: options.ServedEstimator = None,
    calibration: Annotated[
        list[str] | None,
        option("Made by calibrate. With several models, NAME=FILE for each.", options.DECISION, "FILE"),
    ] = None,
    threshold: Annotated[
        float | None,
        option(
            "Let through uncertainties at or below this one, in the place of a calibration; promises nothing.",
            options.DECISION,
            "X",
            reads=options.number(float, -1e300, 1e300),
        ),
    ] = None,
    on_no_threshold: options.OnNoThreshold = "abstain",
    mode: Annotated[
        Literal["enforce", "annotate", "raise"],
        option(
            "What to do with an answer that is not let through: enforce (withhold it), annotate (deliver it with its "
            "verdict), or raise (answer with an error).",
            options.DECISION,
            "MODE",
        ),
    ] = "enforce",
    by: options.By = None,
    on_doubt: options.OnDoubt = None,
    max_tokens: options.MaxTokens = 256,
    host: Annotated[
        str,
        option(
            "Where to listen. Other addresses than this machine's own take an API key.",
            SERVER,
            "ADDRESS",
            reads=options.some_text,
        ),
    ] = "127.0.0.1",
    port: Annotated[int, option("0 takes a free one.", SERVER, "N", reads=options.number(int, 0, 65535))] = 8000,
    allow_host: Annotated[
        list[str] | None,
        option(
            "A further name under which clients may call the server; repeat the option for several.", SERVER, "NAME"
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        option(
            f"API keys that clients must send, one a line; or one in the environment, {API_KEY}.",
            SERVER,
            "FILE",
            reads=options.path,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        option(
            "Seconds for waiting, answering, scoring and escalating together. Default: no limit.",
            SERVER,
            "SECONDS",
            reads=options.number(float, 0.001, 86_400),
        ),
    ] = None,
    log: options.LogAddress = None,
    upstream: Annotated[
        str | None,
        option(
            "A server with OpenAI's protocol that writes the answers (http://localhost:8000/v1); its key stands in the "
            f"environment, {UPSTREAM_KEY}. --model is then a name of its own.",
            OTHERS,
            "URL",
        ),
    ] = None,
    scorer: Annotated[
        str | None,
        option(
            "With --upstream: a local copy of the weights, which scores what the upstream writes. Default: the "
            "upstream's own log-probabilities are the score.",
            OTHERS,
            "NAME",
        ),
    ] = None,
    escalate_to: Annotated[
        str | None,
        option(
            f"Asked for what is not let through; passed on unscored. Its key stands in the environment, {TARGET_KEY}.",
            OTHERS,
            "URL#MODEL",
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        option(
            'A file of further settings, in JSON: {"queue": 64, "log_text": true}; docs/serve.md lists them.',
            SERVER,
            "FILE",
            reads=options.path,
        ),
    ] = None,
) -> None:
    """Serve models with OpenAI's protocol; every answer carries its verdict.

    Clients change their base_url and nothing else. By default the server answers this machine alone. The embedded model
    brings its calibration along; another model needs a calibration or a threshold, or a mode that only annotates.
    """
    given: dict[str, Any] = {**locals()}  # by the names of the settings
    del given["host"], given["port"], given["settings"]
    given |= {name: tuple(given[name] or ()) for name in ("model", "calibration", "allow_host")}
    given |= {"template_option": loading.template_options(template_option) or None}
    given |= {"engine": loading.engine_arguments(engine)}
    unset = {name: (None, (), field.default) for name, field in ServerSettings.model_fields.items()}
    made = settings_of({name: value for name, value in given.items() if value not in unset[name]}, settings)
    require_installed("fastapi", "uvicorn", "prometheus_client", "sqlalchemy", "httpx", extra="serve")
    from semgrad_guard.server.assembly import assemble, keys_of
    from semgrad_guard.server.hosting import allowed_hosts, listen, run, url_of

    keys = keys_of(made)
    hosts = allowed_hosts(host, has_keys=bool(keys), named=made.allow_host)
    server = assemble(made, keys=keys, hosts=hosts, load=loading.load)
    bound = listen(host, port)
    line = f"Serving {', '.join(server.service.models)} at {url_of(bound)}"
    try:
        run(server.app, bound, connections=made.connections, started=lambda: typer.echo(line))
    except KeyboardInterrupt:
        note("Requests that had begun are finished; the server has ended.")


def settings_of(given: dict[str, Any], file: Path | None) -> ServerSettings:
    """The settings of the options and of a file.

    Raises:
        BadParameter: an option is in both, or two contradict each other.
        InputError: the file holds something else.
    """
    try:
        kept: Any = {} if file is None else from_json(read_text(file))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    if not isinstance(kept, dict):
        raise InputError(f'{file} holds no settings: write an object such as {{"queue": 64}}')
    in_file = cast("dict[str, Any]", kept)
    if twice := sorted(in_file.keys() & given.keys()):
        raise typer.BadParameter(f"{twice[0]} stands in {file} and among the options; give it once")
    try:
        return ServerSettings(**in_file, **given)
    except ValidationError as error:
        raise typer.BadParameter(first_fault(error, place=bool(in_file))) from error
