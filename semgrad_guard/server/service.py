"""`Service`: the served models, each with its policy. Drafts go through the guard's flow, which decides.

Its `Metrics` are for Prometheus: how many answers of which kind, how uncertain, how long; no text.
"""

from __future__ import annotations

import platform
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import semgrad_guard
from semgrad_guard.adapters.traces import EvaluationLog
from semgrad_guard.calibration import Calibration, DriftMonitor
from semgrad_guard.calibration.calibration_record import report
from semgrad_guard.calibration.monitors import State
from semgrad_guard.decision_log.entries import BLOCK, DecisionSink, Facts
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.interruption import Stop
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard import (
    Ask,
    Draft,
    Live,
    OnDoubt,
    Outcome,
    Piece,
    StreamSteps,
    Terms,
    Work,
    adrive,
    answers,
    arun_stream,
    one,
    settle,
    streamed,
)
from semgrad_guard.named import reading_prompt
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import KEY, Answer, Cuts, public_record
from semgrad_guard.server.gate import HttpError
from semgrad_guard.server.protocol import CUTS, ChatRequest, Forwarded, ScoreRequest
from semgrad_guard.server.scheduler import AnswerRequest, ForeignText, ModelQueue
from semgrad_guard.server.upstream import RemoteTarget, Upstream, UpstreamRequest

if TYPE_CHECKING:  # it needs the extra `log`
    from semgrad_guard.decision_log.decision_log import DecisionLog


_MOST_OF_UPSTREAM = 128
"""How many answers of another server one request may have; OpenAI's own limit."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedModel:
    """One model under the name that clients use.

    Args:
        name: the name.
        scheduler: owns the model that answers, or that scores the upstream's answers.
        terms: how the guard decides.
        options: the defaults of generation; `max_tokens` is also the highest that a request may set.
        upstream: the server that writes the drafts, where the model itself does not.
        target: the server that answers in the place of drafts that are not let through.
        most: how many answers one request may have.
        prompt_limit: how many tokens a prompt may have.
        scores_texts: whether clients may have texts of their own scored where answers are withheld: such a client can
            compare guesses at a withheld answer.
        by_sentence: the action at a doubtful sentence; None: whole answers are judged.
    """

    name: str
    scheduler: ModelQueue
    terms: Terms
    options: GenerationOptions = field(default_factory=GenerationOptions)
    upstream: Upstream | None = None
    target: RemoteTarget | None = None
    most: int = 8
    prompt_limit: int | None = None
    scores_texts: bool = False
    by_sentence: OnDoubt | None = None

    @property
    def scores(self) -> bool:
        """Whether clients may have texts of their own scored."""
        return self.scores_texts or not self.terms.withholds

    def described(self, created: int) -> dict[str, Any]:
        """The model as GET /v1/models lists it."""
        policy = self.terms.policy
        guard = {
            "estimator": self.scheduler.estimator_name,
            "mode": self.terms.mode,
            "on_doubt": self.by_sentence,
            "threshold": policy.recorded_threshold,
            "calibration_id": policy.calibration_id,
            "report": None if policy.calibration is None else report(policy.calibration),
            "escalates": self.target is not None,
            "written_by": "upstream" if self.upstream is not None else "engine",
            "batching": None if self.upstream is not None else self.scheduler.batching,
            "scores_texts": self.scores,
            "reading_prompt": reading_prompt(self.name),
        }
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "semgrad-guard",
            "semgrad_guard": guard,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One request in work: its model, its terms, and how another server or our own engine answers it.

    `answer` has scored drafts written, `live` one of them piece by piece. `cuts` are made after the decision; None
    where the answer is written as the client cuts it.
    """

    request: ChatRequest
    body: Mapping[str, Any]
    served: ServedModel
    terms: Terms
    stop: Stop
    answer: Callable[[], Awaitable[Sequence[Draft[Answer]]]]
    live: Callable[[], Live[Any]]
    cuts: Cuts | None = None

    @property
    def ask(self) -> Ask | None:
        """The target's work for the drafts that wait for it."""
        target, estimator = self.served.target, self.served.scheduler.estimator_name
        if target is None:
            return None
        how: Any = {"estimator": estimator, "limit": self.served.options.max_tokens}
        return lambda places: Work.awaited(lambda: target.ask(self.body, len(places), **how))


