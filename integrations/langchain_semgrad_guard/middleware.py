"""`UncertaintyMiddleware`: the guard of an agent whose model comes from elsewhere. It goes last in the list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage

from langchain_semgrad_guard.deciding import Deciding
from langchain_semgrad_guard.messages import stage_verdict
from langchain_semgrad_guard.router import UncertaintyRouterCallback
from langchain_semgrad_guard.served import GuardedChatModel
from semgrad_guard.errors import UnenforcedPolicyError

Request = ModelRequest[Any]
Response = ModelResponse[Any]


class UncertaintyMiddleware(AgentMiddleware[Any, Any, Any]):
    """Puts a guard around the model of each call, whichever middleware before it has chosen that model.

        create_agent("openai:gpt-5", tools, middleware=[..., UncertaintyMiddleware(router)])

    A message that is not let through calls no tool, so that the agent ends its turn with the abstain message. Put it
    last in the list: an answer from a model that a middleware behind it puts in is an `UnenforcedPolicyError`. An agent
    whose model is a `ChatSemGrad` or a `GuardedChatModel` with a router needs no middleware.

    Args:
        router: the rules.
        **options: others of `GuardedChatModel` (`scorer`, `estimator`, `by`, `on_doubt`, `carry`, `timeout`).

    Raises:
        InputError: it is no router.
    """

    def __init__(self, router: UncertaintyRouterCallback, **options: Any) -> None:
        super().__init__()
        self.router, self._options = UncertaintyRouterCallback.require(router), options

    def wrap_model_call(self, request: Request, handler: Callable[[Request], Response]) -> Response:
        """Call the guarded model."""
        return self._checked(handler(request.override(model=self._guarded(request.model))))

    async def awrap_model_call(self, request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Response:
        """Like `wrap_model_call`, on the event loop."""
        return self._checked(await handler(request.override(model=self._guarded(request.model))))

    def _guarded(self, model: Any) -> Any:
        if not isinstance(model, Deciding):
            return GuardedChatModel(model, self.router, **self._options)
        if model.router in (None, self.router):
            return model.model_copy(update={"router": self.router})
        raise UnenforcedPolicyError("the agent's model has another router than its UncertaintyMiddleware: give one")

    def _checked(self, response: Response) -> Response:
        for message in response.result:
            if isinstance(message, AIMessage) and not self._has_decided(message):
                raise UnenforcedPolicyError("a middleware behind this one has put in another model: put this one last")
        return response

    def _has_decided(self, message: AIMessage) -> bool:
        """Whether a message is as a model with this policy delivered it."""
        verdict, policy = stage_verdict(message), self.router.policy
        return verdict is not None and (verdict.threshold, verdict.details.calibration_id) == (
            policy.recorded_threshold,
            policy.calibration_id,
        )
