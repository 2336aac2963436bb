"""One message of an agent's model: the guarded model that is asked for it, and what the agent gets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, cast

from langchain.agents.middleware.types import ExtendedModelResponse, ModelRequest, ModelResponse
from langchain.agents.structured_output import StructuredOutputValidationError
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ensure_config
from langgraph.types import Command

from langchain_semgrad_guard import agent_review
from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.agent_exit import (
    JUDGED_KEY,
    Delivered,
    as_judged,
    carries,
    require_structure_of,
    says_the_same,
    without_record,
)
from langchain_semgrad_guard.agent_review import REVIEW_KEY, Review, ReviewDesk, SettledModel
from langchain_semgrad_guard.answers import Rules, Target, TargetReply, TargetRequest
from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.enforcement import EnforcingChatModel
from langchain_semgrad_guard.guarded_model import AroundChatModel, inner_of
from langchain_semgrad_guard.hearing import AloudChatModel, around, aside, handlers_of
from langchain_semgrad_guard.review import HumanReview
from langchain_semgrad_guard.targets import RunnableTarget
from semgrad_guard import METADATA_KEY, Estimator, LanguageModel, Verdict
from semgrad_guard.errors import InputError, LowConfidenceError, UnenforcedPolicyError
from semgrad_guard.guard import handed_on, is_withheld

Request = ModelRequest[Any]
Response = ModelResponse[Any]
Result = Response | ExtendedModelResponse[Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a middleware was told; see `UncertaintyMiddleware`."""

    rules: Rules
    person: HumanReview | None = None
    scorer: LanguageModel | None = None
    estimator: Estimator | None = None
    prompt_template: str | None = None


