"""A Ray cluster for as long as it is needed: one that runs already, or one in this process."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from semgrad_guard.errors import ClusterError, MissingExtraError
from semgrad_guard.files import first_line

_SECONDS = 10
"""A machine that is there answers within these."""


def library() -> Any:
    """The package `ray`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", extra="ray") from error
    return ray


@contextmanager
def cluster(address: str = "local", *, verbose: bool = False, **options: Any) -> Generator[Any]:
    """The package `ray`, connected until the end; one that is connected already stays so.

    Args:
        address: `local` (one in this process), `auto` (the one on this machine), `HOST:PORT` or `ray://HOST:PORT`.
        verbose: whether workers' output is shown here.
        options: further ones of `ray.init`.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: there is no cluster at the address.
    """
    # Ray reports its use over the network, and starts pages for a browser, unless this is switched off.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = library()
    if ray.is_initialized():
        yield ray
        return
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # where nothing listens, Ray would try again for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()
        with _own_signals():
            ray.init(address=address, log_to_driver=verbose, logging_level="ERROR", **local, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ClusterError(
            f"There is no Ray cluster at {address!r}: {first_line(error)}. Start one (ray start --head), set "
            "RAY_AUTH_MODE=token where it asks for a token, or leave the address away: a cluster of one then starts in "
            "this process."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Generator[None]:
    """Ray takes SIGTERM for itself; afterwards the previous handler has it again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def workers_for(ray: Any, wanted: int | None, *, on_gpu: bool) -> int:
    """How many workers: as many as wanted, or one a GPU; where the model is on CPUs, one a machine.

    Raises:
        ClusterError: the model needs a GPU and the cluster has none.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if on_gpu and not gpus:
        raise ClusterError("The cluster has no GPU. Add a machine that has one, or leave --device cuda away.")
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    return wanted or (gpus if on_gpu else max(1, len(alive)))


def cpus_each(ray: Any, workers: int) -> int:
    """The share of the cluster's CPUs that a worker takes; no more than the smallest machine has."""
    counts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    usable = [count for count in counts if count]
    share = math.floor(sum(usable) / workers)
    return max(1, min([share, *usable]))
