"""One call of a chat model, from what LangChain passes in to what the caller gets: plain records and pure steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, Callbacks
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.audience import Announcement, handlers_of, is_audience, only
from langchain_semgrad_guard.callback import UncertaintyRouterCallback, require_confidence
from langchain_semgrad_guard.docket import Docket
from semgrad_guard import Verdict
from semgrad_guard.errors import UnenforcedPolicyError
from semgrad_guard.guard import abstained, escalated


@dataclass(frozen=True)
class Call:
    """One list of messages to answer, and everything LangChain passes along with it."""

    messages: list[BaseMessage]
    stop: list[str] | None
    callbacks: Callbacks
    tags: list[str] | None
    metadata: dict[str, Any] | None
    run_name: str | None
    run_id: UUID | None
    kwargs: dict[str, Any]

    @classmethod
    def configured(
        cls, messages: list[BaseMessage], config: RunnableConfig, stop: list[str] | None, kwargs: dict[str, Any]
    ) -> Call:
        """A call as `invoke` would make it with this config."""
        return cls(
            messages,
            stop,
            config.get("callbacks"),
            config.get("tags"),
            config.get("metadata"),
            config.get("run_name"),
            config.get("run_id"),
            kwargs,
        )

    def each(self, prompts: Sequence[list[BaseMessage]]) -> list[Call]:
        """This call for each of several prompts; a run id can be given to the first run only."""
        return [replace(self, messages=p, run_id=self.run_id if i == 0 else None) for i, p in enumerate(prompts)]

    def arguments(self, router: UncertaintyRouterCallback | None) -> dict[str, Any]:
        """The arguments of `generate`. The audience of a guarded call is told later, through `Outcome.announcement`."""
        guarded = router is not None and router.withholds
        heard = only(self.callbacks, lambda handler: not is_audience(handler)) if guarded else self.callbacks
        return {
            "messages": [self.messages],
            "stop": self.stop,
            "callbacks": heard,
            "tags": self.tags,
            "metadata": self.metadata,
            "run_name": self.run_name,
            "run_id": self.run_id,
            **self.kwargs,
        }


@dataclass
class Outcome:
    """What became of a call: a result to deliver, or an error. Until a router's target has answered, neither."""

    call: Call
    router: UncertaintyRouterCallback | None = None
    verdict: Verdict | None = None
    draft: LLMResult | None = None
    result: LLMResult | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, call: Call, docket: Docket, draft: LLMResult) -> Outcome:
        """The outcome of a closed run: its draft with the docket's decision carried out as far as possible now."""
        router = docket.router
        if router is None or not router.withholds:
            return cls(call, draft=draft, result=draft)
        verdict = docket.verdict(_run_id(draft))
        if router.mode == "raise":
            require_confidence(verdict)
        outcome = cls(call, router, verdict, draft)
        message = _message(draft)
        if verdict.action == "answer":
            outcome.deliver(convert.decided(message, verdict))
        elif verdict.action == "abstain":
            withheld = abstained(verdict, router.abstain_message)
            outcome.deliver(convert.abstention(message, withheld, keep_draft=router.keep_draft))
        return outcome

    @property
    def delivered(self) -> LLMResult:
        """What the caller gets; the error is raised if there is one."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise UnenforcedPolicyError("an answer was withheld and nothing has taken its place")
        return self.result

    @property
    def message(self) -> AIMessage:
        """The message the caller gets."""
        return _message(self.delivered)

    def deliver(self, message: AIMessage) -> None:
        """Put a message in the draft's place, in a result of our own: the draft's objects may sit in a cache."""
        run, output = (self.draft.run, self.draft.llm_output) if self.draft else (None, None)
        if message.id is None and self.draft is not None:
            message = message.model_copy(update={"id": _message(self.draft).id})
        self.result = LLMResult(generations=[[ChatGeneration(message=message)]], llm_output=output, run=run)

    def receive(self, answer: Any) -> None:
        """Take the target's answer, or its error."""
        if isinstance(answer, Exception):
            self.error = answer
            return
        router, verdict = cast("UncertaintyRouterCallback", self.router), cast("Verdict", self.verdict)
        message = convert.as_message(answer)
        both = escalated(verdict, convert.get_verdict(message) or convert.message_text(message))
        self.deliver(convert.escalation(message, both, keep_draft=router.keep_draft))

    def target_config(self, limit: int | None) -> RunnableConfig:
        """The config of the escalation: the same tracers, so that traces are complete, but not the router."""
        config: dict[str, Any] = {
            "callbacks": only(self.call.callbacks, lambda handler: not (is_audience(handler) or _is_router(handler))),
            "tags": self.call.tags,
            "metadata": self.call.metadata,
            "max_concurrency": limit,
        }
        return cast("RunnableConfig", {key: value for key, value in config.items() if value is not None})

    def announcement(self, name: str) -> Announcement | None:
        """What the audience of a guarded call is to be told, if it has one: the delivered message."""
        call = self.call
        if self.router is None or self.error is not None or not any(map(is_audience, handlers_of(call.callbacks))):
            return None
        config: dict[str, Any] = {
            "callbacks": only(call.callbacks, is_audience),
            "tags": call.tags,
            "metadata": call.metadata,
            "run_name": call.run_name or name,
            "run_id": _run_id(self.delivered),
        }
        return Announcement(self.message, call.messages, cast("RunnableConfig", config))


