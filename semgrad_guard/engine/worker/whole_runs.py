"""Requests that are answered in whole runs of the model, from the first token to the last."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.worker.request import Job, Request
from semgrad_guard.engine.writing_model import WritingModel

_CELLS = 1 << 11  # tokens of a batch for each of its rows, padding counted: they bound its memory


class WholeRuns:
    """Each run of the model answers one request, or several that are alike, from the first token to the last.

    Up to so many `rows`; where it `pads`, their prompts may be of unequal length. `looks_behind`: a request may begin
    together with the first of the queue, before others between them, which cannot.
    """

    looks_behind = True

    def __init__(self, rows: int, *, pads: bool = True) -> None:
        self._most, self._pads = rows, pads

    def has_room(self, jobs: Sequence[Job], *, beside: int) -> bool:
        """Whether these can be one run: of one model, objective and options, with no client that listens."""
        del beside
        submitted = [job.submitted for job in jobs]
        if len(submitted) == 1:
            return True
        model, first = submitted[0]
        options = {own for _, one in submitted for own in one.options}
        alike = len(options) == 1 and first.options[0].seed is None
        alike = alike and all(
            own is model and one.objective == first.objective and one.on_piece is None for own, one in submitted
        )
        rows = sum(len(one.options) for _, one in submitted)
        most = self._most + sum(job.extra_rows for job in jobs)
        longest = max(len(one.prompt.ids) + one.options[0].max_tokens for _, one in submitted)
        limit = model.fixed_positions
        fit = rows <= most and rows * longest <= _CELLS * most and (limit is None or longest <= limit)
        level = self._pads or len({len(one.prompt.ids) for _, one in submitted}) == 1
        return alike and fit and level

    def begin(self, jobs: Sequence[Job]) -> None:
        """Answer them, one alone under its stops; where several fail, each by itself."""
        results = None
        if len(jobs) > 1:
            with suppress(BaseException):  # raised again by the request that causes it
                results = _together([job.submitted for job in jobs])
        for index, job in enumerate(jobs):
            if results is None:
                job.settle(lambda job=job: self._alone(*job.submitted))
            else:
                job.settle(lambda own=results[index]: own)

    def _alone(self, model: WritingModel, request: Request[Any]) -> Any:
        """The result of one request, its answers together where they differ in their seeds alone, as rows of a run."""
        rows = len(request.options)
        if rows <= self._most and request.options == request.options[0].rows(rows):
            return _together([(model, request)])[0]
        with model.turn:
            singly = [_run(model, [replace(request, options=(options,))])[0] for options in request.options]
            return request.finish(singly)


def _together(submitted: Sequence[tuple[WritingModel, Request[Any]]]) -> list[Any]:
    """The results of requests to one model, written in one run."""
    model, requests = submitted[0][0], [request for _, request in submitted]
    with model.turn:  # in which the model is looked at once, for the answers and for their scores
        written = iter(_run(model, requests))
        return [request.finish([next(written) for _ in request.options]) for request in requests]


def _run(model: WritingModel, requests: Sequence[Request[Any]]) -> list[Generation]:
    first = requests[0]
    prompts = [request.prompt for request in requests for _ in request.options]
    return model.write(prompts, first.options[0], first.objective, on_piece=first.on_piece)
