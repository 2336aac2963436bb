"""`guarded`: a guard around any Runnable that ends in a message or a text (a branch, a fallback, a remote agent).

The Runnable answers in the place of a chat model, so that everything else is the guard of a chat model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, cast

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, convert_to_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBinding, RunnableBindingBase, coerce_to_runnable
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.runnables.fallbacks import RunnableWithFallbacks
from pydantic import SkipValidation

from langchain_semgrad_guard.guarded_model import GuardedChatModel
from langchain_semgrad_guard.messages import AnyTool, message_of
from langchain_semgrad_guard.runs import AsyncRun, Config, SyncRun
from langchain_semgrad_guard.targets import bound_options, outside_a_graph
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Promise

Question = Callable[[Any], str | Sequence[BaseMessage]]
_AUTHOR = "the chain"
_QUESTIONS = ("question", "input", "query")


class RunnableChatModel(BaseChatModel):
    """A chat model whose answers a Runnable makes, of `given` or else of the messages."""

    runnable: Annotated[Any, SkipValidation]
    given: Annotated[Any, SkipValidation] = None

    @classmethod
    def of(cls, runnable: Any) -> BaseChatModel:
        """The model itself, bindings included; or one for a Runnable around models (retries, fallbacks)."""
        inside = runnable
        while isinstance(inside, RunnableBinding):
            inside = cast("RunnableBinding[Any, Any]", inside).bound
        return runnable if isinstance(inside, BaseChatModel) else cls.around(runnable)

    @classmethod
    def around(cls, runnable: Runnable[Any, Any]) -> RunnableChatModel:
        """Around any Runnable. LangChain's cache knows messages only, and not what was given."""
        return cls(runnable=runnable, name=runnable.get_name(), cache=False)

    @property
    def _llm_type(self) -> str:
        return "runnable"

    def bind_tools(self, tools: Sequence[AnyTool], **kwargs: Any) -> Any:
        """A copy whose Runnable is shown the tools.

        Raises:
            NotImplementedError: it takes none.
        """
        return self.model_copy(update={"runnable": _with_tools(self.runnable, tools, kwargs)})

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> ChatResult:
        with _explaining():
            return _result(self.runnable.invoke(self._input(messages), **_options(stop, kwargs)))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> ChatResult:
        with _explaining():
            return _result(await self.runnable.ainvoke(self._input(messages), **_options(stop, kwargs)))

    def _input(self, messages: list[BaseMessage]) -> Any:
        return messages if self.given is None else self.given


class GuardedChain(Runnable[Any, AIMessage]):
    """A Runnable whose last message is delivered only where a policy lets it through; see `guarded`."""

    def __init__(self, guard: GuardedChatModel, question: Question) -> None:
        self._guard, self._question = guard, question

    @property
    def promise(self) -> Promise | None:
        """The promise, as that of a `GuardedChatModel`."""
        return self._guard.promise

    def invoke(self, input: Any, config: Config = None, **kwargs: Any) -> AIMessage:
        """The answer to one input."""
        return self._for(input).invoke(self._question(input), config, **kwargs)

    async def ainvoke(self, input: Any, config: Config = None, **kwargs: Any) -> AIMessage:
        """Like `invoke`, on the event loop."""
        return await self._for(input).ainvoke(self._question(input), config, **kwargs)

    def stream(self, input: Any, config: Config = None, **kwargs: Any) -> Iterator[AIMessageChunk]:
        """The answer in one piece, after the decision about it."""
        return self._for(input).stream(self._question(input), config, **kwargs)

    async def astream(self, input: Any, config: Config = None, **kwargs: Any) -> AsyncIterator[AIMessageChunk]:
        """Like `stream`, on the event loop."""
        async for chunk in self._for(input).astream(self._question(input), config, **kwargs):
            yield chunk

    def _for(self, given: Any) -> GuardedChatModel:
        """The guard around the chain's answer to this input."""
        model = self._guard.model.model_copy(update={"given": given})
        return self._guard.model_copy(update={"model": model})


