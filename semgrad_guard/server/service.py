"""`Service`: the served models, each with its policy. Drafts go through the guard's flow, which decides."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from semgrad_guard.adapters.traces import EvaluationLog
from semgrad_guard.calibration import Calibration
from semgrad_guard.calibration.promise import report
from semgrad_guard.decision_log.entries import DecisionSink, Facts
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
from semgrad_guard.server.problems import HttpError
from semgrad_guard.server.prometheus import Metrics
from semgrad_guard.server.protocol import ChatRequest, Forwarded, ScoreRequest
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
        if cuts is not None:
            read.require_cuts()
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
    if request.is_continued and terms.policy.calibration is not None:
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
