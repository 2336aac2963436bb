"""One message of an agent's model, from the request to what the agent gets: plain steps, called in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from langchain.agents.middleware.types import ExtendedModelResponse, ModelRequest, ModelResponse
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langgraph.types import Command

from langchain_semgrad_guard import agent_review
from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.agent_review import REVIEW_KEY, Review
from langchain_semgrad_guard.audience import Announcement, Announcer, handlers_of, is_audience, only, unheard
from langchain_semgrad_guard.calls import router_of
from langchain_semgrad_guard.judging import judged_by, judgement
from langchain_semgrad_guard.review import HumanReview
from semgrad_guard import Policy, Verdict
from semgrad_guard.errors import InputError, LowConfidenceError, UnenforcedPolicyError
from semgrad_guard.guard import abstained, escalated
from semgrad_guard.guard.modes import Mode, withholds

NOSTREAM = "nostream"
"""LangGraph's tag for runs that its message streams leave out."""

Request = ModelRequest[Any]
Response = ModelResponse[Any]
Result = Response | ExtendedModelResponse[Any]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a middleware was told; see `UncertaintyMiddleware`."""

    policy: Policy
    mode: Mode
    escalate_to: Runnable[Any, Any] | HumanReview | None
    abstain_message: str
    trusted_tools: frozenset[str]
    keep_draft: bool

    @property
    def buffered(self) -> bool:
        """Whether messages may be withheld: nothing of them may be shown before they are judged."""
        return withholds(self.mode)

    def judge(self, message: AIMessage) -> Verdict:
        """The decision about one message, and whether it will be carried out (`enforced`)."""
        verdict = judgement(message, self.policy, can_escalate=self.escalate_to is not None)
        called = {call["name"] for call in message.tool_calls}
        trusted = verdict.action != "answer" and bool(called) and called <= self.trusted_tools
        return verdict.model_copy(update={"enforced": self.buffered and not trusted})


class Turn:
    """One call of the model: draft, judgement, perhaps a target's answer, delivery."""

    def __init__(self, terms: Terms, request: Request) -> None:
        if router_of(ensure_config().get("callbacks"), request.model.callbacks) is not None:
            raise UnenforcedPolicyError(
                "a router and an UncertaintyMiddleware would both decide about this model's answers. Keep one: the "
                "middleware for an agent, or the router for a model wherever it is used."
            )
        self._terms = terms
        self._review = cast("Review | None", request.state.get(REVIEW_KEY))
        placeholder = (self._review or {}).get("placeholder")
        self._request = request.override(messages=[m for m in request.messages if m.id != placeholder or m.id is None])

    # A person has decided: the agent's own machinery says it, so that its tools run and its structures are parsed.

    @property
    def reviewed_request(self) -> Request | None:
        """A request whose answer is what a person has just decided; None if they have not."""
        message = agent_review.settled_message(self._review, self._request.state["messages"])
        if message is None:
            return None
        verdict = convert.get_verdict(message)
        if verdict is not None and verdict.action == "abstain":
            self._refuse_text_for_structure(verdict, draft=verdict.draft)
        return self._request.override(model=Announcer.of(message, profile=self._request.model.profile))

    # The model's own message.

    @property
    def draft_request(self) -> Request:
        """The agent's request, to a model that nobody hears if its answer may be withheld."""
        return _quiet(self._request, self._request.model) if self._terms.buffered else self._request

    def drafting(self) -> AbstractContextManager[Any]:
        """The time during which the model answers."""
        stack = ExitStack()
        stack.enter_context(judged_by(self._terms.judge))
        if self._terms.buffered:
            stack.enter_context(unheard())
        return stack

    def judge(self, response: Response) -> dict[str, Any]:
        """Take the model's response; the decision about it, as plain JSON."""
        self._draft_response, self._draft = response, _message(response)
        self._verdict = self._terms.judge(self._draft)
        self._delivered, self._waiting = response, None
        return self._verdict.metadata()

    # Somebody else's message in its place.

    @property
    def target(self) -> Runnable[Any, Any] | None:
        """Who must answer instead, unless it is a person."""
        verdict, target = self._verdict, self._terms.escalate_to
        escalates = self._terms.mode == "enforce" and verdict.enforced and verdict.action == "escalate"
        return target if escalates and isinstance(target, Runnable) else None

    @property
    def target_request(self) -> Request | None:
        """What a chat model is asked: the agent's request, with its tools and its response format."""
        return _quiet(self._request, self.target) if isinstance(self.target, BaseChatModel) else None

    @property
    def target_messages(self) -> list[BaseMessage]:
        """What any other target is asked.

        Raises:
            InputError: the agent needs a structured response, which only a chat model can be asked for.
        """
        if self._request.response_format is not None:
            raise InputError("in an agent with a response_format, escalate_to must be a chat model or HumanReview()")
        system = self._request.system_message
        return [*([system] if system else []), *self._request.messages]

    # What the agent gets.

    def deliver(self, answer: Any = None) -> None:
        """Carry out the decision; `answer` is the target's, where there is one.

        Raises:
            LowConfidenceError: in mode "raise", or a message is withheld where a structured response is due.
        """
        verdict, terms = self._verdict, self._terms
        if answer is not None:
            self._take(answer)
        elif terms.mode == "observe":
            return
        elif verdict.action == "answer" or not verdict.enforced:
            self._delivered = _replaced(self._draft_response, convert.decided(self._draft, verdict))
        elif terms.mode == "raise":
            raise LowConfidenceError(verdict, draft=verdict.text)
        elif verdict.action == "escalate":
            self._await_review()
        else:
            self._refuse_text_for_structure(verdict, draft=verdict.text)
            withheld = abstained(verdict, terms.abstain_message)
            message = convert.abstention(self._draft, withheld, keep_draft=terms.keep_draft)
            self._delivered = ModelResponse(result=[message.model_copy(update={"name": self._draft.name})])

    @property
    def announcement(self) -> Announcement | None:
        """What the audience of a buffered turn is to be told, if it has one: the delivered message."""
        config = ensure_config()
        heard = any(map(is_audience, handlers_of(config.get("callbacks"))))
        if not (self._terms.buffered and heard) or self._waiting:
            return None
        told = {**config, "callbacks": only(config.get("callbacks"), is_audience)}
        told["run_name"] = self._request.model.get_name()
        question = cast("list[BaseMessage]", self._request.messages)
        return Announcement(_message(self._delivered), question, cast("RunnableConfig", told))

    @property
    def result(self) -> Result:
        """What goes back to the agent."""
        return self.closed(self._delivered, waiting=self._waiting)

    def closed(self, response: Response, *, waiting: Review | None = None) -> Result:
        """A response, and the state of the review: opened, or forgotten if one was open."""
        update = {} if self._review is None else agent_review.closing(self._review)
        if waiting is not None:
            update[REVIEW_KEY] = waiting
        return ExtendedModelResponse(response, Command(update=update)) if update else response

    def _take(self, answer: Any) -> None:
        whole = isinstance(answer, ModelResponse)
        response = cast("Response", answer) if whole else ModelResponse(result=[convert.as_message(answer)])
        message = _message(response)
        both = escalated(self._verdict, convert.get_verdict(message) or convert.message_text(message))
        delivered = convert.escalation(message, both, keep_draft=self._terms.keep_draft)
        known = {"id": message.id or self._draft.id, "name": message.name or self._draft.name}
        self._delivered = _replaced(response, delivered.model_copy(update=known))

    def _await_review(self) -> None:
        placeholder, self._waiting = agent_review.opened(self._draft, self._verdict)
        self._delivered = ModelResponse(result=[placeholder])

    def _refuse_text_for_structure(self, verdict: Verdict, *, draft: str | None) -> None:
        if self._request.response_format is not None:
            advice = "The agent owes a structured response, and no text can stand in for it."
            raise LowConfidenceError(verdict, draft=draft, advice=advice)


def _quiet(request: Request, model: BaseChatModel) -> Request:
    """The request to a copy of the model that sends no tokens and that message streams leave out."""
    changes = {"tags": [*(model.tags or []), NOSTREAM], "disable_streaming": True}
    return request.override(model=model.model_copy(update=changes))


def _message(response: Response) -> AIMessage:
    """The model's message among what a response holds (tool messages about a structured answer may follow it)."""
    for message in response.result:
        if isinstance(message, AIMessage):
            return message
    raise InputError("the agent's model returned no message; UncertaintyMiddleware cannot judge what is not there")


def _replaced(response: Response, message: AIMessage) -> Response:
    """The response with another message in place of the model's."""
    old = _message(response)
    return replace(response, result=[message if each is old else each for each in response.result])