class Turn:
    """One call of the agent's model, which is asked through a guard with the middleware's rules."""

    def __init__(self, settings: Settings, request: Request) -> None:
        self._settings, self._desk = settings, ReviewDesk()
        self._told: list[Verdict] = []
        self._delivered: list[Delivered] = []
        # A guard in front of this one has asked aside; its own model knows the context that is heard.
        aloud = request.model.context if isinstance(request.model, AloudChatModel) else None
        self._context = aloud or copy_context()
        _require_one_judge(request)
        self._require_answerable_form(request)
        if settings.person is not None:
            _require_checkpointer()
        self._review = cast("Review | None", request.state.get(REVIEW_KEY))
        placeholder = (self._review or {}).get("placeholder")
        self._asked = request.override(messages=[m for m in request.messages if m.id != placeholder or m.id is None])
        self._settled = agent_review.settled_message(self._review, request.state["messages"])
        verdict = None if self._settled is None else convert.stage_verdict(self._settled)
        if verdict is not None and is_withheld(verdict):
            self._refuse_text_for_structure(verdict)

    @property
    def request(self) -> Request:
        """The agent's request, to its guarded model; or to one that says what a person has decided."""
        return self._asked.override(model=self._guard(self._asked.model))

    def apart(self) -> AbstractContextManager[None]:
        """The time of the handler. Of all that runs there only the guarded model is heard, where it may withhold."""
        return aside() if self._settings.rules.terms.withholds else nullcontext()

    def judged(self, response: Response) -> Response:
        """The response with every message of a model judged, or delivered by a guard, in this turn."""
        asked = self._strangers(response)
        with self._beside():
            return self._with(response, [(message, model.invoke(messages)) for message, model, messages in asked])

    async def ajudged(self, response: Response) -> Response:
        """Like `judged`, without blocking the event loop."""
        asked = self._strangers(response)
        with self._beside():
            said = [(message, await model.ainvoke(messages)) for message, model, messages in asked]
            return self._with(response, said)

    def _guard(self, model: BaseChatModel, *, stranger: bool = False) -> BaseChatModel:
        """A model whose messages are judged by this turn's rules, heard by those who hear the turn.

        A stranger's words are not those of the model that a `prompt_template` vouches for.
        """
        if self._settled is not None:
            return SettledModel.of(self._settled, model).aloud_in(self._context)
        # A message that waits for a person has a placeholder, and the agent is interrupted before it is read.
        advice = "" if self._settings.person else self._advice
        target = self._desk if self._settings.person is not None else self._target
        if stranger and advice:
            target = None  # nothing parses an answer of another model here
        terms = replace(self._settings.rules.terms, notify=self._told.append, can_escalate=target is not None)
        rules = replace(self._settings.rules, terms=terms, target=target, irreplaceable=advice, notify=self._take_down)
        guard = guarded(
            model,
            rules,
            scorer=self._settings.scorer,
            estimator=self._settings.estimator,
            prompt_template=None if stranger else self._settings.prompt_template,
        )
        return guard if stranger and not rules.terms.withholds else guard.aloud_in(self._context)

    def _take_down(self, message: AIMessage, draft: AIMessage | None) -> None:
        self._delivered.append(Delivered(message, draft))

    def _strangers(self, response: Response) -> list[tuple[AIMessage, Runnable[Any, AIMessage], list[BaseMessage]]]:
        """The messages of a response that carry no decision of this turn, and who says them once they are judged."""
        request, system = self._asked, self._asked.system_message
        found: list[tuple[AIMessage, Runnable[Any, AIMessage], list[BaseMessage]]] = []
        for message in response.result:
            if isinstance(message, AIMessage) and self._known(message) is None:
                record = message.response_metadata.get(METADATA_KEY)
                records = [each.message.response_metadata.get(METADATA_KEY) for each in self._delivered]
                said = without_record(message) if record in records else message
                model: Any = self._guard(SettledModel.of(said, request.model), stranger=True)
                if request.tools and self._settled is None:
                    model = model.bind_tools(request.tools)
                found.append((message, model, [*([system] if system else []), *request.messages]))
        return found

    def _known(self, message: AIMessage) -> Delivered | None:
        """What was delivered in this turn and is this message; a person's decision was taken before."""
        if self._settled is not None and says_the_same(message, self._settled):
            return Delivered(self._settled, None)
        return next((each for each in reversed(self._delivered) if carries(message, each.message)), None)

    def _beside(self) -> AbstractContextManager[None]:
        """The time in which strangers are judged: what is delivered live anyway is not said a second time."""
        return nullcontext() if self._settings.rules.terms.withholds else aside()

    def _with(self, response: Response, judged: Sequence[tuple[AIMessage, AIMessage]]) -> Response:
        """The response with what is delivered in strangers' places; a structure made of withheld words goes, too."""
        if not judged:
            return response
        live = not self._settings.rules.terms.withholds  # then the graph's streams have shown the message by its id
        said = {id(message): _in_place_of(message, said, live=live) for message, said in judged}
        if self._settled is not None:
            self._delivered += [Delivered(each, None) for each in said.values()]
        result = [said.get(id(message), message) for message in response.result]
        if all(says_the_same(message, now) for message, now in judged):
            return ModelResponse(result=result, structured_response=response.structured_response)
        return ModelResponse(result=[message for message in result if isinstance(message, AIMessage)])

    @property
    def _target(self) -> Target | None:
        """Who answers instead. A chat model is asked what the agent's model is asked; others, what this guard was."""
        target = self._settings.rules.target
        if not isinstance(target, RunnableTarget) or target.chat_model is not None:
            return target
        system = self._asked.system_message
        return AskedByTheAgent(target, [*([system] if system else []), *self._asked.messages])

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The decisions that were taken, as plain JSON. An observer's are reported as they are taken."""
        if self._settings.rules.terms.mode == "observe":
            return []
        held = [handed_on(each.verdict) for each in self._desk.held]
        return [verdict.metadata() for verdict in (held or self._told)]

    def waiting(self, error: StructuredOutputValidationError) -> Response:
        """The response that LangChain could not read, where it is but the empty place of a message for a person.

        Raises:
            StructuredOutputValidationError: it is none; the model has not kept to its form.
        """
        if not self._desk.held:
            raise error
        return ModelResponse(result=[error.ai_message])

    def result(self, response: Response) -> Result:
        """What goes back to the agent: the response, and the state of the review.

        Raises:
            LowConfidenceError: a message is withheld where a structured response is due.
            UnenforcedPolicyError: the structured response is not made of the messages that were judged.
        """
        message = _message(response)
        known = self._known(message)
        review = self._desk.opened(message, None if known is None else known.draft)
        verdict = convert.stage_verdict(message)
        if review is None and verdict is not None and is_withheld(verdict):
            self._refuse_text_for_structure(verdict)
        if self._settings.rules.terms.withholds:
            require_structure_of(response.result, response.structured_response)
        update: dict[str, Any] = {} if self._review is None else agent_review.closing(self._review)
        if review is not None:
            update[REVIEW_KEY] = review
        update[JUDGED_KEY] = as_judged(response.result, self._asked.state)
        return ExtendedModelResponse(response, Command(update=update))

    def _require_answerable_form(self, request: Request) -> None:
        target = self._settings.rules.target
        if request.response_format is not None and isinstance(target, RunnableTarget) and target.chat_model is None:
            raise InputError("in an agent with a response_format, escalate_to must be a chat model or HumanReview()")

    @property
    def _advice(self) -> str:
        """Why no text can stand in for a message, where the agent owes a structured response."""
        owed = self._asked.response_format is not None
        return "The agent owes a structured response, and no text can stand in for it." if owed else ""

    def _refuse_text_for_structure(self, verdict: Verdict) -> None:
        if self._advice:
            raise LowConfidenceError(verdict, draft=verdict.draft, advice=self._advice)


