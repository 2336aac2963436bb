"""`DecidingChatModel`: what an attached router has to say while a run is still open."""

from __future__ import annotations

from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.callback import require_confidence
from langchain_semgrad_guard.docket import current_router, is_guarded
from langchain_semgrad_guard.judging import undecided
from semgrad_guard import METADATA_KEY

M = TypeVar("M", bound=AIMessage)


class DecidingChatModel(BaseChatModel):
    """Annotating and raising routers act inside the run: its trace ends with the annotated answer, or with the error.

    LangChain's cache is filled before they act and so holds the model's own answers, each judged anew. (A stream that
    an annotating router lets through live to an audience is cached as it was heard; `_decided` takes it back.)
    """

    def _decided(self, message: M) -> M:
        """A finished answer as its run may end with it. Subclasses pass the last chunk of a stream through this.

        Raises:
            LowConfidenceError: a raising router does not let it through.
        """
        router = current_router()
        if router is None or router.mode == "enforce":
            return _as_given(message)
        verdict = router.judge(LLMResult(generations=[[ChatGeneration(message=message)]]))
        if router.mode == "annotate":
            return convert.decided(message, verdict)
        require_confidence(verdict)
        return _as_given(message)

    def _decided_result(self, result: ChatResult) -> ChatResult:
        """The same in a result of our own: the model's objects may sit in a cache."""
        first, *rest = result.generations
        return result.model_copy(update={"generations": [self._decided_generation(first), *rest]})

    def _decided_generation(self, generation: ChatGeneration) -> ChatGeneration:
        message = generation.message
        if not isinstance(message, AIMessage):
            return generation
        return ChatGeneration(message=self._decided(message), generation_info=generation.generation_info)

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._decided_result(super()._generate_with_cache(messages, stop, run_manager, **kwargs))

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._decided_result(await super()._agenerate_with_cache(messages, stop, run_manager, **kwargs))

    def _convert_cached_generations(self, cache_val: list[Generation]) -> list[ChatGeneration]:
        # A cached answer is replayed to audiences before `_generate_with_cache` returns it.
        return [self._decided_generation(each) for each in super()._convert_cached_generations(cache_val)]

    # `streaming=True` and the like send tokens to every handler: none go out of an answer that may still be withheld.

    def _should_stream(
        self,
        *,
        async_api: bool,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> bool:
        return not is_guarded() and super()._should_stream(async_api=async_api, run_manager=run_manager, **kwargs)

    def _should_use_protocol_streaming(
        self,
        *,
        async_api: bool,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> bool:
        return not is_guarded() and super()._should_use_protocol_streaming(
            async_api=async_api, run_manager=run_manager, **kwargs
        )


def _as_given(message: M) -> M:
    """The message without an annotation that came back from a cache."""
    record: Any = message.response_metadata.get(METADATA_KEY)
    if record is None or record.get("enforced") is not False:
        return message
    verdict = convert.get_verdict(message)
    return message if verdict is None else convert.decided(message, undecided(verdict))
