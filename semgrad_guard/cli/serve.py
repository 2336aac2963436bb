"""`semgrad-guard serve`: the guard as a server with OpenAI's protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from semgrad_guard.cli import loading
from semgrad_guard.cli.terminal import note
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import require_installed
from semgrad_guard.server.settings import ServerSettings
from semgrad_guard.settings import SERVER, require_name


def serve(
    *,
    settings: ServerSettings,
    host: Annotated[
        str,
        Option(
            "Where to listen. Other addresses than this machine's own take an API key.",
            SERVER,
            "ADDRESS",
            check=require_name,
        ),
    ] = "127.0.0.1",
    port: Annotated[int, Option("0 takes a free one.", SERVER, "N", Bounds(0, 65535))] = 8000,
) -> None:
    """Serve models with OpenAI's protocol; every answer carries its verdict.

    Clients change their base_url and nothing else. By default the server answers this machine alone. The embedded model
    brings its calibration along; another model needs a calibration or a threshold, or a mode that only annotates.
    """
    require_installed("fastapi", "uvicorn", "prometheus_client", "sqlalchemy", "httpx", extra="serve")
    from semgrad_guard.server.assembly import assemble, keys_of
    from semgrad_guard.server.hosting import allowed_hosts, listen, run, url_of

    keys = keys_of(settings)
    hosts = allowed_hosts(host, has_keys=bool(keys), named=settings.allow_host)
    server = assemble(settings, keys=keys, hosts=hosts, load=loading.load)
    bound = listen(host, port)
    line = f"Serving {', '.join(server.service.models)} at {url_of(bound)}"
    try:
        run(server.app, bound, connections=settings.connections, started=lambda: typer.echo(line))
    except KeyboardInterrupt:
        note("Requests that had begun are finished; the server has ended.")
