"""`ScoredChatModel`: any other chat model, its answers scored afterwards by a local copy of its weights."""

from __future__ import annotations

from typing import Annotated, Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import run_in_executor
from pydantic import ConfigDict, Field, SkipValidation

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.audience import only
from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.enforcement import EnforcingChatModel
from semgrad_guard import METADATA_KEY, Estimator, GenerationOptions, HybridGrad, LanguageModel, Verdict
from semgrad_guard.errors import EmptyResponseError, PromptTooLongError
from semgrad_guard.guard import assess, scoring_settings, template_name
from semgrad_guard.records import Conversation


class ScoredChatModel(EnforcingChatModel):
    """Asks `served`, then scores the text of its answer with `scorer` as if that had written it.

    Answers come whole, streams too, and those of a batch one after the other. A score made afterwards knows the text
    and not the decoding: `prompt_template` is therefore a name of its own, so that a calibration made for answers of
    `scorer` itself is refused. An answer that cannot be scored (no text, or too long for `scorer`) is unscored.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    served: Annotated[BaseChatModel, SkipValidation]
    scorer: LanguageModel
    estimator: Annotated[Estimator, SkipValidation] = Field(default_factory=HybridGrad)
    prompt_template: str = "served"

    @classmethod
    def of(cls, served: BaseChatModel, scorer: LanguageModel, **fields: Any) -> ScoredChatModel:
        """Around a copy of `served` that sends no tokens: they would be out before the score is known.

        LangChain's cache is left to `served`: what it holds are drafts, scored anew each time.
        """
        quiet = served.model_copy(update={"disable_streaming": True})
        return cls(served=quiet, scorer=scorer, cache=False, **fields)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        conversation = convert.to_conversation(messages)
        config = _config(run_manager.get_child() if run_manager else None)
        answer = self.served.invoke(messages, config, stop=stop, **kwargs)
        return self._scored(conversation, answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        conversation = convert.to_conversation(messages)
        config = _config(run_manager.get_child() if run_manager else None)
        answer = await self.served.ainvoke(messages, config, stop=stop, **kwargs)
        return await run_in_executor(None, self._scored, conversation, answer)

    def _scored(self, conversation: Conversation, answer: AIMessage) -> ChatResult:
        verdict = self._verdict(conversation, convert.message_text(answer))
        metadata = {**answer.response_metadata, METADATA_KEY: verdict.metadata()}
        message = answer.model_copy(update={"response_metadata": metadata})
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _verdict(self, conversation: Conversation, text: str) -> Verdict:
        try:
            evidence = self.scorer.evidence(conversation, text)
        except (EmptyResponseError, PromptTooLongError) as error:
            return self._unscored(text, str(error))
        return assess(self.scorer, self.estimator, evidence, text=text, prompt_template=self.prompt_template)

    def _unscored(self, text: str, reason: str) -> Verdict:
        identity = self.scorer.identity
        return Verdict(
            status="unscored",
            action="answer",
            text=text,
            estimator=self.estimator.name,
            model=identity.name,
            revision=identity.revision,
            fingerprint=identity.fingerprint,
            settings=scoring_settings(self.scorer, self.estimator, GenerationOptions()),
            prompt_template=template_name(self.scorer, self.prompt_template),
            reason=reason,
        )

    def _prepare(self) -> None:
        _ = self.scorer.identity

    @property
    def _llm_type(self) -> str:
        return "semgrad-guard-scored"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"served": self.served.get_name(), "scorer": self.scorer.name, "estimator": self.estimator.name}


def _config(callbacks: Callbacks) -> RunnableConfig:
    """The config of the served model's run: all handlers but the router, which judges the scored answer only."""
    tracers = only(callbacks, lambda handler: not isinstance(handler, UncertaintyRouterCallback))
    return cast("RunnableConfig", {"callbacks": tracers})