class Service:
    """The answers behind the routes.

    Args:
        models: at least one; the names differ.
        log: keeps every decision.
        evaluations: emits every verdict to OpenTelemetry.

    Raises:
        InputError: no model, or two of one name.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        log: DecisionLog | None = None,
        evaluations: EvaluationLog | None = None,
    ) -> None:
        self.models = {served.name: served for served in models}
        if not models or len(self.models) != len(models):
            raise InputError("a server needs models with different names; give --model once for each")
        self.metrics = Metrics([(one.name, one.scheduler, one.terms.monitor) for one in models], log)
        self.log, self._evaluations = log, evaluations

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        """The calibrations that decide, by their ids."""
        found = [made for served in self.models.values() if (made := served.terms.policy.calibration) is not None]
        return {calibration.id: calibration for calibration in found}

    def terms(self, served: ServedModel, facts: Facts, *, response_id: str | None = None) -> Terms:
        """The operator's terms for one request, whose decisions are counted, emitted and logged."""

        def notify(verdict: Verdict) -> None:
            self.metrics.decided(served.name, verdict)
            if self._evaluations is not None:
                # The record of a withheld answer as clients get it, with score and reason: events go to the operator.
                own = {name: getattr(verdict, name) for name in ("uncertainty", "reason", "status")}
                self._evaluations.write({**public_record(verdict), **own}, response_id=response_id)

        log = None if self.log is None else _Described(self.log, facts)
        return replace(served.terms, notify=notify, log=log)

    def model(self, name: str | None) -> ServedModel:
        """The model of that name; the only one where the name is missing.

        Raises:
            HttpError: there is no such model, or the name is missing and there are several.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            text = f"there is no model {(name or '')[:100]!r} here; there is: {', '.join(sorted(self.models))}"
            raise HttpError(404, "model_not_found", text, fields=("model",))
        return self.models[name]

    def call(self, body: Mapping[str, Any], *, request_id: str, response_id: str | None = None) -> Call:
        """A request, checked as far as that takes no model; another server checks its own requests.

        `response_id` is that of its response in events.

        Raises:
            ValidationError: the body is not a request.
            HttpError, InputError: it names something that is not there, or is not allowed.
        """
        known = self.models.get(str(body.get("model")))
        is_ours = known is None or known.upstream is None
        read = Forwarded(ChatRequest.model_validate(body)) if is_ours else Forwarded.of(body)
        request, served = read.request, self.model(read.request.model)
        most = served.most if is_ours else _MOST_OF_UPSTREAM
        if request.count > most:
            raise InputError(f"n is {request.count}, and this server gives up to {most} answers at once").about("n")
        facts = Facts(request_id=request_id, served=served.name, question=request.question)
        terms = self.terms(served, facts, response_id=response_id)
        cuts = request.cuts if terms.withholds else None
        if cuts is not None and (unread := [problem for name, problem in read.left.items() if name in CUTS]):
            raise InputError(unread[0])  # those are made here
        if terms.withholds and served.by_sentence is not None and request.wants_json:
            raise InputError(
                "this server delivers the sentences of an answer that it lets through, and a part of a JSON answer is "
                "none; leave response_format out"
            ).about("response_format")
        terms = replace(terms, part=(cuts or Cuts()).delivered)
        if served.upstream is None:
            own = _to_our_engine(request, served, cuts, terms)
            answer, live = partial(served.scheduler.answer, own), partial(served.scheduler.live, own)
        else:
            sent = UpstreamRequest(body=body, read=read, cuts=cuts, limit=served.options.max_tokens, terms=terms)
            answer, live = partial(served.upstream.answer, sent), partial(served.upstream.live, sent)
        return Call(
            request=request,
            body=body,
            served=served,
            terms=terms,
            stop=terms.stop(),
            answer=answer,
            live=live,
            cuts=cuts,
        )

    async def outcomes(self, call: Call) -> list[Outcome[Answer]]:
        """The answers to a request that are delivered.

        Raises:
            SemGradGuardError: the first error in an answer's place.
        """
        with self.metrics.working(call.served.name):
            how: dict[str, Any] = {"count": call.request.count, "stop": call.stop}
            outcomes = await adrive(answers(call.terms, Work.awaited(call.answer), call.ask, **how))
        return [one([outcome]) for outcome in outcomes]

    async def steps(self, call: Call) -> AsyncGenerator[Piece | Outcome[Answer]]:
        """The pieces of an answer, where nothing may be withheld, and last its outcome."""
        if call.request.count > 1:
            for outcome in await self.outcomes(call):
                yield outcome
            return

        steps: StreamSteps[Any, None] = streamed(call.terms, call.live().steps(), call.ask, stop=call.stop)
        with self.metrics.working(call.served.name):
            async with aclosing(arun_stream(steps)) as stream:
                async for step in stream:
                    yield step

    async def score(self, request: ScoreRequest) -> dict[str, Any]:
        """A text's verdict as advice, and the uncertainties of its segments if the request names a kind of them.

        Raises:
            InputError: the conversation cannot be read.
            HttpError: this server does not score its clients' texts.
        """
        served = self.model(request.model)
        if not served.scores:
            text = "this server withholds answers, and does not score its clients' texts (allow_score in its settings)"
            raise HttpError(403, "score_not_allowed", text)
        conversation = tuple(message.as_message(number) for number, message in enumerate(request.messages))
        foreign = ForeignText(text=request.text, conversation=conversation, cut=request.cut)
        draft = await served.scheduler.judged(foreign)
        terms = Terms(policy=served.terms.policy, mode="annotate")
        verdict, by = settle(draft.verdict, terms, prompt=draft.prompt).verdict, request.by
        record = {"object": "score", "model": served.name, KEY: public_record(verdict)}
        if by is None or verdict.uncertainty is None:
            return record
        return {**record, "segments": await served.scheduler.segments(foreign)}

    def close(self) -> None:
        """End the models' threads, and bring the log up to date."""
        for served in self.models.values():
            served.scheduler.close()
        if self.log is not None:
            self.log.close()


