"""One message of an agent's model: the guarded model that makes it, and the agent's result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, cast

from langchain.agents.middleware.types import ExtendedModelResponse, ModelRequest, ModelResponse
from langchain.agents.structured_output import StructuredOutputValidationError
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ensure_config
from langgraph.types import Command

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard import review as reviews
from langchain_semgrad_guard.agent_exit import (
    JUDGED_KEY,
    Delivered,
    as_judged,
    carries,
    equals,
    require_structure_of,
    without_record,
)
from langchain_semgrad_guard.answers import Rules, Target, TargetReply, TargetRequest, inner_of
from langchain_semgrad_guard.callback import deciding
from langchain_semgrad_guard.chains import RunnableChatModel
from langchain_semgrad_guard.enforcement import AloudChatModel, EnforcingChatModel
from langchain_semgrad_guard.guarded_model import AroundChatModel
from langchain_semgrad_guard.review import REVIEW_KEY, HumanReview, Review, ReviewDesk
from langchain_semgrad_guard.runs import SyncRun, around, aside, handlers_of
from langchain_semgrad_guard.targets import RunnableTarget
from semgrad_guard import METADATA_KEY, Estimator, LanguageModel, Verdict
from semgrad_guard.errors import InputError, LowConfidenceError, UnenforcedPolicyError
from semgrad_guard.guard import handed_on, is_withheld

Request = ModelRequest[Any]
Response = ModelResponse[Any]
Result = Response | ExtendedModelResponse[Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A middleware's settings; see `UncertaintyMiddleware`."""

    rules: Rules
    person: HumanReview | None = None
    scorer: LanguageModel | None = None
    estimator: Estimator | None = None
    prompt_template: str | None = None

    @property
    def withholds(self) -> bool:
        """Whether a message may be kept back."""
        return self.rules.terms.withholds


