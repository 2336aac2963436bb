"""POST /v1/completions and POST /v1/responses, as chat completions.

A text completion's prompt is a user's message, with the chat template around it: a guard's model and its calibration
are about chats, so that a bare continuation of a text is not offered. The verdict is where chat completions have it.

The items of a response are the parts of a chat's message. No response is kept here: each request holds its whole
conversation. The verdict is in `semgrad_guard` of the response and of its message and calls, and as JSON in
`metadata["semgrad_guard"]`, which clients keep that drop unknown fields.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from semgrad_guard.errors import InputError
from semgrad_guard.server.answers import KEY, SENTENCE_KEY
from semgrad_guard.server.completions import Json, Translation, require_none_of
from semgrad_guard.server.gate import HttpError
from semgrad_guard.server.protocol import Sent

# Text completions.

_OF_TEXTS: Mapping[str, str] = {
    "messages": "prompt",
    "messages.0.content": "prompt",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
"""The fields that a text completion names otherwise than a chat completion."""
_NOT_OF_TEXTS: Mapping[str, str] = {
    **{name: own for name, own in _OF_TEXTS.items() if "." not in name},
    **dict.fromkeys(("tools", "tool_choice"), ""),
}
_OWN = frozenset({"prompt", "logprobs", "echo", "suffix"})


class TextRequest(BaseModel):
    """The body of POST /v1/completions; its other fields are those of chat completions."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    model: StrictStr
    prompt: StrictStr | list[StrictStr]
    stream: StrictBool | None = None
    logprobs: StrictInt | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None


class TextTranslation(Translation):
    """A request for a text after a prompt."""

    prefix: ClassVar[str] = "cmpl-"

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The request with this body.

        Raises:
            ValidationError, InputError: it is none.
        """
        request = TextRequest.model_validate(body)
        require_none_of(body, _NOT_OF_TEXTS)
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if len(prompts) != 1 or not prompts[0]:
            raise InputError("prompt: a request is about one prompt that is not empty; send one for each").about(
                "prompt"
            )
        kept = {name: value for name, value in body.items() if name not in _OWN}
        if request.logprobs is not None:
            kept |= {"logprobs": True, "top_logprobs": request.logprobs}
        return cls({**kept, "messages": [{"role": "user", "content": prompts[0]}]}, _OF_TEXTS)

    def whole(self, completion: Json) -> Json:
        """As `Translation.whole`."""
        choices = [_text_choice(choice, choice["message"]) for choice in completion["choices"]]
        return {**completion, **_text_head(completion), "choices": choices}

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """As `Translation.events`."""
        async for chunk in chunks:
            choices = [_text_choice(choice, choice["delta"]) for choice in chunk["choices"]]
            shown = [one["text"] or one["finish_reason"] or one.get("reasoning_content") for one in choices]
            if not choices or any(shown):  # the first chunk of a chat names the role
                yield {**chunk, **_text_head(chunk), "choices": choices}


def _text_head(chunk: Json) -> Json:
    return {"id": chunk["id"].replace(Translation.prefix, TextTranslation.prefix), "object": "text_completion"}


def _text_choice(choice: Json, message: Json) -> Json:
    """One text. Where it was to be JSON and is withheld, the refusal is the text: there is no other place for it."""
    thought = message.get("reasoning_content")
    return {
        "index": choice["index"],
        "text": message.get("content") or message.get("refusal") or "",
        "logprobs": None if choice["logprobs"] is None else _text_logprobs(choice["logprobs"]),
        "finish_reason": choice["finish_reason"],
        **({"reasoning_content": thought} if thought else {}),
    }


def _text_logprobs(logprobs: Json) -> Json:
    """Log-probabilities in the older form, with the verdict on the answer or on a sentence."""
    record = {name: value for name, value in logprobs.items() if name not in ("content", "refusal")}
    if (entries := logprobs["content"]) is None:
        return {"tokens": None, "token_logprobs": None, "top_logprobs": None, "text_offset": None, **record}
    tokens: list[str] = [entry["token"] for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in entry.get("top_logprobs") or ()} for entry in entries
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
        **record,
    }


# Responses.

_OF_RESPONSES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
    "tool_choice.function": "tool_choice",
}
"""The fields that a response names otherwise than a chat completion."""
_NOT_OF_RESPONSES: Mapping[str, str] = {
    **{name: own for name, own in _OF_RESPONSES.items() if "." not in name},
    "n": "",
}
_KEPT_NOWHERE = ("previous_response_id", "conversation", "prompt", "background")
_LOGPROBS = "message.output_text.logprobs"
_ECHOED: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "reasoning", "temperature", "top_p")),
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
"""The fields of a request that its response repeats, with their defaults."""


class TextFormat(Sent):
    """The form of the text; that of JSON has a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    description: StrictStr | None = None
    strict: StrictBool | None = None
    form: dict[str, Any] | None = Field(default=None, alias="schema")


