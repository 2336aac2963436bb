"""`semgrad-guard serve`: models behind OpenAI's protocol, every answer with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import typer
from pydantic import ValidationError
from pydantic_core import from_json

from semgrad_guard.cli import loading
from semgrad_guard.cli.terminal import note
from semgrad_guard.declared import first_fault
from semgrad_guard.errors import InputError, require_installed
from semgrad_guard.questions.data_files import read_text
from semgrad_guard.server.settings import ServerSettings
from semgrad_guard.settings import DtypeName, JudgedBy, Mode, OnDoubt, OnNoThreshold


def serve(  # noqa: PLR0913  # a command's options are its arguments
    *,
    model: list[str] | None = None,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: loading.Pairs | None = None,
    engine: str = "transformers",
    estimator: str | None = None,
    calibration: list[str] | None = None,
    threshold: float | None = None,
    on_no_threshold: OnNoThreshold = "abstain",
    mode: Mode = "enforce",
    by: JudgedBy | None = None,
    on_doubt: OnDoubt | None = None,
    max_tokens: int = 256,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: list[str] | None = None,
    api_key_file: Path | None = None,
    timeout: float | None = None,
    log: str | None = None,
    upstream: str | None = None,
    scorer: str | None = None,
    escalate_to: str | None = None,
    settings: Path | None = None,
) -> None:
    """Serve models with OpenAI's protocol; every answer carries its verdict.

    Clients change their base_url and nothing else. By default the server answers this machine alone. The embedded model
    brings its calibration along; another model needs a calibration or a threshold, or a mode that only annotates.
    """
    given: dict[str, Any] = {**locals()}  # by the names of the settings
    del given["host"], given["port"], given["settings"]
    given |= {name: tuple(given[name] or ()) for name in ("model", "calibration", "allow_host")}
    given |= {"template_option": dict(template_option or ()) or None}
    given |= {"engine": loading.engine_arguments(engine)}
    unset = {name: (None, (), field.default) for name, field in ServerSettings.model_fields.items()}
    made = settings_of({name: value for name, value in given.items() if value not in unset[name]}, settings)
    require_installed("starlette", "uvicorn", "prometheus_client", "sqlalchemy", "httpx", extra="serve")
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