class Turn:
    """One call of the agent's model, through a guard with the middleware's rules."""

    def __init__(self, settings: Settings, request: Request) -> None:
        self._settings, self._desk = settings, ReviewDesk()
        request = request.override(model=RunnableChatModel.of(request.model))  # retries and fallbacks are none
        self._verdicts: list[Verdict] = []
        self._delivered: list[Delivered] = []
        # A guard before this one calls it aside; its own model has the context whose callbacks hear this turn.
        aloud = request.model.context if isinstance(request.model, AloudChatModel) else None
        self._context = aloud or copy_context()
        config, target = ensure_config(), settings.rules.target
        if deciding([*around(config).handlers, *handlers_of(inner_of(request.model).model.callbacks)]):
            raise UnenforcedPolicyError(
                "a router and an UncertaintyMiddleware would both decide about this model's answers. Keep one: the "
                "middleware for an agent, or the router for a model wherever it is used."
            )
        if request.response_format is not None and isinstance(target, RunnableTarget) and target.chat_model is None:
            raise InputError("in an agent with a response_format, escalate_to must be a chat model or HumanReview()")
        if settings.person is not None and config.get("configurable", {}).get("__pregel_checkpointer") is None:
            raise InputError(
                "HumanReview() needs a checkpointer, which keeps the question until a person answers it: "
                "create_agent(..., checkpointer=InMemorySaver())"
            )
        self._review = cast("Review | None", request.state.get(REVIEW_KEY))
        placeholder = (self._review or {}).get("placeholder")
        self._request = request.override(messages=[m for m in request.messages if m.id != placeholder or m.id is None])
        self._settled = reviews.settled_message(self._review, request.state["messages"])
        if self._settled is not None:
            self._refuse_text_for_structure(self._settled)

    @property
    def request(self) -> Request:
        """The agent's request, to its guarded model; or to one that answers with a person's decision."""
        return self._request.override(model=self._guard(self._request.model))

    def apart(self) -> AbstractContextManager[None]:
        """The time of the handler. Callbacks hear only the guarded model of all that runs there, if it may withhold."""
        return aside() if self._settings.withholds else nullcontext()

    def judged(self, response: Response) -> Response:
        """The response with every message of a model judged, or delivered by a guard, in this turn."""
        strangers = self._strangers(response)
        with self._judging():
            return self._with(response, [(message, model.invoke(given)) for message, model, given in strangers])

    async def ajudged(self, response: Response) -> Response:
        """Like `judged`, without blocking the event loop."""
        strangers = self._strangers(response)
        with self._judging():
            judged = [(message, await model.ainvoke(given)) for message, model, given in strangers]
            return self._with(response, judged)

    def _guard(self, model: BaseChatModel, *, stranger: bool = False) -> BaseChatModel:
        """A model whose messages are judged by this turn's rules; the callbacks of the turn hear it.

        A stranger's message is not one of the model that a `prompt_template` vouches for.
        """
        if self._settled is not None:
            return SettledModel.of(self._settled, model).aloud_in(self._context)
        # A message that waits for a person has a placeholder, and the agent is interrupted before it is read.
        advice = "" if self._settings.person else self._advice
        target = self._desk if self._settings.person is not None else self._target
        if stranger and advice:
            target = None  # nothing parses an answer of another model here
        terms = replace(
            self._settings.rules.terms,
            notify=self._verdicts.append,
            can_escalate=target is not None,
            continues=self._settings.person is None,  # who decides about a whole answer
        )
        rules = replace(self._settings.rules, terms=terms, target=target, irreplaceable=advice, notify=self._note)
        guard = guarded(
            model,
            rules,
            scorer=self._settings.scorer,
            estimator=self._settings.estimator,
            prompt_template=None if stranger else self._settings.prompt_template,
        )
        return guard if stranger and not rules.terms.withholds else guard.aloud_in(self._context)

    def _note(self, message: AIMessage, draft: AIMessage | None) -> None:
        self._delivered.append(Delivered(message, draft))

    def _strangers(self, response: Response) -> list[tuple[AIMessage, Runnable[Any, AIMessage], list[BaseMessage]]]:
        """The messages of a response that carry no decision of this turn, with a model and input to judge them."""
        strangers: list[tuple[AIMessage, Runnable[Any, AIMessage], list[BaseMessage]]] = []
        for message in response.result:
            if isinstance(message, AIMessage) and self._known(message) is None:
                records = [delivered.message.response_metadata.get(METADATA_KEY) for delivered in self._delivered]
                reused = message.response_metadata.get(METADATA_KEY) in records
                settled = SettledModel.of(without_record(message) if reused else message, self._request.model)
                model: Any = self._guard(settled, stranger=True)
                if self._request.tools and self._settled is None:
                    model = model.bind_tools(self._request.tools)
                strangers.append((message, model, self._messages))
        return strangers

    @property
    def _messages(self) -> list[BaseMessage]:
        system = self._request.system_message
        return [*([system] if system else []), *self._request.messages]

    def _known(self, message: AIMessage) -> Delivered | None:
        """The delivery of this message in this turn; a person's decision was taken before."""
        if self._settled is not None and equals(message, self._settled):
            return Delivered(self._settled, None)
        return next((known for known in reversed(self._delivered) if carries(message, known.message)), None)

    def _judging(self) -> AbstractContextManager[None]:
        """The time in which strangers are judged: a message that is delivered live anyway is not streamed again."""
        return nullcontext() if self._settings.withholds else aside()

    def _with(self, response: Response, judged: Sequence[tuple[AIMessage, AIMessage]]) -> Response:
        """The response with the delivered messages in strangers' places; a structure of a withheld one goes, too."""
        if not judged:
            return response
        replaced: dict[int, AIMessage] = {}
        for message, delivered in judged:
            shown = None if self._settings.withholds else message.id  # live, the graph's streams have shown its id
            changes = {"name": message.name, "id": shown or delivered.id}
            replaced[id(message)] = delivered.model_copy(update=changes)
        if self._settled is not None:
            self._delivered += [Delivered(message, None) for message in replaced.values()]
        result = [replaced.get(id(message), message) for message in response.result]
        if all(equals(message, delivered) for message, delivered in judged):
            return ModelResponse(result=result, structured_response=response.structured_response)
        return ModelResponse(result=[message for message in result if isinstance(message, AIMessage)])

    @property
    def _target(self) -> Target | None:
        """The escalation target. A chat model gets the request of the agent's model; others, that of this guard."""
        target = self._settings.rules.target
        if not isinstance(target, RunnableTarget) or target.chat_model is not None:
            return target
        return AskedByTheAgent(target, self._messages)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The decisions that were taken, as plain JSON. An observer's are reported as they are taken."""
        if self._settings.rules.terms.observes:
            return []
        held = [handed_on(request.verdict) for request in self._desk.held]
        return [verdict.metadata() for verdict in (held or self._verdicts)]

    def waiting(self, error: StructuredOutputValidationError) -> Response:
        """The response that LangChain could not read, where it is the placeholder of a message for a person.

        Raises:
            StructuredOutputValidationError: the model has not kept to its form.
        """
        if not self._desk.held:
            raise error
        return ModelResponse(result=[error.ai_message])

    def result(self, response: Response) -> Result:
        """The agent's result: the response, and the state of the review.

        Raises:
            LowConfidenceError: a message is withheld where a structured response is due.
            UnenforcedPolicyError: the structured response is not made of the messages that were judged.
        """
        message = next((message for message in response.result if isinstance(message, AIMessage)), None)
        if message is None:
            raise InputError("the agent's model returned no message, and UncertaintyMiddleware judges messages")
        known = self._known(message)
        review = self._desk.opened(message, None if known is None else known.draft)
        if review is None:
            self._refuse_text_for_structure(message)
        if self._settings.withholds:
            require_structure_of(response.result, response.structured_response)
        update: dict[str, Any] = {} if self._review is None else reviews.closing(self._review)
        if review is not None:
            update[REVIEW_KEY] = review
        update[JUDGED_KEY] = as_judged(response.result, self._request.state)
        return ExtendedModelResponse(response, Command(update=update))

    @property
    def _advice(self) -> str:
        """Why no text can replace a message, where the agent owes a structured response."""
        owed = self._request.response_format is not None
        return "The agent owes a structured response, and no text can replace it." if owed else ""

    def _refuse_text_for_structure(self, message: AIMessage) -> None:
        verdict = convert.stage_verdict(message)
        if verdict is not None and is_withheld(verdict) and self._advice:
            raise LowConfidenceError(verdict, draft=verdict.draft, advice=self._advice)


class SettledModel(AloudChatModel):
    """Answers with one message: a person's decision, or a message that came from elsewhere.

    The decision comes in a later step of the graph than the model's run. Its message must run its tools, be parsed and
    be streamed like any message of the agent's model, and all of that hangs on a run of a chat model.
    """

    message: AIMessage

    @classmethod
    def of(cls, message: AIMessage, model: BaseChatModel) -> SettledModel:
        """A model that answers with this message in another's place."""
        named = message.model_copy(update={"id": None})
        return cls(message=named, cache=False, verbose=False, profile=model.profile, name=model.get_name())

    @property
    def _llm_type(self) -> str:
        return "semgrad-guard-settled"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """The model itself: the message stays the same with any tools."""
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.message.model_copy())])

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=convert.as_chunk(self.message))


@dataclass(frozen=True, eq=False)
class AskedByTheAgent:
    """A target that gets the agent's messages: middleware nearer to the model may give the model others."""

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