class TextSettings(Sent):
    """The text of the answer."""

    format: TextFormat | None = None
    verbosity: StrictStr | None = None


class Reasoning(Sent):
    """The reasoning before the answer; it is delivered whole, and no summary is written."""

    effort: StrictStr | None = None
    summary: StrictStr | None = None
    generate_summary: StrictStr | None = None


class ResponsesRequest(BaseModel):
    """The body of POST /v1/responses; its other fields are those of chat completions."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    model: StrictStr
    input: StrictStr | list[dict[str, Any]]
    instructions: StrictStr | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    stream: StrictBool | None = None
    max_output_tokens: StrictInt | None = Field(default=None, ge=1)
    include: list[StrictStr] | None = None
    top_logprobs: StrictInt | None = Field(default=None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, StrictStr] | None = None

    @property
    def chat(self) -> Json:
        """The body of the chat completion.

        Raises:
            InputError: the input holds items that no chat has.
        """
        form = None if self.text is None else self.text.format
        wants_logprobs = _LOGPROBS in (self.include or ()) or self.top_logprobs is not None
        translated = {
            "messages": self._turns[0],
            "tools": None if self.tools is None else [_nested(tool) for tool in self.tools],
            "tool_choice": _nested(self.tool_choice) if isinstance(self.tool_choice, dict) else self.tool_choice,
            "response_format": None if form is None else _response_format(form),
            "verbosity": None if self.text is None else self.text.verbosity,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": wants_logprobs or None,
            "top_logprobs": self.top_logprobs,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        given = {"model": self.model, "stream": self.stream, "metadata": self.metadata, **(self.model_extra or {})}
        return {name: value for name, value in (given | translated).items() if value is not None}

    @property
    def names(self) -> Mapping[str, str]:
        """The names of the places in this request's chat completion."""
        tools = {f"tools.{place}.function": f"tools.{place}" for place in range(len(self.tools or ()))}
        return {**_OF_RESPONSES, **tools, **self._turns[1]}

    @cached_property
    def _turns(self) -> tuple[list[Json], dict[str, str]]:
        """The messages of the conversation, and the client's names of their places.

        Raises:
            InputError: the input holds items that no chat has.
        """
        messages, names = list[Json](), dict[str, str]()

        def add(name: str, content_name: str, **message: Any) -> None:
            place = f"messages.{len(messages)}"
            names.update({place: name, f"{place}.content": content_name})
            messages.append(message)

        if self.instructions is not None:
            add("instructions", "instructions", role="system", content=self.instructions)
        if isinstance(self.input, str):
            add("input", "input", role="user", content=self.input)
            return messages, names
        for number, item in enumerate(self.input):
            kind, name = item.get("type") or "message", f"input.{number}"
            if kind == "message":
                add(name, f"{name}.content", role=item.get("role"), content=_content(item.get("content")))
            elif kind == "function_call":  # of the assistant's last turn, if no other turn is between them
                if not messages or messages[-1]["role"] != "assistant":
                    add(name, f"{name}.content", role="assistant", content=None)
                calls: list[Json] = messages[-1].setdefault("tool_calls", [])
                place = f"messages.{len(messages) - 1}.tool_calls.{len(calls)}"
                names.update({place: name, f"{place}.function": name})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                calls.append({"id": item.get("call_id"), "type": "function", "function": function})
            elif kind == "function_call_output":
                output = _content(item.get("output"))
                add(name, f"{name}.output", role="tool", tool_call_id=item.get("call_id"), content=output)
            elif kind != "reasoning":  # as chat templates leave earlier reasoning out
                raise InputError(
                    f"{name} is of the type {str(kind)[:40]!r}; this server reads messages, function calls, their "
                    "outputs and reasoning"
                ).about(name)
        return messages, names


