"""`with_structured_output`: objects instead of text. A withheld or unfinished answer is an error, no half object."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any, Literal, cast, get_args

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableGenerator,
    RunnableMap,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
)
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_semgrad_guard.messages import stage_verdict
from semgrad_guard.errors import InputError, LowConfidenceError
from semgrad_guard.guard import is_withheld

Method = Literal["json_schema", "function_calling", "json_mode"]


def structured(
    chat: BaseChatModel, schema: dict[str, Any] | type, *, method: Method, include_raw: bool
) -> Runnable[Any, Any]:
    """The chat model followed by checks and a parser.

    Raises:
        InputError: an unknown method.
    """
    if method not in get_args(Method):
        raise InputError(f"method={method!r} is not known; use one of {', '.join(get_args(Method))}")
    options: dict[str, Any] = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}
    kind: Any = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    parser: BaseOutputParser[Any]
    if method == "function_calling":
        model = chat.bind_tools([schema], tool_choice="any", **options)
        by_name = JsonOutputKeyToolsParser(key_name=_name(schema), first_tool_only=True)
        parser = by_name if kind is None else PydanticToolsParser(tools=[kind], first_tool_only=True)
    else:
        form: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            named = {"name": _name(schema), "schema": convert_to_json_schema(schema)}
            form = {"type": "json_schema", "json_schema": named}
        model = chat.bind(response_format=form, **options)
        parser = JsonOutputParser() if kind is None else PydanticOutputParser(pydantic_object=kind)
    parse = RunnableGenerator(_delivered, _adelivered) | parser
    if not include_raw:
        return model | parse
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parse, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def structured_by(
    made: Runnable[Any, Any], model: BaseChatModel, guard: BaseChatModel, *, include_raw: bool
) -> Runnable[Any, Any]:
    """The steps that a model built for its structured output, around its guard.

    Raises:
        InputError: the model has no place in these steps that LangChain's own ways of building give it.
    """
    places = list[Any]()

    def around(step: Any) -> Any:
        held: Any = step  # of a type that no check narrows
        if step is model or (isinstance(step, RunnableBinding) and held.bound is model):
            places.append(step)
            guarded: Any = guard if step is model else held.model_copy(update={"bound": guard})
            return guarded if include_raw else guarded | RunnableGenerator(_delivered, _adelivered)
        if isinstance(step, RunnableSequence):
            return cast("Any", RunnableSequence(*map(around, held.steps)))
        if isinstance(step, RunnableParallel):
            return RunnableParallel({name: around(one) for name, one in held.steps__.items()})
        return held

    steps = around(made)
    if not places:
        raise InputError(
            f"{model.get_name()} builds its structured output in a way that cannot be guarded; bind a tool or a "
            "response_format to the guard and parse its answer"
        )
    return steps


def _name(schema: dict[str, Any] | type) -> str:
    return convert_to_openai_tool(schema)["function"]["name"]


def _delivered(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """The messages as they come, once each is known to be the model's own and, at the end, whole."""
    text = ""
    for message in messages:
        text += _checked(message, text)
        yield message


async def _adelivered(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    text = ""
    async for message in messages:
        text += _checked(message, text)
        yield message


def _checked(message: AIMessage, before: str) -> str:
    """A message's text.

    Raises:
        LowConfidenceError: a router put an abstention in its place.
        OutputParserException: the answer was cut before it was complete; parsers would repair it in silence.
    """
    verdict, text = stage_verdict(message), str(message.text)
    if verdict is not None and is_withheld(verdict):
        raise LowConfidenceError(verdict, draft=verdict.draft, advice=f"{text!r} is no object.")
    if message.response_metadata.get("finish_reason") == "length":
        whole = before + text
        try:
            json.loads(whole)
        except ValueError:
            raise OutputParserException(
                f"the answer reached max_tokens before it was complete: {whole!r}; raise max_tokens", llm_output=whole
            ) from None
    return text
