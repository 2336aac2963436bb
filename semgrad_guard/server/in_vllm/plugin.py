"""`GuardPlugin`: `vllm serve` answers with our routes. An endpoint plugin of vLLM's, which VLLM_PLUGINS has to name.

vLLM continues, unguarded, where a plugin cannot be imported or made. So this module imports next to nothing, and steps
that can fail come once vLLM has the plugin: from then on an error ends the server.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semgrad_guard.declared import first_fault
from semgrad_guard.errors import InputError

if TYPE_CHECKING:
    from semgrad_guard.server.assembly import Server
    from semgrad_guard.server.gate import Keys
    from semgrad_guard.server.server_settings import ServerSettings

SETTINGS = "SEMGRAD_GUARD_SETTINGS"
"""In the environment: a JSON file with the options of `semgrad-guard serve` by name."""
_KEPT = frozenset({"/health", "/ping", "/version", "/load", "/metrics", "/tokenize", "/detokenize"})
"""Routes of vLLM's that stay: none of them writes text."""
_V1 = "/v1"
_ALL = "/v1/semgrad-guard"
"""Every route of ours is there, and those below /v1 also in their usual place. vLLM checks its key below /v1 in every
version; a mount at the root, or under a name of our own, is outside its authentication in some of them."""
_OF_VLLM = ("model", "dtype", "device", "quantization_config", "engine", "upstream", "scorer")
"""Settings that `vllm serve` itself has, or that make no sense in it."""


def register() -> None:
    """vLLM calls this in each of its processes before it loads a model: keep the weights for scoring.

    vLLM does so whether VLLM_PLUGINS names the plugin or nothing; where it does not, nothing is changed.
    """
    if GuardPlugin.name in os.environ.get("VLLM_PLUGINS", "").split(","):
        from semgrad_guard.vllm.shared_weights import keep_weights

        keep_weights()


class GuardPlugin:
    """Our routes in the place of vLLM's; its own routes that write text without a judgement are gone."""

    name = "semgrad_guard"
    required_tasks = ("generate",)

    _settings: ServerSettings
    _server: Server | None = None

    def attach_router(self, app: Any) -> None:
        """Put our application behind the routes that stay.

        Raises:
            InputError: the settings cannot be read; `vllm serve` does not start.
        """
        from starlette.routing import Mount

        self._settings = settings_in(os.environ.get(SETTINGS))
        app.router.routes[:] = [route for route in app.router.routes if str(getattr(route, "path", "")) in _KEPT]
        app.router.routes += [Mount(_ALL, self._answer), Mount(_V1, self._answer_below_v1)]
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(served: Any) -> AsyncGenerator[Any]:
            async with inner(served) as state:
                yield state
            if self._server is not None:
                await asyncio.to_thread(self._server.service.close)

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Make the scoring model in the worker, and the application in front of it.

        Raises:
            SemGradGuardError: it cannot be made; `vllm serve` does not start.
        """
        keys, hosts = admission(self._settings, args)
        from transformers import AutoTokenizer

        from semgrad_guard.engine.prompts.thoughts import Codec
        from semgrad_guard.loading import load_estimator
        from semgrad_guard.server.assembly import assemble, policy_of
        from semgrad_guard.server.in_vllm.queue import WorkerQueue

        del state
        if engine_client is None:
            raise InputError("the guard needs vLLM's engine, which this server does not have")
        name = (args.served_model_name or [args.model])[0]
        settings = self._settings.model_copy(update={"model": name})
        estimator = load_estimator(settings.estimator, policy_of(settings, name))
        config = engine_client.model_config
        tokenizers: Any = AutoTokenizer
        codec = Codec(tokenizers.from_pretrained(config.tokenizer, revision=config.tokenizer_revision))
        queue = WorkerQueue(engine_client, name, estimator, codec, limit=settings.connections)
        await queue.open(settings)
        self._server = assemble(settings, keys=keys, hosts=hosts, queue=queue)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if self._server is None:
            raise InputError("the server has not begun yet")
        await self._server.app(scope, receive, send)

    async def _answer_below_v1(self, scope: Any, receive: Any, send: Any) -> None:
        """Our routes have /v1 in their own paths, so that the mount's prefix is not taken off."""
        await self._answer({**scope, "root_path": scope["root_path"].removesuffix(_V1)}, receive, send)


def admission(settings: ServerSettings, args: Any) -> tuple[Keys, frozenset[str] | None]:
    """The keys that open the server, vLLM's and ours, and its names by the address at which vLLM listens.

    Args:
        settings: ours.
        args: the options of `vllm serve`.

    Raises:
        InputError: others could reach the server, and it has no key.
    """
    from semgrad_guard.server.assembly import allowed_hosts, keys_of

    of_vllm = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]  # as vLLM chooses
    keys = keys_of(settings, of_host=of_vllm)
    host = "localhost" if getattr(args, "uds", None) else args.host or "0.0.0.0"  # noqa: S104 - where vLLM listens
    return keys, allowed_hosts(
        host,
        has_keys=bool(keys),
        named=settings.allow_host,
        remedy="start `vllm serve` with --api-key KEY, or with --host 127.0.0.1",
    )


def settings_in(path: str | None) -> ServerSettings:
    """The settings in a file.

    Raises:
        InputError: it is not named, cannot be read, or holds options of `vllm serve`.
    """
    from pydantic import ValidationError

    from semgrad_guard.server.server_settings import ServerSettings

    if path is None:
        raise InputError(
            f'{SETTINGS} names no file: write one such as {{"calibration": "calibration.json"}}, or '
            '{"mode": "annotate"} to deliver every answer with its uncertainty'
        )
    try:
        settings = ServerSettings.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{SETTINGS} names {path}, which cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise InputError(f"{path}: {first_fault(error)}") from error
    if foreign := sorted(settings.model_fields_set & set(_OF_VLLM)):
        raise InputError(f"{path}: leave {', '.join(foreign)} out; they are options of `vllm serve`")
    return settings
