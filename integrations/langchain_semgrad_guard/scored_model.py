"""`ScoredChatModel`: any other chat model, its answers scored afterwards by a local copy of its weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManager, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import run_in_executor
from langchain_core.tracers.base import BaseTracer
from langsmith.run_helpers import tracing_context  # pyright: ignore[reportUnknownVariableType]
from pydantic import BeforeValidator, ConfigDict, Field, SkipValidation

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.audience import is_audience
from langchain_semgrad_guard.docket import astepped, stepped
from langchain_semgrad_guard.enforcement import EnforcingChatModel
from semgrad_guard import METADATA_KEY, Estimator, GenerationOptions, HybridGrad, LanguageModel, Verdict
from semgrad_guard.errors import EmptyResponseError, PromptTooLongError
from semgrad_guard.guard import assess, scoring_settings, template_name
from semgrad_guard.guard.calibrated_estimator import as_estimator
from semgrad_guard.records import Conversation


class ScoredChatModel(EnforcingChatModel):
    """Asks `served`, then scores the text of its answer with `scorer` as if that had written it.

    Answers come whole unless a router only annotates them, and those of a batch one after the other. A score made
    afterwards knows the text and not the decoding: `prompt_template` is therefore a name of its own, so that a
    calibration made for answers of `scorer` itself is refused. An answer that cannot be scored (no text, or too long
    for `scorer`) is unscored.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    served: Annotated[BaseChatModel, SkipValidation]
    scorer: LanguageModel
    estimator: Annotated[Estimator, SkipValidation, BeforeValidator(as_estimator)] = Field(default_factory=HybridGrad)
    """An estimator; or a calibration or a policy, which stand for the one they were made for."""
    prompt_template: str = "served"

    @classmethod
    def of(cls, served: BaseChatModel, scorer: LanguageModel, **fields: Any) -> ScoredChatModel:
        """Around `served`. LangChain's cache is left to it: what it holds are drafts, scored anew each time."""
        return cls(served=served, scorer=scorer, cache=False, **fields)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        conversation = convert.to_conversation(messages)
        answer = self._quiet.invoke(messages, _inner(run_manager), stop=stop, **kwargs)
        return ChatResult(generations=[ChatGeneration(message=self._scored(conversation, answer))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        conversation = convert.to_conversation(messages)
        answer = await self._quiet.ainvoke(messages, _inner(run_manager), stop=stop, **kwargs)
        message = await run_in_executor(None, self._scored, conversation, answer)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        conversation, heard = convert.to_conversation(messages), list[AIMessage]()
        live = self.served.stream(messages, _inner(run_manager), stop=stop, **kwargs)
        for piece in stepped(live, _untraced):
            heard.append(piece)
            yield _passed_on(piece)
        yield self._last(conversation, heard)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        conversation, heard = convert.to_conversation(messages), list[AIMessage]()
        live = self.served.astream(messages, _inner(run_manager), stop=stop, **kwargs)
        async for piece in astepped(live, _untraced):
            heard.append(piece)
            yield _passed_on(piece)
        yield await run_in_executor(None, self._last, conversation, heard)

    @property
    def _quiet(self) -> BaseChatModel:
        """The served model without its tokens: where its answer is wanted whole it may have to be withheld."""
        return self.served.model_copy(update={"disable_streaming": True})

    def _last(self, conversation: Conversation, heard: Sequence[AIMessage]) -> ChatGenerationChunk:
        """The chunk that closes a live stream: the score of all that was said, and nothing else."""
        whole = AIMessage(content="".join(map(convert.message_text, heard)))
        scored = AIMessageChunk(
            content="", response_metadata=self._scored(conversation, whole).response_metadata, chunk_position="last"
        )
        return ChatGenerationChunk(message=self._decided(scored))

    def _scored(self, conversation: Conversation, answer: AIMessage) -> AIMessage:
        verdict = self._verdict(conversation, convert.message_text(answer))
        metadata = {**answer.response_metadata, METADATA_KEY: verdict.metadata()}
        return answer.model_copy(update={"response_metadata": metadata})

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


def _inner(run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> RunnableConfig:
    """The config of the served model's run: a child of ours, for tracers. All others hear one run, the scored one."""
    if run_manager is None:  # LangChain hands none to streams
        return {"callbacks": []}
    manager = CallbackManager(handlers=[], parent_run_id=run_manager.run_id)
    manager.set_handlers(
        [h for h in run_manager.inheritable_handlers if isinstance(h, BaseTracer) and not is_audience(h)]
    )
    manager.add_tags(run_manager.inheritable_tags)
    manager.add_metadata(run_manager.inheritable_metadata)
    return {"callbacks": manager}


def _untraced() -> AbstractContextManager[None]:
    """A served stream has no run to belong to; LangSmith would show it as a trace of its own."""
    return tracing_context(enabled=False)


def _passed_on(piece: AIMessage) -> ChatGenerationChunk:
    """A piece of the served stream, not yet the last: ours, with the score, follows."""
    chunk = piece if isinstance(piece, AIMessageChunk) else convert.as_chunk(piece)
    return ChatGenerationChunk(message=chunk.model_copy(update={"chunk_position": None}))