def guarded(
    chain: Runnable[Any, Any] | Callable[[Any], Any],
    policy: Policy,
    *,
    scorer: LanguageModel,
    question: Question | None = None,
    **options: Any,
) -> GuardedChain:
    """A guard around a Runnable: its last message is scored as the scorer's answer to the question, and decided about.

        guard = guarded(branch | model, Policy(threshold=0.004), scorer=LanguageModel.from_pretrained("pocket"))
        guard.invoke("Who built it?").response_metadata["semgrad_guard"]

    The chain may change the question, or answer from passages and by tools: the scorer reads the question and the
    answer only. Calibrate the guard (`calibrate_chain(guarded(...), ...)`). No handler hears the chain's own runs where
    an answer may be withheld.

    Args:
        chain: any Runnable, or function; its output is a message, a text, a mapping with an "answer", or a state with
            messages.
        policy: which answers to let through.
        scorer: the local model that reads the answers.
        question: finds the question (a text, or messages) in an input; by default, a text, messages, or a mapping with
            "messages", "question", "input" or "query".
        **options: others of `GuardedChatModel` (`mode`, `escalate_to`, `estimator`, `on_error`, ...).

    Raises:
        InputError: as `GuardedChatModel`; at a call, an input without a question, or an output of another kind.
    """
    made = RunnableChatModel.around(coerce_to_runnable(cast("Any", chain)))
    return GuardedChain(GuardedChatModel(made, policy, scorer=scorer, **options), question or _question)


def _with_tools(runnable: Any, tools: Sequence[AnyTool], kwargs: Mapping[str, Any]) -> Runnable[Any, Any]:
    """A Runnable around models whose models are shown the tools; LangChain's own `bind_tools` may lose the others."""
    if isinstance(runnable, RunnableWithFallbacks):
        backed = cast("RunnableWithFallbacks[Any, Any]", runnable)
        first, *others = (_with_tools(one, tools, kwargs) for one in backed.runnables)
        return backed.model_copy(update={"runnable": first, "fallbacks": others})
    if isinstance(runnable, RunnableBindingBase):
        binding = cast("RunnableBindingBase[Any, Any]", runnable)
        return binding.model_copy(update={"bound": _with_tools(binding.bound, tools, kwargs)})
    if isinstance(runnable, DynamicRunnable):
        dynamic = cast("DynamicRunnable[Any, Any]", runnable)
        shown = _with_tools(dynamic.default, tools, kwargs)
        return dynamic.bind(**bound_options(shown))
    bind = getattr(runnable, "bind_tools", None)
    if bind is None:
        raise NotImplementedError(f"a {type(runnable).__name__} takes no tools")
    return bind(tools, **kwargs)


def _question(given: Any) -> list[BaseMessage]:
    if isinstance(given, PromptValue):
        return given.to_messages()
    if isinstance(given, str | BaseMessage):
        return [HumanMessage(given) if isinstance(given, str) else given]
    if isinstance(given, Mapping):
        fields = cast("Mapping[str, Any]", given)
        if fields.get("messages"):
            return convert_to_messages(fields["messages"])
        text = next((fields[name] for name in _QUESTIONS if isinstance(fields.get(name), str)), None)
        if text is not None:
            return [HumanMessage(text)]
    elif isinstance(given, list | tuple):
        return convert_to_messages(cast("Sequence[Any]", given))
    raise InputError(
        "it is unknown which part of this input is the question; name it: guarded(..., question=lambda given: ...)"
    )


@contextmanager
def _explaining() -> Generator[None]:
    try:
        yield
    except KeyError as error:
        explained = outside_a_graph(error, author=_AUTHOR)
        if explained is None:
            raise
        raise explained from error


def _options(stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if stop is None else {**kwargs, "stop": stop}


def _result(output: Any) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message_of(output, author=_AUTHOR))])