def _content(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    return [_part(cast("Json", part)) if isinstance(part, dict) else part for part in cast("list[Any]", given)]


def _part(part: Json) -> Json:
    match part.get("type"):
        case "input_text" | "output_text":
            return {"type": "text", "text": part.get("text")}
        case "input_image":
            picture = {"url": part.get("image_url"), "detail": part.get("detail")}
            return {"type": "image_url", "image_url": {name: one for name, one in picture.items() if one is not None}}
        case "input_file":
            return {"type": "file", "file": {name: one for name, one in part.items() if name != "type"}}
        case _:
            return part


def _nested(sent: Json) -> Json:
    """A tool, or the choice of one, as chats have it: the function is a part of it."""
    if sent.get("type") != "function" or "function" in sent:
        return sent
    return {"type": "function", "function": {name: one for name, one in sent.items() if name != "type"}}


def _response_format(form: TextFormat) -> Json:
    described = form.model_dump(exclude_none=True, by_alias=True)
    kind = described.pop("type")
    if kind == "json_schema" and form.form is None:
        raise InputError("text.format.schema: it is missing").about("text.format.schema")
    return {"type": kind, "json_schema": described} if kind == "json_schema" else {"type": kind}


@dataclass(frozen=True)
class ResponsesTranslation(Translation):
    """A request for a response."""

    prefix: ClassVar[str] = "resp_"
    end: str = ""
    sent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    numbers: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The request with this body.

        Raises:
            ValidationError, InputError: it is none, or about a response that was kept.
        """
        if kept := [name for name in _KEPT_NOWHERE if body.get(name)]:
            raise InputError(
                f"{kept[0]}: this server keeps no responses, conversations or prompts; send the whole conversation as "
                "input"
            ).about(kept[0])
        require_none_of(body, _NOT_OF_RESPONSES)
        sent = {name: value for name, value in body.items() if name not in _KEPT_NOWHERE}
        request = ResponsesRequest.model_validate(sent)
        return cls(request.chat, request.names, sent=sent)

    def whole(self, completion: Json) -> Json:
        """As `Translation.whole`."""
        output, choice = _Output(completion), completion["choices"][0]
        for part in (output.add(choice["message"]), output.end(choice)):
            for _ in part:
                pass
        return self._response(output, choice, completion["usage"])

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """As `Translation.events`."""
        output, last, used = None, None, None
        async for chunk in chunks:
            made = list[Json]()
            if output is None:
                output = _Output(chunk)
                begun = self._response(output, None, None)
                made += [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
            for choice in chunk["choices"]:
                made += output.add(choice["delta"])
                if (sentence := chunk.get(SENTENCE_KEY)) is not None:
                    made[-1][SENTENCE_KEY] = sentence
                if choice["finish_reason"] is not None:
                    last = choice
                    made += output.end(choice)
            if (used := chunk.get("usage") or used) is not None and last is not None:
                response = self._response(output, last, used)
                made.append({"type": f"response.{response['status']}", "response": response})
            for event in made:
                yield {**event, "sequence_number": next(self.numbers)}

    def failed(self, problem: HttpError) -> Json:
        """As `Translation.failed`."""
        fields = {"code": problem.code, "message": problem.message, "param": problem.param}
        return {"type": "error", **fields, "sequence_number": next(self.numbers)}

    def _response(self, output: _Output, choice: Json | None, used: Json | None) -> Json:
        """The response as it is now; complete with the last `choice`, and the tokens that were `used`."""
        sent, status, cut, record = self.sent, "in_progress", None, None
        if choice is not None:
            cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(choice["finish_reason"])
            status, record = "incomplete" if cut else "completed", choice["logprobs"][KEY]
        verdict = {} if record is None else {KEY: json.dumps(record, ensure_ascii=False)}
        return {
            "id": output.name("resp"),
            "object": "response",
            "created_at": output.head["created"],
            "status": status,
            "error": None,
            "incomplete_details": None if cut is None else {"reason": cut},
            "model": output.head["model"],
            "output": list(output.items),
            "usage": None if used is None else _usage(used, record or {}),
            **{name: usual if sent.get(name) is None else sent[name] for name, usual in _ECHOED.items()},
            "metadata": {**(sent.get("metadata") or {}), **verdict},
            "previous_response_id": None,
            "store": False,
            **({} if record is None else {KEY: record}),
        }


def _usage(used: Json, record: Json) -> Json:
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": record.get("details", {}).get("reasoning_tokens") or 0},
        "total_tokens": used["total_tokens"],
    }


_PARTS: Mapping[str, tuple[str, Json, Json]] = {
    "reasoning_text": ("rs", {"type": "reasoning", "summary": []}, {}),
    "output_text": ("msg", {"type": "message", "role": "assistant"}, {"annotations": [], "logprobs": []}),
    "refusal": ("msg", {"type": "message", "role": "assistant"}, {}),
}
"""For each kind of text: the beginning of its item's id, the item's own fields, and those of its part."""


class _Output:
    """The items of a response, in the order in which they are written, and the events about them.

    An item has one part, and is complete when the next one begins. `head` is a chunk, whose id they share.
    """

    def __init__(self, head: Json) -> None:
        self.head, self.items = head, list[Json]()
        self._kind: str | None = None  # of the open item

    def name(self, kind: str) -> str:
        """An id."""
        return self.head["id"].replace(Translation.prefix, f"{kind}_")

    def add(self, delta: Json) -> Iterator[Json]:
        """Take in a part of a chat's message."""
        for name, kind in (
            ("reasoning_content", "reasoning_text"),
            ("content", "output_text"),
            ("refusal", "refusal"),
        ):
            if text := delta.get(name):
                yield from self._write(kind, text)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            item = {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._open("function_call", "fc", item)
            self.items[-1]["arguments"] = function["arguments"]
            yield self._about("function_call_arguments.delta", delta=function["arguments"])

    def end(self, choice: Json) -> Iterator[Json]:
        """Complete the last item; each message and call gets the verdict."""
        logprobs, length = choice["logprobs"], choice["finish_reason"] == "length"
        if not any(item["type"] != "reasoning" for item in self.items):
            yield from self._write("output_text", "")
        for item in self.items:
            for part in item.get("content", ()):
                part |= {"logprobs": logprobs["content"] or []} if part["type"] == "output_text" else {}
            if item["type"] != "reasoning":
                item[KEY] = logprobs[KEY]
        yield from self._close("incomplete" if length else "completed")

    def _write(self, kind: str, text: str) -> Iterator[Json]:
        if self._kind != kind:
            prefix, own, fields = _PARTS[kind]
            yield from self._open(kind, prefix, {**own, "content": []})
            self.items[-1]["content"].append({"type": kind, _field(kind): "", **fields})
            yield self._about("content_part.added", part={**self.items[-1]["content"][0]}, content_index=0)
        self.items[-1]["content"][0][_field(kind)] += text
        if text:
            more: Json = {"logprobs": []} if kind == "output_text" else {}
            yield self._about(f"{kind}.delta", content_index=0, delta=text, **more)

    def _open(self, kind: str, prefix: str, item: Json) -> Iterator[Json]:
        yield from self._close("completed")
        place = len(self.items)
        self.items.append({"id": f"{self.name(prefix)}_{place}", **item, "status": "in_progress"})
        self._kind = kind
        shown: Json = {**self.items[-1], **({"content": []} if "content" in item else {})}
        yield {"type": "response.output_item.added", "output_index": place, "item": shown}

    def _close(self, status: str) -> Iterator[Json]:
        if self._kind is None:
            return
        self._kind, item = None, self.items[-1]
        item["status"] = status
        for part in item.get("content", ()):
            more: Json = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            text = {_field(part["type"]): part[_field(part["type"])]}
            yield self._about(f"{part['type']}.done", content_index=0, **text, **more)
            yield self._about("content_part.done", content_index=0, part=part)
        if item["type"] == "function_call":
            yield self._about("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _about(self, kind: str, **fields: Any) -> Json:
        place = len(self.items) - 1
        return {"type": f"response.{kind}", "item_id": self.items[-1]["id"], "output_index": place, **fields}


def _field(kind: str) -> str:
    return "refusal" if kind == "refusal" else "text"
