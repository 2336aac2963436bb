"""`UncertaintyRouter`: a model and a router as one step of a chain."""

from __future__ import annotations

from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBinding, RunnableBindingBase
from langchain_core.runnables.config import ensure_config

from langchain_semgrad_guard.answering import AnsweringChatModel
from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.enforcement import EnforcingChatModel
from langchain_semgrad_guard.scored_model import ScoredChatModel
from semgrad_guard import Estimator, LanguageModel, Policy, estimator_of
from semgrad_guard.errors import InputError
from semgrad_guard.guard import ABSTAIN_MESSAGE
from semgrad_guard.guard.modes import Mode


class UncertaintyRouter(RunnableBindingBase[LanguageModelInput, AIMessage]):
    """A chat model whose answers a policy lets through, hands on or withholds, on every path of a Runnable.

        prompt | UncertaintyRouter(ChatSemGrad(), Policy(threshold=0.004), escalate_to=larger) | StrOutputParser()

    It is the model with an `UncertaintyRouterCallback` attached: the same modes, decisions and metadata, and streams
    that are buffered where an answer may be withheld. Another chat model (the same weights behind a server) needs a
    `scorer`, which scores the text of its answers afterwards; a batch then asks it one question after the other.

    Args:
        llm: a `ChatSemGrad`, bound arguments included (`chat.bind_tools(...)`), or any other chat model together with
            `scorer`. An observer takes any chat model without one: answers that carry no score are reported so.
        policy: what to let through.
        escalate_to: any Runnable that takes the messages; see `UncertaintyRouterCallback`.
        mode: what to do with a decision: "enforce", "annotate", "observe" or "raise".
        abstain_message: delivered in place of an answer that is neither let through nor escalated.
        keep_draft: keep the text of withheld answers in the metadata (`draft`).
        scorer: the local copy of the weights that `llm` serves.
        estimator: of the scorer. By default, and for a `ChatSemGrad` that was made without one, it is the one that the
            policy was calibrated with, or else HybridGrad.
        prompt_template: the scorer's name for the prompts' form. A calibration made for the scorer's own answers
            ("chat") is refused by default; naming it here vouches for what cannot be checked from here: that `llm`
            serves these weights with this chat template and decodes as the calibrated model did.

    Raises:
        InputError: a model that carries no score, a scorer beside one that does, or no policy.
    """

    def __init__(
        self,
        llm: BaseChatModel | RunnableBinding[LanguageModelInput, AIMessage],
        policy: Policy,
        *,
        escalate_to: Runnable[Any, Any] | None = None,
        mode: Mode = "enforce",
        abstain_message: str = ABSTAIN_MESSAGE,
        keep_draft: bool = False,
        scorer: LanguageModel | None = None,
        estimator: Estimator | None = None,
        prompt_template: str | None = None,
    ) -> None:
        given = {"estimator": estimator, "prompt_template": prompt_template}
        scoring = {name: value for name, value in given.items() if value is not None}
        router = UncertaintyRouterCallback(
            policy, escalate_to, mode=mode, abstain_message=abstain_message, keep_draft=keep_draft
        )
        bound = _calibrated(_routable(llm, scorer, scoring, any_model=mode == "observe"), policy)
        super().__init__(bound=bound, kwargs={}, config={"callbacks": [router]})

    def _merge_configs(self, *configs: RunnableConfig | None) -> RunnableConfig:
        # LangChain's bindings let their callbacks hide those of the context: a node that calls the router without its
        # config would drop out of the trace, and out of the graph's streams.
        return super()._merge_configs(*map(ensure_config, configs))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Not by LangChain's `dumps`: weights and policies are objects of this process."""
        return False


def _calibrated(
    llm: Runnable[LanguageModelInput, AIMessage], policy: Policy
) -> Runnable[LanguageModelInput, AIMessage]:
    """The model; where nobody chose how it scores, a copy that scores as the policy's calibration did."""
    if isinstance(llm, RunnableBinding):
        return llm.model_copy(update={"bound": _calibrated(llm.bound, policy)})
    scored = isinstance(llm, AnsweringChatModel | ScoredChatModel)
    if not scored or policy.calibration is None or "estimator" in llm.model_fields_set:
        return llm
    return llm.model_copy(update={"estimator": estimator_of(policy.calibration)})


def _routable(
    llm: Runnable[LanguageModelInput, AIMessage],
    scorer: LanguageModel | None,
    scoring: dict[str, Any],
    *,
    any_model: bool,
) -> Runnable[LanguageModelInput, AIMessage]:
    """The model itself if its answers carry a score, and with a scorer around it if they do not."""
    model: Any = llm
    while isinstance(model, RunnableBinding):
        model = cast("RunnableBinding[Any, Any]", model).bound
    if not isinstance(model, BaseChatModel):
        raise InputError(f"a router takes a chat model, not a {type(model).__name__}")
    if isinstance(model, EnforcingChatModel):
        if scorer is not None or scoring:
            raise InputError(f"{type(model).__name__} scores its own answers: set scorer, estimator and template there")
        return llm
    if scorer is None and any_model:
        return llm
    if scorer is None:
        raise InputError(
            f"the answers of {type(model).__name__} carry no score. Use ChatSemGrad, or give the weights that it "
            "serves: UncertaintyRouter(llm, policy, scorer=LanguageModel.from_pretrained(...))"
        )
    if not isinstance(llm, BaseChatModel):
        raise InputError(
            f"a scorer goes around the {type(model).__name__} itself: bind arguments to the router instead, "
            "UncertaintyRouter(...).bind(...)"
        )
    return ScoredChatModel.of(llm, scorer, **scoring)
