"""Prometheus metrics: how many answers of which kind, how uncertain, how long; no text."""

from __future__ import annotations

import platform
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import semgrad_guard
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.calibration.promise import State
from semgrad_guard.decision_log.entries import BLOCK
from semgrad_guard.records import Verdict, VerdictDetails
from semgrad_guard.server.scheduler import ModelQueue

if TYPE_CHECKING:  # it needs the extra `log`
    from semgrad_guard.decision_log.decision_log import DecisionLog

_SCORES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_WAITS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

Served = tuple[str, ModelQueue, DriftMonitor | None]
"""A model's name, its queue, and the monitor of its scores."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one server with these models and this log, in a registry of their own."""

    def __init__(self, models: Iterable[Served], log: DecisionLog | None) -> None:
        self._registry = registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        build = {"version": semgrad_guard.__version__, "python": platform.python_version()}
        Info("semgrad_guard_build", "The program.", registry=registry).info(build)
        self._requests = counter("semgrad_guard_requests", "Answers by delivery.", ["model", "action"])
        against = "Answers delivered against the advice, as nothing is enforced."
        self._flagged = counter("semgrad_guard_flagged", against, ["model"])
        self._unscored = counter("semgrad_guard_unscored", "Answers without a score.", ["model"])
        self._errors = counter("semgrad_guard_errors", "Requests that were answered with an error.", ["code"])
        self._tokens = counter("semgrad_guard_tokens", "Tokens of prompts and of delivered answers.", ["model", "kind"])
        saved = "Tokens of prompts and answers that were not sent to an escalation target."
        self._saved = counter("semgrad_guard_saved_tokens", saved, ["model", "kind"])
        target = "Tokens of prompts and answers of an escalation target, as far as it counts them."
        self._target = counter("semgrad_guard_target_tokens", target, ["model", "kind"])
        drafts = f"Tokens of drafts that were escalated; {BLOCK} drafts are added at once."
        self._drafts = counter("semgrad_guard_draft_tokens", drafts, ["model"])
        self._waiting = dict[str, list[int]]()
        delivered = "Uncertainty of delivered answers."
        self._uncertainty = histogram("semgrad_guard_uncertainty", delivered, ["model"], buckets=_SCORES)
        scoring = "Time of scoring delivered answers."
        self._seconds = histogram("semgrad_guard_score_seconds", scoring, ["model"], buckets=_SECONDS)
        took = "Time of requests for answers, from reading them to their end."
        self._latency = histogram("semgrad_guard_request_seconds", took, ["model"], buckets=_WAITS)
        running = "Requests for answers in work."
        self._running = Gauge("semgrad_guard_requests_in_flight", running, ["model"], registry=registry)
        registry.register(_AtScrape(models, log))

    def decided(self, model: str, verdict: Verdict) -> None:
        """One answer was delivered, or withheld; a histogram's sum would tell the score of one that was withheld."""
        self._requests.labels(model, verdict.delivery).inc()
        if verdict.delivery != verdict.action:
            self._flagged.labels(model).inc()
        if verdict.uncertainty is None:
            self._unscored.labels(model).inc()
        if verdict.escalated is not None:
            self._escalated(model, verdict.details.scored_tokens, verdict.escalated.details)
        if not verdict.shows_draft:
            return
        self._saved.labels(model, "prompt").inc(verdict.details.prompt_tokens or 0)
        self._saved.labels(model, "completion").inc(verdict.details.scored_tokens)
        if verdict.uncertainty is not None:
            self._uncertainty.labels(model).observe(verdict.uncertainty)
        if verdict.details.scoring_ms is not None:
            self._seconds.labels(model).observe(verdict.details.scoring_ms / 1000)

    def _escalated(self, model: str, tokens: int, target: VerdictDetails) -> None:
        """Of one draft nothing is counted before there are others."""
        self._target.labels(model, "prompt").inc(target.prompt_tokens or 0)
        self._target.labels(model, "completion").inc(target.answer_tokens or target.scored_tokens)
        waiting = self._waiting.setdefault(model, [])
        waiting.append(tokens)
        if len(waiting) == BLOCK:
            self._drafts.labels(model).inc(sum(waiting))
            waiting.clear()

    @contextmanager
    def working(self, model: str) -> Generator[None]:
        """While this lasts, a request for answers is in work."""
        with self._running.labels(model).track_inprogress(), self._latency.labels(model).time():
            yield

    def used(self, model: str, usage: Mapping[str, Any]) -> None:
        """The tokens of one request, as its client gets them."""
        for kind in ("prompt", "completion"):
            self._tokens.labels(model, kind).inc(usage[f"{kind}_tokens"])

    def failed(self, code: str) -> None:
        """One request was answered with an error."""
        self._errors.labels(code).inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


class _AtScrape(Collector):
    """What is read when a scrape comes: queues, drift alarms, the log, and whether its promises hold."""

    def __init__(self, models: Iterable[Served], log: DecisionLog | None) -> None:
        self._models, self._log = tuple(models), log

    def collect(self) -> Iterable[Metric]:
        """The values now."""
        depth = GaugeMetricFamily("semgrad_guard_queue_depth", "Requests that wait.", labels=["model"])
        drift = GaugeMetricFamily("semgrad_guard_drift", "1 where scores have moved.", labels=["model"])
        for name, queue, monitor in self._models:
            depth.add_metric([name], queue.depth)
            if monitor is not None:
                drift.add_metric([name], float(monitor.report().alarm))
        failures = 0 if self._log is None else self._log.failures
        lost = "Decisions that could not be written down."
        yield from (depth, drift, CounterMetricFamily("semgrad_guard_log_failures", lost, value=failures))
        pending = 0 if self._log is None else self._log.pending
        yield GaugeMetricFamily("semgrad_guard_log_pending", "Decisions not yet in the database.", value=pending)
        yield from self._promises()

    def _promises(self) -> Iterable[Metric]:
        states = "1 in the state of the promise: kept, unknown or broken."
        state = GaugeMetricFamily("semgrad_guard_promise", states, labels=["calibration", "state"])
        bounds = "Between these the error rate of the answers let through lies."
        bound = GaugeMetricFamily("semgrad_guard_promise_error", bounds, labels=["calibration", "bound"])
        grades = GaugeMetricFamily("semgrad_guard_promise_grades", "Random grades that count.", labels=["calibration"])
        for one in () if self._log is None else self._log.watched:
            calibration = str(one.calibration_id)
            for name in get_args(State):
                state.add_metric([calibration, name], float(one.state == name))
            for name, value in (("low", one.low), ("high", one.high)):
                bound.add_metric([calibration, name], value)
            grades.add_metric([calibration], one.labels)
        return state, bound, grades
