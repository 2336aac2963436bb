"""How a chat model that is not ours is called, and how a local copy of its weights scores its answers."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from langchain_core.globals import get_llm_cache
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Call
from langchain_semgrad_guard.messages import openai_tools
from langchain_semgrad_guard.runs import inside, tracers_only, unheard
from semgrad_guard import LanguageModel
from semgrad_guard.adapters.calls import UNREAD_CALLS, AnswerForm, served_options
from semgrad_guard.errors import InputError, UnsupportedToolsError
from semgrad_guard.guard import Answerer, Iterated, ReportedScorer, Steps, Work, prompt_of
from semgrad_guard.records import PromptForm


def answered(model: BaseChatModel, call: Call) -> Steps[ChatResult]:
    """The model's answer, from LangChain's cache or made anew; only tracers hear its run.

    Runs that it makes inside itself are its draft's: no handler hears them where the draft may be withheld.
    """
    inside: Any = model  # the method that makes no run of LangChain's own has no public name
    given = (call.messages, call.stop, None)
    with _traced_run(model, call) as made:
        work = Work(
            lambda: inside._generate_with_cache(*given, **call.options),
            lambda: inside._agenerate_with_cache(*given, **call.options),
        )
        made.append((yield work.in_time()))
    return made[0]


class ServedPieces(Iterated[ChatGenerationChunk]):
    """The model's answer, piece by piece, where nothing is withheld. Only tracers hear runs that it makes inside.

    Raises:
        InputError: it is to give several answers, whose pieces could not be told apart.
    """

    def __init__(self, model: BaseChatModel, call: Call) -> None:
        count: Any = call.options.get("n", getattr(model, "n", None))
        if isinstance(count, int) and count > 1:
            raise InputError(convert.several_in_a_stream(count))
        inside: Any = model
        given = (call.messages, call.stop, None)
        super().__init__(
            lambda: inside._stream(*given, **call.options), lambda: inside._astream(*given, **call.options)
        )
        self._call = call

    def next(self) -> Work:
        """The next piece, as `Live.next`."""
        return Work.of(self._unheard)

    def _unheard(self) -> Steps[Any]:
        with tracers_only(self._call.inner):  # not while the caller has a piece
            return (yield super().next())


def name_of(model: BaseChatModel) -> str:
    """The name of the model that a chat model calls, or its own."""
    name: Any = getattr(model, "model_name", None) or getattr(model, "model", None)
    return name if isinstance(name, str) and name else model.get_name()


def options_of(model: BaseChatModel, call: Call) -> dict[str, Any]:
    """The options of a call to a model's server; the name of a cache that may answer in its place is one, too.

    A semantic cache returns the answer to another prompt, and the answer does not show it.
    """
    options = served_options(model, {**call.options, **({} if call.stop is None else {"stop": call.stop})})
    cache = get_llm_cache() if model.cache in (None, True) else model.cache
    kind = type(cache)
    is_exact = kind.__name__ in _EXACT_CACHES and kind.__module__.startswith("langchain")
    return options if cache is None or cache is False or is_exact else {**options, "cache": kind.__qualname__}


def scored(
    answerer: Answerer,
    messages: Sequence[BaseMessage],
    message: AIMessage,
    shown: Mapping[str, Any],
    options: Mapping[str, Any],
) -> AIMessage:
    """A message with its record, which replaces any that came with it.

    `shown` are the call's options for the scorer, `options` those that its server got.
    """
    text = convert.message_text(message)
    try:
        if message.tool_calls or message.invalid_tool_calls:
            raise InputError(UNREAD_CALLS)
        conversation, template_options = convert.to_conversation(messages), _template_options(shown)
    except InputError as error:
        return convert.decided(message, answerer.unscored(text, str(error)))
    cut, reasoning = bool(convert.was_cut(message)), convert.reasoning(message)
    draft = answerer.scored(conversation, text, template_options=template_options, cut=cut, reasoning=reasoning)
    verdict = draft.verdict.model_copy(update={"options": dict(options)})
    return convert.decided(convert.with_answer(message, verdict), verdict)


def reports(model: BaseChatModel, options: Mapping[str, Any]) -> bool:
    """Whether a chat model can be told to report the log-probabilities of its answers."""
    return "logprobs" in type(model).model_fields or bool(options.get("logprobs"))


def ends_whole(model: BaseChatModel, options: Mapping[str, Any]) -> bool:
    """Whether only the end of an answer decides: it may call tools, has a form of its own, or is one of several."""
    count: Any = options.get("n", getattr(model, "n", None))
    return (isinstance(count, int) and count > 1) or any(options.get(name) for name in _OF_WHOLE_ANSWERS)


def reporting(model: BaseChatModel, scorer: ReportedScorer) -> BaseChatModel:
    """A copy that requests them; a model that takes them as options of a call has these bound by its user."""
    fields = {name: value for name, value in scorer.request.items() if name in type(model).model_fields}
    return model.model_copy(update=fields)


def scored_as_reported(
    scorer: ReportedScorer,
    form: PromptForm | None,
    message: AIMessage,
    options: Mapping[str, Any],
    *,
    is_part: bool,
) -> AIMessage:
    """A message with its record, by the log-probabilities that its server reports (see `ReportedScorer.verdict`)."""
    text = convert.message_text(message)
    if message.tool_calls or message.invalid_tool_calls:
        return convert.decided(message, scorer.unscored(text, UNREAD_CALLS, options=dict(options)))
    cut, reasoning = convert.was_cut(message), convert.reasoning(message)
    facts: dict[str, Any] = {"options": options, "prompt": form, "cut": cut, "reasoning": reasoning}
    verdict = scorer.verdict(text, convert.logprobs_of(message), is_part=is_part, **facts)
    return convert.decided(message, verdict)


def reported_form(messages: Sequence[BaseMessage], shown: Mapping[str, Any]) -> PromptForm | None:
    """The form of a prompt whose template its server alone knows; None where it holds something else than text."""
    try:
        return prompt_of(convert.to_conversation(messages), _template_options(shown).get("tools", ()))
    except InputError:
        return None


def _template_options(shown: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the scorer's chat template: the tools.

    Raises:
        InputError: the tools are described in a form that is not known here.
    """
    try:
        tools = openai_tools(cast("Sequence[Any]", shown.get("tools") or ()))
    except Exception as error:
        raise InputError(f"the model's tools cannot be shown to the scorer ({error})") from error
    return AnswerForm.of(
        {"tools": tools, "tool_choice": "none" if shown.get("tool_choice") == "none" else None}
    ).template_options


