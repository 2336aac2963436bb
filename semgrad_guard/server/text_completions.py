"""POST /v1/completions as chat completions: a prompt is a user's message, with the chat template around it.

A guard's model and its calibration are about chats, so that a bare continuation of a text is not offered. The verdict
is in `choices[i].logprobs.semgrad_guard` and at the top level, as in chat completions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from itertools import accumulate
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from semgrad_guard.errors import InputError
from semgrad_guard.server.completions import Json, Translation, require_none_of

_NAMES: Mapping[str, str] = {
    "messages": "prompt",
    "messages.0.content": "prompt",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
"""The fields that a text completion names otherwise than a chat completion."""
_OF_CHATS: Mapping[str, str] = {
    **{name: own for name, own in _NAMES.items() if "." not in name},
    **dict.fromkeys(("tools", "tool_choice"), ""),
}
_OURS = frozenset({"prompt", "logprobs", "echo", "suffix"})


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
        require_none_of(body, _OF_CHATS)
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if len(prompts) != 1 or not prompts[0]:
            raise InputError("prompt: a request is about one prompt that is not empty; send one for each").about(
                "prompt"
            )
        kept = {name: value for name, value in body.items() if name not in _OURS}
        if request.logprobs is not None:
            kept |= {"logprobs": True, "top_logprobs": request.logprobs}
        return cls({**kept, "messages": [{"role": "user", "content": prompts[0]}]}, _NAMES)

    def whole(self, completion: Json) -> Json:
        """As `Translation.whole`."""
        choices = [_choice(choice, choice["message"]) for choice in completion["choices"]]
        return {**completion, **_head(completion), "choices": choices}

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """As `Translation.events`."""
        async for chunk in chunks:
            choices = [_choice(choice, choice["delta"]) for choice in chunk["choices"]]
            shown = [one["text"] or one["finish_reason"] or one.get("reasoning_content") for one in choices]
            if not choices or any(shown):  # the first chunk of a chat names the role
                yield {**chunk, **_head(chunk), "choices": choices}


def _head(chunk: Json) -> Json:
    return {"id": chunk["id"].replace(Translation.prefix, TextTranslation.prefix), "object": "text_completion"}


def _choice(choice: Json, message: Json) -> Json:
    """One text. Where it was to be JSON and is withheld, the refusal is the text: there is no other place for it."""
    thought = message.get("reasoning_content")
    return {
        "index": choice["index"],
        "text": message.get("content") or message.get("refusal") or "",
        "logprobs": None if choice["logprobs"] is None else _logprobs(choice["logprobs"]),
        "finish_reason": choice["finish_reason"],
        **({"reasoning_content": thought} if thought else {}),
    }


def _logprobs(logprobs: Json) -> Json:
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