def has_router(callbacks: Callbacks, local: Callbacks) -> bool:
    """Whether any router hears a run, be it an observer."""
    return any(map(_is_router, (*handlers_of(callbacks), *handlers_of(local))))


def router_of(callbacks: Callbacks, local: Callbacks) -> UncertaintyRouterCallback | None:
    """The router among a run's handlers: those of the call, and the model's own. Observers decide nothing.

    Raises:
        UnenforcedPolicyError: there are several, and one of them would be ignored.
    """
    routers: list[UncertaintyRouterCallback] = []
    for handler in (*handlers_of(callbacks), *handlers_of(local)):
        if _is_router(handler) and handler.mode != "observe" and not any(handler is each for each in routers):
            routers.append(handler)
    if len(routers) > 1:
        raise UnenforcedPolicyError(
            f"{len(routers)} routers are attached to one model and only one can decide. Attach one; to judge a second "
            "stage, give the escalation target a router of its own."
        )
    return routers[0] if routers else None


def waiting(
    outcomes: Sequence[Outcome],
) -> Iterator[tuple[UncertaintyRouterCallback, Runnable[Any, Any], list[Outcome]]]:
    """The outcomes that wait for a target, router by router."""
    asking = [o for o in outcomes if o.error is None and o.verdict is not None and o.verdict.action == "escalate"]
    for router in dict.fromkeys(o.router for o in asking):
        if router is not None and router.escalate_to is not None:
            yield router, router.escalate_to, [o for o in asking if o.router is router]


def settle(group: Sequence[Outcome], answers: Sequence[Any]) -> None:
    """Hand each waiting outcome its target's answer, or the error that took its place."""
    for outcome, answer in zip(group, answers, strict=True):
        try:
            outcome.receive(answer)
        except Exception as error:  # noqa: BLE001 - raised by whoever reads this outcome
            outcome.error = error


def messages_of(outcomes: Sequence[Outcome], *, return_exceptions: bool) -> list[AIMessage]:
    """The delivered messages; the first error is raised, or all are returned in their places."""
    if return_exceptions:
        return [cast("AIMessage", outcome.error) if outcome.error else outcome.message for outcome in outcomes]
    return [outcome.message for outcome in outcomes]


def merged(outcomes: Sequence[Outcome], combine: Callable[[list[dict[str, Any] | None]], dict[str, Any]]) -> LLMResult:
    """One result for several runs, in their order; the first error is raised."""
    results = [outcome.delivered for outcome in outcomes]
    return LLMResult(
        generations=[generations for result in results for generations in result.generations],
        llm_output=combine([result.llm_output for result in results]),
        run=[info for result in results for info in result.run or []] or None,
    )


def _is_router(handler: BaseCallbackHandler) -> TypeGuard[UncertaintyRouterCallback]:
    return isinstance(handler, UncertaintyRouterCallback)


def _message(result: LLMResult) -> AIMessage:
    return cast("AIMessage", cast("ChatGeneration", result.generations[0][0]).message)


def _run_id(result: LLMResult) -> UUID:
    """The id of a result's only run."""
    if not result.run:
        raise UnenforcedPolicyError("LangChain reported no run for this answer, so no decision can be found for it")
    return result.run[0].run_id
