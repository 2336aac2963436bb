"""One message of an agent's model: the guarded model that is asked for it, and what the agent gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from langchain.agents.middleware.types import ExtendedModelResponse, ModelRequest, ModelResponse
from langchain.agents.structured_output import StructuredOutputValidationError
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables.config import ensure_config
from langgraph.types import Command

from langchain_semgrad_guard import agent_review
from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.agent_review import REVIEW_KEY, Review, ReviewDesk, SettledModel
from langchain_semgrad_guard.answers import Rules
from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.enforcement import EnforcingChatModel
from langchain_semgrad_guard.guarded_model import AroundChatModel
from langchain_semgrad_guard.hearing import handlers_of
from langchain_semgrad_guard.review import HumanReview
from langchain_semgrad_guard.targets import Asked, RunnableTarget, Said, Target
from semgrad_guard import Estimator, LanguageModel, Verdict
from semgrad_guard.errors import InputError, LowConfidenceError, UnenforcedPolicyError
from semgrad_guard.guard import is_withheld

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
        model = self._asked.model
        if self._settled is not None:
            return self._asked.override(model=SettledModel.of(self._settled, model))
        # A message that waits for a person has a placeholder, and the agent is interrupted before it is read.
        rules = replace(self._settings.rules, irreplaceable="" if self._settings.person else self._advice)
        target = self._desk if self._settings.person is not None else self._target
        terms = replace(rules.terms, notify=self._told.append, can_escalate=target is not None)
        scoring = {
            "scorer": self._settings.scorer,
            "estimator": self._settings.estimator,
            "prompt_template": self._settings.prompt_template,
        }
        return self._asked.override(model=guarded(model, replace(rules, terms=terms, target=target), **scoring))

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
        held = {id(each.verdict): each.verdict for each in self._desk.held}
        return [verdict.metadata() for verdict in (held.values() or self._told)]

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
        """
        review = self._desk.opened(_message(response))
        if review is None and self._told and is_withheld(self._told[-1]):
            self._refuse_text_for_structure(self._told[-1])
        update: dict[str, Any] = {} if self._review is None else agent_review.closing(self._review)
        if review is not None:
            update[REVIEW_KEY] = review
        return ExtendedModelResponse(response, Command(update=update)) if update else response

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

    def ask(self, asked: Sequence[Asked]) -> Sequence[Said]:
        """The target's answers."""
        return self.target.ask([replace(each, messages=self.messages) for each in asked])

    async def aask(self, asked: Sequence[Asked]) -> Sequence[Said]:
        """Like `ask`, without blocking the event loop."""
        return await self.target.aask([replace(each, messages=self.messages) for each in asked])


def guarded(model: BaseChatModel, rules: Rules, **scoring: Any) -> BaseChatModel:
    """A model whose runs end with what these rules make of its answers. Rules that it holds to already judge after."""
    given = {name: value for name, value in scoring.items() if value is not None}
    if isinstance(model, EnforcingChatModel) and (outer := model.carried) is not None:
        return AroundChatModel.around(guarded(model.bare, rules, **given)).guarded_by(outer)
    if isinstance(model, EnforcingChatModel) and model.rules is None and not given:
        return model.guarded_by(rules)
    return AroundChatModel.around(model, **given).guarded_by(rules)


def _require_one_judge(request: Request) -> None:
    heard = (*handlers_of(ensure_config().get("callbacks")), *handlers_of(request.model.callbacks))
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
