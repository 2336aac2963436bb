"""Prometheus metrics: how many answers of which kind, how uncertain, how long; no text."""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import semgrad_guard
from semgrad_guard.calibration.promise import PromiseState, State
from semgrad_guard.records import Verdict

_SCORES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_WAITS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        model = ["model"]
        self._requests = counter("semgrad_guard_requests", "Answers by delivery.", ["model", "action"])
        against = "Answers delivered against the advice, as nothing is enforced."
        self._flagged = counter("semgrad_guard_flagged", against, model)
        delivered = "Uncertainty of delivered answers."
        self._uncertainty = histogram("semgrad_guard_uncertainty", delivered, model, buckets=_SCORES)
        scoring = "Time of scoring delivered answers."
        self._seconds = histogram("semgrad_guard_score_seconds", scoring, model, buckets=_SECONDS)
        took = "Time of requests for answers, from reading them to their end."
        self._latency = histogram("semgrad_guard_request_seconds", took, model, buckets=_WAITS)
        self._running = gauge("semgrad_guard_requests_in_flight", "Requests for answers in work.", model)
        self._tokens = counter("semgrad_guard_tokens", "Tokens of prompts and of delivered answers.", ["model", "kind"])
        Info("semgrad_guard_build", "The program.", registry=self._registry).info(
            {"version": semgrad_guard.__version__, "python": platform.python_version()}
        )
        self._unscored = counter("semgrad_guard_unscored", "Answers without a score.", model)
        self._errors = counter("semgrad_guard_errors", "Requests that were answered with an error.", ["code"])
        self._unguarded = counter("semgrad_guard_unguarded", "Requests passed on without a verdict.", ["route"])
        self._drift = gauge("semgrad_guard_drift", "1 where scores have moved.", model)
        self._depth = gauge("semgrad_guard_queue_depth", "Requests that wait.", model)
        self._log_failures = _Watched("semgrad_guard_log_failures", "Decisions that could not be written down.")
        self._registry.register(self._log_failures)
        self._promises = _Promises()
        self._registry.register(self._promises)
        self._log_pending = gauge("semgrad_guard_log_pending", "Decisions not yet in the database.")

    def decided(self, model: str, verdict: Verdict) -> None:
        """One answer was delivered, or withheld; a histogram's sum would tell the score of one that was withheld."""
        self._requests.labels(model, verdict.delivery).inc()
        if verdict.delivery != verdict.action:
            self._flagged.labels(model).inc()
        if verdict.uncertainty is None:
            self._unscored.labels(model).inc()
        if not verdict.shows_draft:
            return
        if verdict.uncertainty is not None:
            self._uncertainty.labels(model).observe(verdict.uncertainty)
        if verdict.details.scoring_ms is not None:
            self._seconds.labels(model).observe(verdict.details.scoring_ms / 1000)

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

    def passed_on(self, route: str) -> None:
        """One request went to the upstream, whose answer is not judged."""
        self._unguarded.labels(route).inc()

    def watch_queue(self, model: str, depth: Callable[[], int]) -> None:
        """Read the depth of a model's queue at every scrape."""
        self._depth.labels(model).set_function(depth)

    def watch_drift(self, model: str, alarm: Callable[[], bool]) -> None:
        """Read a model's drift alarm at every scrape: verdicts arrive in another order than their scores."""
        self._drift.labels(model).set_function(alarm)

    def watch_log(self, failures: Callable[[], int], pending: Callable[[], int]) -> None:
        """Read the decision log's counts at every scrape."""
        self._log_failures.count = failures
        self._log_pending.set_function(pending)

    def watch_promises(self, promises: Callable[[], Sequence[PromiseState]]) -> None:
        """Read the states of the promises at every scrape."""
        self._promises.read = promises

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


class _Promises(Collector):
    """Whether promises hold, by the grades of answers that were drawn at random."""

    def __init__(self) -> None:
        self.read: Callable[[], Sequence[PromiseState]] = lambda: ()

    def collect(self) -> Iterable[Metric]:
        """Their states now."""
        states = "1 in the state of the promise: kept, unknown or broken."
        state = GaugeMetricFamily("semgrad_guard_promise", states, labels=["calibration", "state"])
        bounds = "Between these the error rate of the answers let through lies."
        bound = GaugeMetricFamily("semgrad_guard_promise_error", bounds, labels=["calibration", "bound"])
        grades = GaugeMetricFamily("semgrad_guard_promise_grades", "Random grades that count.", labels=["calibration"])
        for one in self.read():
            calibration = str(one.calibration_id)
            for name in get_args(State):
                state.add_metric([calibration, name], float(one.state == name))
            for name, value in (("low", one.low), ("high", one.high)):
                bound.add_metric([calibration, name], value)
            grades.add_metric([calibration], one.labels)
        return state, bound, grades


class _Watched(Collector):
    """A counter whose value is kept elsewhere."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name, self._documentation = name, documentation
        self.count: Callable[[], int] = lambda: 0

    def collect(self) -> Iterable[Metric]:
        """Its value now."""
        yield CounterMetricFamily(self._name, self._documentation, value=self.count())
