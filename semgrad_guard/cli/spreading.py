"""`--ray`: the batches of a command go to workers of a Ray cluster, each with a copy of the model."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import typer

from semgrad_guard.cli.terminal import is_verbose, status
from semgrad_guard.loading import ModelSource

if TYPE_CHECKING:
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.evaluation.job_record import Row
    from semgrad_guard.evaluation.runs.run import Batch, Spread
    from semgrad_guard.ray.pool import Recipe

A = TypeVar("A", bound="Row")


@dataclass(frozen=True)
class Cluster:
    """The options: where the cluster is, if there is to be one, and how many workers load the model."""

    address: str | None = None
    workers: int | None = None

    @classmethod
    def of(cls, address: str | None, workers: int | None) -> Cluster:
        """The options, refused before any work where they cannot be followed.

        Raises:
            MissingExtraError: Ray is not installed.
        """
        if address is None:
            if workers is not None:
                raise typer.BadParameter("--workers is for --ray; give both")
            return cls()
        from semgrad_guard.ray.cluster import library

        library()
        return cls(address, workers)

    @property
    def is_used(self) -> bool:
        """Whether batches are spread at all."""
        return self.address is not None


@contextmanager
def spreading(
    cluster: Cluster, model: LanguageModel, source: ModelSource, recipe: Recipe[list[A]]
) -> Generator[Spread[A] | None]:
    """A function that spreads batches for as long as this lasts, on request; the first batch starts the cluster."""
    address = cluster.address
    if address is None:
        yield None
        return
    if source.engine is not None:
        raise typer.BadParameter("--ray spreads answers of transformers; leave out --engine, or --ray")
    from semgrad_guard.ray.cluster import cluster as connected
    from semgrad_guard.ray.pool import Job, spread

    job = Job(source.for_workers(model.identity), recipe)
    with ExitStack() as opened:

        def run(batches: Iterable[Batch]) -> Iterator[list[A]]:
            with status("Starting Ray …"):
                ray = opened.enter_context(connected(address, verbose=is_verbose()))
            return spread(ray, job, batches, workers=cluster.workers)

        yield run