def form_of(scorer: LanguageModel, messages: Sequence[BaseMessage], shown: Mapping[str, Any]) -> PromptForm | None:
    """The form of the scorer's prompt; None where the answer is unscored, with its own reason."""
    try:
        return scorer.render(convert.to_conversation(messages), **_template_options(shown)).form
    except (InputError, UnsupportedToolsError):
        return None


_OF_WHOLE_ANSWERS = ("tools", "functions", "response_format", "format")
_EXACT_CACHES = ("InMemoryCache", "SQLAlchemyCache", "SQLAlchemyMd5Cache", "SQLiteCache", "RedisCache")


@contextmanager
def _traced_run(model: BaseChatModel, call: Call) -> Generator[list[ChatResult]]:
    """The run of a served model, for tracers: its messages, its tokens, its time; its text only as a kept draft.

    It is opened here and not by LangChain, whose runs reach every handler of the context and end with the text.
    """
    made: list[ChatResult] = []
    if not call.inner.handlers:
        with unheard() if call.hides else tracers_only(call.inner):
            yield made
        return
    stop, options = call.stop, dict(call.options)
    manager = call.inner.copy()
    inner: Any = model  # LangChain's own `generate` describes a run by private names
    manager.add_metadata(dict(inner._get_ls_params(stop=stop, **options)), inherit=False)
    (run,) = manager.on_chat_model_start(
        inner._serialized,
        [call.messages],
        invocation_params=inner._get_invocation_params(stop=stop, **options),
        options={"stop": stop},
        name=model.get_name(),
        batch_size=1,
    )
    try:
        with unheard() if call.hides else tracers_only(inside(run)):
            yield made
    except BaseException as error:
        run.on_llm_error(error, response=LLMResult(generations=[]))
        raise
    generations = made[0].generations
    if call.hides:
        textless = [convert.textless(cast("AIMessage", generation.message)) for generation in generations]
        generations = [ChatGeneration(message=message) for message in textless]
    run.on_llm_end(LLMResult(generations=[[*generations]]))
