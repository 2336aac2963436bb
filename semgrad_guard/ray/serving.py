"""`app`: the server behind Ray Serve. Each replica is the whole server in a process of its own, with its own model."""
# No `from __future__ import annotations`: Ray reads the type of the builder's argument.

import os
from importlib import import_module
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from semgrad_guard.errors import ClusterError, require_installed
from semgrad_guard.server.settings import ServerSettings
from semgrad_guard.settings import DRAIN_SECONDS, LOG_VARIABLE


class ReplicaSettings(ServerSettings, frozen=True):
    """The options of `semgrad-guard serve`, and how many replicas there are.

    Between `min_replicas` and `max_replicas` run, so many that each has `target_requests` at once. Each takes `cpus`
    and `gpus` of the cluster. `log` is one that every replica reaches; there is no default.

    Raises:
        ValidationError: a setting is out of its range, or two contradict each other.
    """

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1
    target_requests: PositiveInt = 16
    cpus: NonNegativeFloat = 1
    gpus: NonNegativeFloat = 0
    health_check_seconds: NonNegativeFloat = 10
    drain_seconds: NonNegativeFloat = DRAIN_SECONDS

    @model_validator(mode="after")
    def _shared(self) -> "ReplicaSettings":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}")
        if self.log is None and not self.no_log and LOG_VARIABLE not in os.environ:
            raise ValueError(
                "replicas share one decision log: give log=postgresql+psycopg://USER@HOST/NAME, or a file where all "
                "of them are on one machine (log=/data/decisions.db), or no_log=true"
            )
        return self


class Replica:
    """One process of Ray's: the server, assembled as `semgrad-guard serve` assembles it."""

    def __init__(self, settings: ReplicaSettings) -> None:
        from semgrad_guard.server.assembly import assemble, keys_of
        from semgrad_guard.server.hosting import allowed_hosts

        keys = keys_of(settings)
        # Where Ray's proxies listen: who can reach them can reach every replica.
        host = _library("serve.context")._get_global_client().http_config.host
        hosts = allowed_hosts(host, has_keys=bool(keys), named=settings.allow_host)
        self._server = assemble(settings, keys=keys, hosts=hosts)

    def __serve_build_asgi_app__(self) -> Any:
        """The application that Ray puts behind its proxies; Ray calls it by this name."""
        return self._server.app

    def check_health(self) -> None:
        """Ray's check every few seconds; it replaces a replica that raises.

        Raises:
            ClusterError: a model's thread has ended.
        """
        if dead := [name for name, served in self._server.service.models.items() if not served.scheduler.is_alive]:
            raise ClusterError(f"the thread of {', '.join(dead)} has ended; this replica answers nothing any more")


def app(settings: ReplicaSettings) -> Any:
    """Build the server for Ray Serve: `serve run semgrad_guard.ray:app model=pocket log=/data/decisions.db`.

    Args:
        settings: read from `key=value` arguments, or from `args` in a configuration file of Ray Serve.

    Returns:
        A Ray Serve `Application` of one deployment, named `guard`.

    Raises:
        MissingExtraError: Ray Serve, or a package of the server, is not installed.
    """
    serve = _library("serve")
    scaling: dict[Literal["num_replicas", "autoscaling_config"], Any] = (
        {"num_replicas": settings.min_replicas}
        if settings.min_replicas == settings.max_replicas
        else {
            "autoscaling_config": {
                "min_replicas": settings.min_replicas,
                "max_replicas": settings.max_replicas,
                "target_ongoing_requests": settings.target_requests,
            }
        }
    )
    deployment = serve.deployment(
        name="guard",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        max_ongoing_requests=settings.connections,  # the server has its own queue, and names a time to retry
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=settings.health_check_seconds,
        **scaling,
    )
    return deployment(serve.ingress()(Replica)).bind(settings)


def _library(module: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports its use over the network, unless told not to
    require_installed("fastapi", "ray", extra="ray,serve")
    return import_module(f"ray.{module}")
