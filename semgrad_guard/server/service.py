"""`Service`: the models that are served, each with its policy. Drafts go through the guard's flow, which decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from semgrad_guard.calibration.curve import risk_curve
from semgrad_guard.decision_log.entries import DecisionSink, Facts
from semgrad_guard.decision_log.summary import Summary, by_day, parse_since
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.interruption import Stop
from semgrad_guard.engine.scoring.segments import Segment
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard import Draft, Outcome, Pending, Policy, Terms, Waiting, arun, arun_stream, one
from semgrad_guard.named import reading_prompt
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.cuts import Cuts
from semgrad_guard.server.forwarded import Forwarded, forwarded
from semgrad_guard.server.http_errors import HttpError
from semgrad_guard.server.metrics import Metrics
from semgrad_guard.server.model_queue import ModelQueue
from semgrad_guard.server.protocol import (
    ChatRequest,
    DecisionsRequest,
    FeedbackRequest,
    ScoreRequest,
    SummaryRequest,
)
from semgrad_guard.server.scheduler import LiveAnswers
from semgrad_guard.server.upstream import Asked, RemoteTarget, Upstream
from semgrad_guard.server.writing import AnswerRequest

if TYPE_CHECKING:  # they need extras of their own
    from semgrad_guard.decision_log.decision_log import DecisionLog
    from semgrad_guard.decision_log.entries import Decision, Feedback
    from semgrad_guard.server.tracing import Evaluations


_MOST_ELSEWHERE = 128
"""How many answers of another server one request may ask for; OpenAI's own limit."""
SUMMARIZED = 50_000
"""How many decisions a summary reads at most, the latest."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedModel:
    """One model under the name that clients ask for.

    Args:
        name: the name.
        scheduler: owns the model that answers, or that scores what the upstream answers.
        terms: how the guard decides.
        options: how to generate where a request does not say; `max_tokens` is also the most that one may ask for.
        upstream: who writes the drafts, where it is not the model itself.
        target: who is asked for what is not let through.
        overridable: what requests may set otherwise.
        most: how many answers one request may ask for.
        prompt_limit: how many tokens a prompt may have.
        scores_texts: whether clients may have texts of their own scored where answers are withheld: who can, can
            compare guesses at a withheld answer.
    """

    name: str
    scheduler: ModelQueue
    terms: Terms
    options: GenerationOptions = field(default_factory=GenerationOptions)
    upstream: Upstream | None = None
    target: RemoteTarget | None = None
    overridable: frozenset[str] = frozenset()
    most: int = 8
    prompt_limit: int | None = None
    scores_texts: bool = False

    @property
    def scores(self) -> bool:
        """Whether clients may have texts of their own scored."""
        return self.scores_texts or not self.terms.withholds

    def described(self, created: int) -> dict[str, Any]:
        """The model as GET /v1/models lists it."""
        policy = self.terms.policy
        guard = {
            "estimator": self.scheduler.estimator.name,
            "mode": self.terms.mode,
            "threshold": policy.threshold,
            "calibration_id": policy.calibration_id,
            "escalates": self.target is not None,
            "written_by": "upstream" if self.upstream is not None else "engine",
            "batching": None if self.upstream is not None else self.scheduler.batching,
            "overridable": sorted(self.overridable),
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


@dataclass(kw_only=True, eq=False)
class Call:
    """One request on its way: what was asked, of whom, under which terms, and what its prompt cost.

    `cuts` are made once the answer was decided on; None where the answer is written as the client cuts it.
    """

    request: ChatRequest
    forwarded: Forwarded
    body: Mapping[str, Any]
    served: ServedModel
    terms: Terms
    stop: Stop
    cuts: Cuts | None = None
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Scored:
    """A text's verdict, which is advice, and the segments with their uncertainties, where they were asked for."""

    model: str
    verdict: Verdict
    segments: Sequence[tuple[Segment, float | None]] | None = None