@dataclass(frozen=True, eq=False)
class AskedByTheAgent:
    """A target that is given the agent's messages: middleware nearer to the model may show that others."""

    target: RunnableTarget
    messages: list[BaseMessage]

    def ask(self, requests: Sequence[TargetRequest]) -> Sequence[TargetReply]:
        """The target's answers."""
        return self.target.ask(self._of_the_agent(requests))

    async def aask(self, requests: Sequence[TargetRequest]) -> Sequence[TargetReply]:
        """Like `ask`, without blocking the event loop."""
        return await self.target.aask(self._of_the_agent(requests))

    def _of_the_agent(self, requests: Sequence[TargetRequest]) -> list[TargetRequest]:
        return [replace(request, call=replace(request.call, messages=self.messages)) for request in requests]


def guarded(model: BaseChatModel, rules: Rules, **scoring: Any) -> EnforcingChatModel:
    """A model whose runs end with what these rules make of its answers. Rules that it holds to already judge after."""
    given = {name: value for name, value in scoring.items() if value is not None}
    if isinstance(model, EnforcingChatModel) and (outer := model.carried) is not None:
        return AroundChatModel.around(guarded(model.bare, rules, **given)).guarded_by(outer)
    if isinstance(model, EnforcingChatModel) and model.rules is None and not given:
        return model.guarded_by(rules)
    return AroundChatModel.around(model, **given).guarded_by(rules)


def _in_place_of(message: AIMessage, said: AIMessage, *, live: bool) -> AIMessage:
    """What is delivered in a message's place, as the graph knows it."""
    return said.model_copy(update={"name": message.name, "id": (message.id if live else None) or said.id})


def _require_one_judge(request: Request) -> None:
    model = inner_of(request.model).model
    heard = (*around(ensure_config()).handlers, *handlers_of(model.callbacks))
    if any(isinstance(each, UncertaintyRouterCallback) and each.mode != "observe" for each in heard):
        raise UnenforcedPolicyError(
            "a router and an UncertaintyMiddleware would both decide about this model's answers. Keep one: the "
            "middleware for an agent, or the router for a model wherever it is used."
        )


def _require_checkpointer() -> None:
    """Raise an `InputError` where a person's answer could never come back: LangGraph keeps the question nowhere."""
    if ensure_config().get("configurable", {}).get("__pregel_checkpointer") is None:
        raise InputError(
            "HumanReview() needs a checkpointer, which keeps the question until a person answers it: "
            "create_agent(..., checkpointer=InMemorySaver())"
        )


def _message(response: Response) -> AIMessage:
    """The model's message among what a response holds (tool messages about a structured answer may follow it)."""
    for message in response.result:
        if isinstance(message, AIMessage):
            return message
    raise InputError("the agent's model returned no message; UncertaintyMiddleware cannot judge what is not there")