@dataclass(frozen=True, eq=False)
class _Described:
    """A log for one request, whose decisions have its facts."""

    log: DecisionSink
    facts: Facts

    def write(self, verdict: Verdict, *, seconds: float | None = None, facts: Facts | None = None) -> str | None:
        own = {name: value for name, value in vars(facts or Facts()).items() if value is not None}
        return self.log.write(verdict, seconds=seconds, facts=replace(self.facts, **own))


def _to_our_engine(request: ChatRequest, served: ServedModel, cuts: Cuts | None, terms: Terms) -> AnswerRequest:
    """A request to our own engine.

    Raises:
        InputError: this engine does not honour a field, or the prompt would be continued.
    """
    request.require_known()
    if request.messages[-1].role == "assistant" and terms.policy.calibration is not None:
        raise BindingMismatchError(
            "the conversation ends with an assistant's message, which the answer would continue; the calibration "
            "was made on whole answers. Let it end with a user's message"
        ).about("messages")
    return AnswerRequest(
        conversation=request.conversation(),
        options=request.options(served.options, uncut=cuts is not None),
        form=replace(request.form(), switches=request.switches()),
        count=request.count,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        cuts=cuts or Cuts(),
        prompt_limit=served.prompt_limit,
        terms=terms,
    )


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
            target, waiting = verdict.escalated.details, self._waiting.setdefault(model, [])
            self._target.labels(model, "prompt").inc(target.prompt_tokens or 0)
            self._target.labels(model, "completion").inc(target.answer_tokens or target.scored_tokens)
            waiting.append(verdict.details.scored_tokens)
            if len(waiting) == BLOCK:  # of one draft nothing is counted before there are others
                self._drafts.labels(model).inc(sum(waiting))
                waiting.clear()
        if not verdict.shows_draft:
            return
        self._saved.labels(model, "prompt").inc(verdict.details.prompt_tokens or 0)
        self._saved.labels(model, "completion").inc(verdict.details.scored_tokens)
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
        for found in () if self._log is None else self._log.watched:
            calibration = str(found.calibration_id)
            for name in get_args(State):
                state.add_metric([calibration, name], float(found.state == name))
            for name, value in (("low", found.low), ("high", found.high)):
                bound.add_metric([calibration, name], value)
            grades.add_metric([calibration], found.labels)
        return state, bound, grades