class Service:
    """What the routes ask.

    Args:
        models: at least one; the names differ.
        metrics: hear every verdict.
        log: writes every decision down.
        evaluations: tells every verdict to OpenTelemetry.

    Raises:
        InputError: no model, or two of one name.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        metrics: Metrics | None = None,
        log: DecisionLog | None = None,
        evaluations: Evaluations | None = None,
    ) -> None:
        self.models = {served.name: served for served in models}
        if not models or len(self.models) != len(models):
            raise InputError("a server needs models with different names; give --model once for each")
        self.metrics, self.log, self._evaluations = metrics or Metrics(), log, evaluations
        if log is not None:
            self.metrics.watch_log(lambda: log.failures, lambda: log.pending)
        for served in models:
            self.metrics.watch_queue(served.name, lambda scheduler=served.scheduler: scheduler.depth)

    def terms(self, served: ServedModel, facts: Facts) -> Terms:
        """The operator's terms for one request, whose decisions are counted, told and written down."""
        log = None if self.log is None else _Described(self.log, facts)
        return replace(served.terms, notify=partial(self._decided, served.name), log=log)

    def model(self, name: str | None) -> ServedModel:
        """The model of that name; without one the only one there is.

        Raises:
            HttpError: there is none, or the name is missing and there are several.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            there = ", ".join(sorted(self.models))
            said = f"there is no model {(name or '')[:100]!r} here; there is: {there}"
            raise HttpError(404, "model_not_found", said, param="model")
        return self.models[name]

    def call(self, body: Mapping[str, Any], *, request_id: str) -> Call:
        """A request, checked as far as that takes no model; another server checks itself what it is asked.

        Raises:
            ValidationError: it is no such request.
            HttpError, InputError: it asks for what is not there, or is not allowed.
        """
        known = self.models.get(str(body.get("model")))
        sent = (
            Forwarded(ChatRequest.model_validate(body)) if known is None or known.upstream is None else forwarded(body)
        )
        request, served = sent.request, self.model(sent.request.model)
        most = served.most if served.upstream is None else _MOST_ELSEWHERE
        if request.count > most:
            raise InputError(f"n is {request.count}, and this server gives up to {most} answers at once")
        if served.upstream is None:
            request.require_known()
        terms = self._overridden(served, request, self.terms(served, _facts(served, request, request_id)))
        if served.upstream is None and request.is_continued and terms.policy.calibration is not None:
            raise BindingMismatchError(
                "the conversation ends in the assistant's turn, which the answer would go on from; the calibration was "
                "made on whole answers. Let it end in a user's turn"
            )
        cuts = request.cuts if terms.withholds else None
        if cuts is not None and served.upstream is not None:
            sent.require_cuts(served.options.max_tokens)
        terms = replace(terms, trim=cuts.delivered if cuts else None)
        return Call(
            request=request, forwarded=sent, body=body, served=served, terms=terms, stop=terms.stop(), cuts=cuts
        )

    async def outcomes(self, call: Call) -> list[Outcome[Answer]]:
        """What goes out for a request.

        Raises:
            SemGradGuardError: the first that stands in an answer's place.
        """
        found = await arun(
            call.terms,
            lambda: self._drafts(call),
            lambda waiting: self._ask(call, waiting),
            count=call.request.count,
            stop=call.stop,
        )
        return [one([outcome]) for outcome in found]

    async def steps(self, call: Call) -> AsyncIterator[str | Outcome[Answer]]:
        """The pieces of an answer, where nothing may be withheld, and what goes out last."""
        if call.request.count > 1:
            for outcome in await self.outcomes(call):
                yield outcome
            return
        steps = arun_stream(
            call.terms, lambda: self._live(call), lambda waiting: self._ask(call, waiting), stop=call.stop
        )
        try:
            async for step in steps:
                yield step
        finally:
            await steps.aclose()

    async def score(self, request: ScoreRequest) -> Scored:
        """A text's verdict as advice, and its segments if they are asked for.

        Raises:
            InputError: the conversation cannot be read.
            HttpError: this server scores no texts of its clients.
        """
        served = self.model(request.model)
        if not served.scores:
            said = "this server withholds answers, and scores no texts of its clients; see --allow-score"
            raise HttpError(403, "score_not_allowed", said)
        conversation = tuple(message.as_message(number) for number, message in enumerate(request.messages, start=1))
        draft = await served.scheduler.scored(conversation, request.text, cut=request.cut)
        terms = Terms(policy=served.terms.policy, mode="annotate")
        (outcome,) = Pending([draft], terms).outcomes()
        verdict, by = one([outcome]).verdict, request.by
        if by is None or verdict.uncertainty is None:
            return Scored(served.name, verdict)
        return Scored(served.name, verdict, await served.scheduler.segments(conversation, request.text, by=by))

    def feedback(self, request: FeedbackRequest) -> dict[str, Any]:
        """Write down whether a delivered answer was right.

        Raises:
            HttpError: there is no log, or no such decision.
            DecisionLogError: it cannot be written.
        """
        try:
            said = self._log.feedback(
                request.decision_id, right=request.right, sampling=request.sampling, grader=request.grader
            )
        except InputError as error:
            raise HttpError(404, "decision_not_found", str(error), param="decision_id") from error
        return {"object": "feedback", **said.model_dump(mode="json", exclude={"kind"})}

    def decisions(self, request: DecisionsRequest) -> dict[str, Any]:
        """Decisions, the latest first; those on withheld answers without their scores and times.

        Raises:
            InputError: a time that is none.
            HttpError: there is no log.
            DecisionLogError: it cannot be read.
        """
        log = self._log
        log.flush(timeout=2.0)
        found = log.database.decisions(
            since=None if request.since is None else parse_since(request.since),
            until=None if request.until is None else parse_since(request.until),
            action=request.action,
            limit=request.limit + 1,
            before=request.after,
        )
        data = [_listed(decision, said) for decision, said in found[: request.limit]]
        return {"object": "list", "data": data, "has_more": len(found) > request.limit}

    def summary(self, request: SummaryRequest) -> dict[str, Any]:
        """Rates and coverage by day, and in all, of the latest `SUMMARIZED` decisions; `complete` says if that is all.

        A summary of one withheld answer would be its score, so scores and times are those of delivered answers.

        Raises:
            InputError: a time that is none.
            HttpError: there is no log.
            DecisionLogError: it cannot be read.
        """
        log = self._log
        log.flush(timeout=2.0)
        found = log.database.decisions(since=parse_since(request.since), limit=SUMMARIZED + 1)
        rows = found[:SUMMARIZED]
        return {
            "object": "summary",
            "total": Summary.of("in all", rows, withheld=False).model_dump(mode="json"),
            "days": [day.model_dump(mode="json") for day in by_day(rows, withheld=False)],
            "complete": len(found) == len(rows),
        }

    def calibration(self, name: str | None) -> dict[str, Any]:
        """What thresholds would do on the answers that a model was calibrated on; no points without a calibration.

        Raises:
            HttpError: there is no such model.
        """
        served = self.model(name)
        policy = served.terms.policy
        found = {"object": "calibration", "model": served.name, "threshold": policy.threshold}
        calibration = policy.calibration
        if calibration is None:
            reason = "This model has no calibration, so nothing is known of what a threshold would let through."
            return {**found, "calibration_id": None, "n": 0, "curve": [], "reason": reason, "promise": None}
        kept = calibration.threshold is not None
        promise = (
            f"Promised at {calibration.threshold:.3g}: of the answers let through at most {calibration.alpha:.0%} are "
            f"wrong, with probability {1 - calibration.delta:.0%}. Another threshold promises nothing."
            if kept
            else f"Nothing is promised: {calibration.reason}"
        )
        curve = [asdict(point) for point in risk_curve(calibration)]
        return {
            **found,
            "calibration_id": calibration.id,
            "n": calibration.n,
            "curve": curve,
            "reason": None if curve else "The answers of this calibration have no scores.",
            "promise": promise,
        }

    def close(self) -> None:
        """Let go of the models' threads, and bring the log up to date."""
        for served in self.models.values():
            served.scheduler.close()
        if self.log is not None:
            self.log.close()

    def _decided(self, name: str, verdict: Verdict) -> None:
        self.metrics.decided(name, verdict)
        if self._evaluations is not None:
            self._evaluations.decided(verdict)

    @property
    def _log(self) -> DecisionLog:
        if self.log is None:
            raise HttpError(404, "no_decision_log", "this server keeps no decision log")
        return self.log

    # How a request is answered.

    async def _drafts(self, call: Call) -> Sequence[Draft[Answer]]:
        served = call.served
        if served.upstream is not None:
            drafts = await served.upstream.drafts(_asked(call))
        else:
            drafts = await served.scheduler.answer(_request(call))
        call.prompt_tokens = max(draft.answer.prompt_tokens or 0 for draft in drafts)
        return drafts

    async def _live(self, call: Call) -> Any:
        upstream = call.served.upstream
        if upstream is not None:
            return _Counting(upstream.live(_asked(call)), call)
        return _Counting(LiveAnswers(call.served.scheduler, _request(call)), call)

    async def _ask(self, call: Call, waiting: Sequence[Waiting[Answer]]) -> Sequence[Any]:
        if call.served.target is None:
            raise InputError("there is no server to escalate to; start this one with --escalate-to")
        return await call.served.target.ask(call.body, waiting)

    def _overridden(self, served: ServedModel, request: ChatRequest, terms: Terms) -> Terms:
        """What the request may say otherwise."""
        asked = request.overrides
        if refused := sorted(set(asked) - served.overridable):
            raise HttpError(
                403,
                "override_not_allowed",
                f"this server's operator does not let requests set {', '.join(refused)}",
                param="semgrad_guard",
            )
        if "threshold" in asked:
            asked["policy"] = Policy(threshold=asked.pop("threshold"), on_unscored=terms.policy.on_unscored)
        return replace(terms, **asked)


@dataclass(frozen=True, eq=False)
class _Described:
    """A log for one request, which knows what is written beside its decisions."""

    log: DecisionSink
    facts: Facts

    def write(self, verdict: Verdict, *, seconds: float | None = None, facts: Facts | None = None) -> str | None:
        return self.log.write(verdict, seconds=seconds, facts=self.facts if facts is None else facts)


class _Counting:
    """A live answer whose prompt's tokens are taken down, whatever becomes of it."""

    def __init__(self, live: Any, call: Call) -> None:
        self._live, self._call = live, call

    def __aiter__(self) -> Any:
        return aiter(self._live)

    async def draft(self) -> Draft[Answer]:
        draft = await self._live.draft()
        self._call.prompt_tokens = draft.answer.prompt_tokens or 0
        return draft

    async def aclose(self) -> None:
        await self._live.aclose()


def _listed(decision: Decision, said: Feedback | None) -> dict[str, Any]:
    shown = None if said is None else said.model_dump(mode="json", exclude={"kind", "id", "decision_id"})
    decision = decision if decision.shows_draft else decision.without_score()
    row = decision.model_dump(mode="json", exclude={"kind"})
    return {"object": "decision", **row, "delivery": decision.delivery, "feedback": shown}


def _facts(served: ServedModel, request: ChatRequest, request_id: str) -> Facts:
    asked = next((m for m in reversed(request.messages) if m.role == "user"), request.messages[-1])
    question = asked.content if isinstance(asked.content, str) else None
    return Facts(request_id=request_id, served=served.name, question=question)


def _request(call: Call) -> AnswerRequest:
    request = call.request
    return AnswerRequest(
        conversation=request.conversation(),
        options=request.options(call.served.options, uncut=call.cuts is not None),
        form=request.form(),
        count=request.count,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        pieces=bool(call.cuts),
        prompt_limit=call.served.prompt_limit,
    )


def _asked(call: Call) -> Asked:
    request = call.request
    return Asked(
        body=call.body,
        model=call.served.name,
        count=request.count,
        conversation=call.forwarded.conversation,
        form=call.forwarded.form,
        unread=call.forwarded.unread,
        cuts=call.cuts,
        limit=call.served.options.max_tokens,
    )
